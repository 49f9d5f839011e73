"""The whole cache of one model: a store per kind of attention, and the recurrent states.

A sequence is a row in each store and a state; they are moved together. The life of a step is that
of `kvd.worker.cache.store`, with `views` as what the model is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.backend import Backend
from kvd.worker.cache.batch import BatchQuantizedKVCache, RectangleKVCache
from kvd.worker.cache.layout import Access, AttentionPart, Layout, StatePart
from kvd.worker.cache.pool_growth import lacks_room, make_room
from kvd.worker.cache.rectangle import gathering_bytes
from kvd.worker.cache.recurrent_states import StateStore
from kvd.worker.cache.rows import TAIL_TOKENS, Row
from kvd.worker.cache.scheme import PAGE_TOKENS, Scheme, full_pages
from kvd.worker.cache.snapshot import SequenceSnapshot, charge_of, freed_bytes, held_bytes
from kvd.worker.cache.store import KVStore


@dataclass(eq=False)
class SequenceRow:
    """One request's place in a model's cache."""

    rows: list[Row]
    """One in each store."""
    length: int = 0
    alive: bool = True


def no_floors(layers: int) -> list[Scheme | None]:
    """Let every layer go all the way down."""
    return [None] * layers


@dataclass(frozen=True)
class CacheSettings:
    """How a model's keys and values are kept."""

    schemes: tuple[Scheme, ...] = (Scheme(),)
    """The schemes from the top, where rows start, down."""
    floors: Callable[[int], Sequence[Scheme | None]] = no_floors
    """Given how many layers there are, the scheme below which each does not go."""
    quantized_start: int = 0
    """Rows shorter than so many tokens are not quantized."""
    max_size: int | None = None
    """Full attention sees only the newest so many tokens, of which ``keep`` are the first ones."""
    keep: int = 0
    scratch: int = 256 * 1024 * 1024
    """Bytes that a step may hold beside the cache: three quarters are for dense copies, one quarter
    is for stepping down, whose pools may stand above what they were while prompts are read."""

    @property
    def store_schemes(self) -> tuple[Scheme, ...]:
        """The levels of the stores: above the ladder, rows that are not quantized yet."""
        return ((Scheme(16, 16),) if self.quantized_start else ()) + self.schemes

    @property
    def prefill_scratch(self) -> int:
        """Bytes of dense copies."""
        return self.scratch - self.lowering_scratch

    @property
    def lowering_scratch(self) -> int:
        """Bytes that a step-down may take beyond what the pools have."""
        return self.scratch // 4

    def kind(self, kind: Kind) -> Kind:
        """Return how a kind of the model is served."""
        return Kind(self.max_size, self.keep) if kind == FULL and self.max_size else kind


class ModelCache:
    """All that a model keeps for its sequences.

    ``access`` says for each kind of the layout how the model reads it; ``batched`` whether it takes
    several rows in one pass.
    """

    def __init__(
        self,
        layout: Layout,
        settings: CacheSettings,
        *,
        access: Mapping[Kind, Access] | None = None,
        batched: bool = True,
    ) -> None:
        self.layout = layout
        self.settings = settings
        self.batched = batched
        self.access = {kind: (access or {}).get(kind, Access.PAGES) for kind in layout.kinds}
        self.stores: list[KVStore] = []
        self.backend: Backend | None = None
        """What attends in the place of plain operations, in stores that are read as pages."""
        self.states = StateStore(list(layout.states()))
        self._store_of = {kind: index for index, kind in enumerate(layout.kinds)}
        for kind in layout.kinds:
            self.stores.append(self._new_store(kind))
        self.sequences: list[SequenceRow] = []
        self.snapshots: list[SequenceSnapshot] = []
        self.limit_bytes: int | None = None
        """Up to which pools grow ahead of need, as `charged_bytes` counts; tails and states too.

        None: no limit.
        """
        self._attention_views: list[BatchQuantizedKVCache] = []
        self._views = self._make_views()
        self._prefilling: list[tuple[SequenceRow, int]] = []
        self._widest = PAGE_TOKENS
        """Tokens that a row brings in one step or between two flushes, as far as was seen."""
        for store in self.stores[1:]:
            store.copies = self.stores[0].copies

    def _new_store(self, kind: Kind) -> KVStore:
        settings = self.settings
        parts = [(entry, part) for entry, part in self.layout.attention() if part.kind == kind]
        floors = settings.floors(len(self.layout.entries))
        store = KVStore(
            [part.geometry for _, part in parts],
            settings.store_schemes,
            self.layout.dtype,
            kind=settings.kind(kind),
            floors=[floors[entry] for entry, _ in parts],
            quantized_start=settings.quantized_start,
            prefill_scratch=settings.prefill_scratch,
        )
        store.spare = self._spare
        store.reclaim = self._reclaim
        return store

    def _make_views(self) -> list[Any]:
        taken = dict.fromkeys(self.layout.kinds, 0)
        states = iter(self.states.caches)
        views: list[Any] = []
        for entry in self.layout.entries:
            parts: list[Any] = []
            for part in entry.parts:
                if isinstance(part, AttentionPart):
                    parts.append(self._view(part.kind, taken[part.kind]))
                    self._attention_views.append(parts[-1])
                    taken[part.kind] += 1
                else:
                    parts.append(next(states) if isinstance(part, StatePart) else KVCache())
            views.append(CacheList(*parts) if entry.composed else parts[0])
        return views

    def _view(self, kind: Kind, layer: int) -> BatchQuantizedKVCache:
        view = BatchQuantizedKVCache if self.access[kind] is Access.PAGES else RectangleKVCache
        return view(self.stores[self._store_of[kind]], layer, batched=self.batched)

    def views(self, _sequences: Sequence[SequenceRow]) -> list[Any]:
        """Return what the model is called with for these sequences: one object a cache entry."""
        return self._views

    # What it costs.

    @property
    def scheme(self) -> Scheme:
        """The scheme at the top of the ladder."""
        return self.settings.schemes[0]

    @property
    def growing(self) -> KVStore | None:
        """The store whose rows grow without end, if there is one."""
        return next((store for store in self.stores if not store.kind.bounded), None)

    @property
    def row_bytes(self) -> int:
        """Bytes that every sequence takes: tails, and states, which each step leaves anew."""
        return sum(store.row_bytes for store in self.stores) + self.states.charged_row_bytes

    @property
    def levels(self) -> int:
        """How many there are on the ladder."""
        return len(self.settings.schemes)

    def store_level(self, level: int) -> int:
        """Return the stores' level for one of the ladder; 0 is where rows start by themselves.

        Above the ladder there may be a level for rows that are not quantized yet.
        """
        return level + len(self.settings.store_schemes) - len(self.settings.schemes) if level else 0

    def pages_bytes_for(self, length: int, chunk: int = 0, level: int = 0) -> int:
        """Return the most bytes of pages that a sequence fills on its way to ``length`` tokens.

        With it, its share of the copy that growing a layer's pool takes, and what reading it as a
        rectangle takes beyond the scratch. ``chunk``: tokens that are prefilled at once, whose
        pages a window holds for a moment. ``level``: of the ladder, where it starts.
        """
        start = self.store_level(level)
        pages = sum(store.most_bytes(length, chunk, start) for store in self.stores)
        return pages + self._beyond_scratch(length, chunk)

    def own_bytes_for(self, start: int, length: int, chunk: int = 0, level: int = 0) -> int:
        """Return the most bytes of pages that one more sequence fills that goes on from another.

        From ``start`` tokens to ``length``, as `pages_bytes_for` counts. What was quantized before
        stays shared, where nothing falls out of a window or is converted on the way.
        """
        shared = sum(
            full_pages(start) * store.charge(self.store_level(level))
            for store in self.stores
            if not (store.kind.bounded or store.quantized_start)
        )
        return self.pages_bytes_for(length, chunk, level) - shared

    @property
    def _rectangles(self) -> list[int]:
        """The stores that are read as rectangles."""
        accesses = self.access.values()
        return [number for number, one in enumerate(accesses) if one is Access.RECTANGLES]

    def _beyond_scratch(self, length: int, chunk: int = 0) -> int:
        """Return what a sequence's rectangle of a layer takes beyond the scratch."""
        most = 0
        for store in (self.stores[number] for number in self._rectangles):
            paged = PAGE_TOKENS * store.kind.max_pages(length, chunk)
            loose = TAIL_TOKENS + chunk
            bytes_ = gathering_bytes(store.layers, paged, loose, paged + loose)
            most = max(most, bytes_ - store.prefill_scratch)
        return most

    @property
    def pages_bytes(self) -> int:
        """Bytes of the pools, used or not."""
        return sum(store.pages_bytes for store in self.stores)

    @property
    def charged_bytes(self) -> int:
        """Bytes of the pools, with the share of growing that `pages_bytes_for` counts."""
        return sum(store.charged_bytes for store in self.stores)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that sequences hold, frozen ones too."""
        return sum(store.used_bytes for store in self.stores)

    @property
    def level_bytes(self) -> tuple[int, ...]:
        """The same on each level of the ladder; dense pages count to its top."""
        above = len(self.settings.store_schemes) - self.levels
        found = [0] * self.levels
        for store in self.stores:
            for one in store.allocators:
                found[max(0, one.level - above)] += one.used * store.page_bytes(one.level)
        return tuple(found)

    @property
    def tail_slots(self) -> int:
        """Sequences that there are tails for, or states."""
        places = max(len(self.sequences), self.states.places)
        return max([places, *(store.tail_slots for store in self.stores)])

    @property
    def tails_bytes(self) -> int:
        """Bytes of tails and states."""
        return sum(store.tails_bytes for store in self.stores) + self.states.nbytes

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the frozen sequences' tails and states."""
        return sum(one.nbytes for one in self.snapshots)

    @property
    def snapshot_charge(self) -> int:
        """Bytes that only frozen sequences hold: tails, states, and pages as charged."""
        return self.snapshot_bytes + sum(store.idle_charge for store in self.stores)

    @property
    def nbytes(self) -> int:
        """Bytes of pools, tails and states, frozen ones too."""
        return self.pages_bytes + self.tails_bytes + self.snapshot_bytes

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a sequence's tails and states, frozen where prefill has come to a page's end."""
        tails = sum(store.row_bytes for store in self.stores)
        return tails * PAGE_TOKENS // TAIL_TOKENS + self.states.row_bytes

    def checkpoint_charge(self, length: int) -> int:
        """Return the bytes that a checkpoint at a length comes to hold beside who left it.

        Its tails and states; the pages that the windows of who left it will pass, and those that a
        dense start will leave.
        """
        leaving = sum(
            store.kind.max_pages(length) * store.charge()
            for store in self.stores
            if store.kind.bounded or length <= store.quantized_start
        )
        return self.checkpoint_bytes + leaving

    @property
    def pages_idle(self) -> int:
        """Pages that only frozen sequences hold, of all kinds."""
        return sum(one.idle for store in self.stores for one in store.allocators)

    @property
    def pages_used(self) -> int:
        """Pages that sequences hold, frozen ones too, of all kinds."""
        return sum(one.used for store in self.stores for one in store.allocators)

    @property
    def pages_total(self) -> int:
        """Pages that there are, of all kinds."""
        return sum(one.capacity for store in self.stores for one in store.allocators)

    @property
    def flushes(self) -> int:
        """How often pools were written."""
        return max((store.flushes for store in self.stores), default=0)

    def _spare(self) -> int:
        if self.limit_bytes is None:
            return 1 << 62
        tails = self.tail_slots * self.row_bytes + self.snapshot_bytes
        reading = 0
        if self._rectangles:
            reading = sum(
                self._beyond_scratch(one.length + self._widest, self._widest)
                for one in self.sequences
            )
        return self.limit_bytes - self.charged_bytes - tails - reading

    def _reclaim(self) -> None:
        for store in self.stores:
            store.give_back_ahead()

    # Sequences.

    def new_row(self, level: int = 0) -> SequenceRow:
        """Return an empty sequence, on this level of the ladder."""
        start = self.store_level(level)
        sequence = SequenceRow([store.new_row(start) for store in self.stores])
        self.states.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def free(self, sequence: SequenceRow, *, clean: bool = True) -> None:
        """Give a sequence's memory back (`KVStore.free`). No step in flight may still read it."""
        sequence.alive = False
        for store, row in zip(self.stores, sequence.rows, strict=True):
            store.free(row, clean=clean)
        self.states.remove(sequence)
        self.sequences.remove(sequence)

    def discard(self) -> None:
        """Free all sequences but the frozen ones, whatever a step that failed has left in them.

        Nothing of it is used again, and what nobody holds any more is given back.
        """
        for view in self._attention_views:
            view.forget()
        for sequence in self.sequences:
            sequence.alive = False
        self.sequences = []
        self._prefilling = []
        for store in self.stores:
            store.discard()
        self.shrink()

    # Sequences that stand still.

    can_freeze = True

    def snapshot(self, sequence: SequenceRow) -> SequenceSnapshot:
        """Return what a sequence is now: pages and states by reference, tails copied.

        The device must be idle.
        """
        rows = []
        with ExitStack() as undo:  # where memory is short in one store, none keeps a part
            for store, row in zip(self.stores, sequence.rows, strict=True):
                rows.append(store.snapshot(row))
                undo.callback(store.drop, rows[-1])
            snapshot = SequenceSnapshot(rows, self.states.snapshot(sequence), sequence.length)
            undo.pop_all()
        self.snapshots.append(snapshot)
        return snapshot

    def restore(self, snapshot: SequenceSnapshot) -> SequenceRow:
        """Return a new sequence with the content of a frozen one, which stays as it is.

        The device must be idle. Whatever the new one computes is to the bit what the one that was
        frozen computes, or would have.
        """
        if not snapshot.alive:
            raise ValueError("the frozen sequence was dropped")
        rows = []
        with ExitStack() as undo:
            for store, row in zip(self.stores, snapshot.rows, strict=True):
                rows.append(store.restore(row))
                undo.callback(store.free, rows[-1])
            undo.pop_all()
        sequence = SequenceRow(rows, snapshot.length)
        self.states.restore(sequence, snapshot.state)
        self.sequences.append(sequence)
        return sequence

    def drop(self, snapshot: SequenceSnapshot) -> None:
        """Give a frozen sequence's memory back, at any time: no step reads it."""
        snapshot.alive = False
        for store, row in zip(self.stores, snapshot.rows, strict=True):
            store.drop(row)
        self.snapshots.remove(snapshot)

    def keep(self, snapshot: SequenceSnapshot) -> SequenceSnapshot:
        """Take in a frozen sequence that was made from bytes; it holds its pages from now on."""
        for store, row in zip(self.stores, snapshot.rows, strict=True):
            store.keep(row)
        self.snapshots.append(snapshot)
        return snapshot

    def unlowered(self, snapshot: SequenceSnapshot) -> bool:
        """Return whether it is as prefilling left it: nothing was stepped down since."""
        return all(
            store.unlowered(row) for store, row in zip(self.stores, snapshot.rows, strict=True)
        )

    def held_bytes(self, snapshot: Collection[SequenceSnapshot]) -> int:
        """Return the bytes of all that these hold; pages that they share count once."""
        return held_bytes(self.stores, snapshot)

    def charge_of(self, snapshot: SequenceSnapshot) -> int:
        """Return the bytes that one holds, pages as `charged_bytes` counts them."""
        return charge_of(self.stores, snapshot)

    def freed_bytes(self, snapshot: Collection[SequenceSnapshot]) -> int:
        """Return the bytes that would come free if all of these were dropped."""
        return freed_bytes(self.stores, snapshot)

    # Steps.

    def passes(self, sequences: Sequence[SequenceRow]) -> list[list[int]]:
        """Return which sequences decode together, by their places in the list.

        All, unless their rectangles would pass the scratch: then those of about one length, as few
        groups as come of filling one after the other.
        """
        numbers = self._rectangles
        everyone = list(range(len(sequences)))
        if not numbers or self._fits(sequences, numbers):
            return [everyone]
        groups: list[list[int]] = [[]]
        for place in sorted(everyone, key=lambda one: sequences[one].length):
            group = [*groups[-1], place]
            if groups[-1] and not self._fits([sequences[one] for one in group], numbers):
                group = [place]
                groups.append(group)
            groups[-1] = group
        return [sorted(group) for group in groups]

    def _fits(self, sequences: Sequence[SequenceRow], numbers: list[int]) -> bool:
        for store, rows in (
            (self.stores[number], [one.rows[number] for one in sequences]) for number in numbers
        ):
            paged = [PAGE_TOKENS * (len(row.pages) + row.at_the_end) for row in rows]
            most = max(
                tokens + row.tail_length + 1 for tokens, row in zip(paged, rows, strict=True)
            )
            loose = TAIL_TOKENS * len(rows)
            bytes_ = gathering_bytes(store.layers, sum(paged), loose, len(rows) * most)
            if bytes_ > store.prefill_scratch:
                return False
        return True

    def begin_decode(self, sequences: list[SequenceRow], batch: int | None = None) -> None:
        """Start a forward pass of one token for each sequence, padded to ``batch``."""
        for index, store in enumerate(self.stores):
            store.begin_decode([one.rows[index] for one in sequences], batch)
        self.states.begin(sequences, batch or len(sequences))
        for sequence in sequences:
            sequence.length += 1

    def begin_prefill(self, sequence: SequenceRow, count: int) -> None:
        """Start a forward pass of ``count`` tokens of one sequence; `finish_prefill` ends it."""
        self._widest = max(self._widest, count)
        if self._rectangles and self._spare() < 0:
            self._reclaim()  # what pools grew ahead of need, the rectangle needs now
        for store, row in zip(self.stores, sequence.rows, strict=True):
            store.begin_prefill(row, count)
        self.states.begin([sequence], 1)
        self._prefilling = [(sequence, count)]

    @property
    def can_group(self) -> bool:
        """Whether several sequences can be prefilled in a pass: padding leaves nothing behind.

        Rectangles are gathered for one row a pass, and recurrent states would take the padding in.
        """
        paged = all(access is Access.PAGES for access in self.access.values())
        return self.batched and paged and not self.states.parts

    def begin_group(self, sequences: list[SequenceRow], counts: list[int], width: int) -> None:
        """Start a forward pass of chunks of several sequences, each padded to ``width`` tokens.

        Only where `can_group` says so; `finish_prefill` ends it.
        """
        for index, store in enumerate(self.stores):
            store.begin_group([one.rows[index] for one in sequences], counts, width)
        self._prefilling = list(zip(sequences, counts, strict=True))

    def end_pass(self) -> None:
        """Take the states that the forward pass left; call it behind every one."""
        self.states.end()
        for view in self._attention_views:
            view.forget()

    def finish_prefill(self) -> None:
        """Evaluate the chunks and write them: the device must otherwise be idle."""
        if not self._prefilling:
            raise RuntimeError("no prefill step is under way")
        prefilled, self._prefilling = self._prefilling, []
        mx.eval(self.arrays())
        for store in self.stores:
            store.finish_prefill()
        for sequence, count in prefilled:
            sequence.length += count

    def undo_prefill(self) -> bool:
        """Forget a pass over chunks that failed before anything of it was written.

        Returns whether its sequences are as they were; recurrent states are not.
        """
        for view in self._attention_views:
            view.forget()
        self._prefilling = []
        undone = [store.undo_prefill() for store in self.stores]
        return all(undone) and not self.states.parts

    def needs_flush(self, sequences: list[SequenceRow]) -> bool:
        """Return whether a flush must come before these sequences' next step."""
        return any(
            store.needs_flush([one.rows[index] for one in sequences])
            for index, store in enumerate(self.stores)
        )

    def arrays(self) -> list[mx.array]:
        """Everything that steps leave lazy, for `mx.async_eval`."""
        return [
            *(array for store in self.stores for array in store.arrays()),
            *self.states.arrays(),
        ]

    def flush(self) -> None:
        """Write the next page of all sequences that have its tokens; the device must be idle."""
        for store in self.stores:
            store.flush()

    def make_room(self, seconds: float, clock: Callable[[], float]) -> None:
        """Grow pools ahead of the next flush (`growth.make_room`); the device must be idle."""
        end = clock() + seconds
        for store in self.stores:
            make_room(store, end - clock(), clock)
            if clock() >= end:
                return

    @property
    def lacks_room(self) -> bool:
        """Whether `make_room` would do something."""
        return any(lacks_room(store) for store in self.stores)

    def use(self, page_product: Callable[..., mx.array], backend: Backend | None = None) -> None:
        """Multiply pages in this way from now on, where the backend does not attend."""
        for store, access in zip(self.stores, self.access.values(), strict=True):
            store.page_product = page_product
            store.backend = backend if access is Access.PAGES else None
        self.backend = backend

    # Giving memory back.

    def compact(self, pages: int = 0) -> int:
        """Cut pools down to what is in use; return the bytes given back.

        The growing kind keeps room for ``pages`` pages. The device must be idle.
        """
        return sum(store.compact(0 if store.kind.bounded else pages) for store in self.stores)

    def cut_tails(self) -> None:
        """Give back the places of sequences that are gone; the device must be idle."""
        for store in self.stores:
            store.cut_tails()
        self.states.drop_gone()

    def shrink(self, pages: int = 0) -> None:
        """Give memory back when nobody runs; the growing kind keeps room for ``pages`` pages.

        What frozen sequences hold stays.
        """
        for store in self.stores:
            store.shrink(0 if store.kind.bounded else pages)
        self.states.clear()

    @property
    def unit_bytes(self) -> int:
        """What memory is counted in where it is reserved: a page of the growing kind, charged.

        Without such a kind, what a sequence takes in any case.
        """
        return self.growing.charge() if self.growing else max(1, self.row_bytes)

    def check(self) -> None:
        """Assert the invariants of all stores."""
        for store in self.stores:
            store.check()
        for sequence in self.sequences:
            assert all(row.length == sequence.length for row in sequence.rows)
        for snapshot in self.snapshots:
            assert snapshot.alive
            assert all(row.alive and row.length == snapshot.length for row in snapshot.rows)
        for index, store in enumerate(self.stores):
            assert store.snapshots == [snapshot.rows[index] for snapshot in self.snapshots]
