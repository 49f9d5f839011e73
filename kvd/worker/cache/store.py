"""The layers of one kind: rows, pages and tails of all of them, moved together.

The life of a step::

    begin_decode(rows), begin_prefill(row, count)       host integers change, the step is set
    or begin_group(rows, counts, width)
        the model runs; each layer appends and attends  lazy
    ...                                                 up to 64 decode steps
    flush()                                             drained: pools are written

A row reads a page from a length of its own on, and a flush has written it by then: all that wait
for theirs with the first one that needs it. So what a row attends to never depends on when a flush
comes or who shares the batch (`rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import mlx.core as mx
import numpy as np

from kvd.worker.cache import flush as flushing
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.backend import Backend
from kvd.worker.cache.layer import LayerStore, Placement
from kvd.worker.cache.packed import page_product
from kvd.worker.cache.page_list import PageList, places_of
from kvd.worker.cache.pages import PageAllocator, PageId
from kvd.worker.cache.prefill_group import PrefillGroup, prefill_group
from kvd.worker.cache.rows import TAIL_TOKENS, Row
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.cache.snapshot import RowSnapshot
from kvd.worker.cache.steps import (
    DecodeStep,
    LevelTable,
    PrefillStep,
    decode_step,
    level_tables,
    prefill_step,
)

SLAB_PAGES = 64
"""Pools grow by at least this many pages, so that growing (a copy) stays rare."""


SLICE_PAGES = 16
"""Pages that are converted at once; dense copies of them, of one layer, are the scratch."""


@dataclass
class Copies:
    """Dense copies that steps have made, or will when they are evaluated."""

    nbytes: int = 0


@dataclass
class _Arrival:
    """Pages of one level that a flush writes."""

    level: int
    filled: list[Row]
    """A row for each page that chunks have filled."""
    early: list[Row]
    """Rows whose next page comes from their tails."""
    pages: list[PageId] = field(default_factory=list)

    @property
    def kept(self) -> list[int]:
        """Which of those that chunks have filled are still wanted."""
        return [at for at, row in enumerate(self.filled) if row.alive]

    @property
    def count(self) -> int:
        """How many pages are written."""
        return len(self.kept) + len(self.early)

    def placement(self) -> Placement:
        """Return where they go."""
        slots = [page.slot for page in self.pages]
        return Placement(self.level, slots, self.kept, [row.slot for row in self.early])

    def hand_over(self) -> None:
        """Let the rows hold them."""
        kept = self.kept
        for at, page in zip(kept, self.pages, strict=False):
            self.filled[at].pages.append(page)
        for row, page in zip(self.early, self.pages[len(kept) :], strict=True):
            row.early = [page]


class KVStore:
    """Keys and values of every row, for the layers of one kind, in pages on a ladder of schemes.

    ``ladder[level]`` is a level's scheme; new rows start at the top, level 0. ``floors``, one a
    layer, are schemes below which a delicate layer does not go on either side, at any level.
    ``dtype`` is that of the activations; ``prefill_scratch`` the bytes of dequantized layers that
    a prefill step may hold at once. With ``quantized_start`` the top level is for rows shorter
    than so many tokens: a row leaves it before the first step that finds it as long.
    """

    def __init__(
        self,
        layers: list[LayerGeometry],
        schemes: Scheme | Sequence[Scheme],
        dtype: mx.Dtype,
        *,
        kind: Kind = FULL,
        floors: Sequence[Scheme | None] | None = None,
        quantized_start: int = 0,
        prefill_scratch: int = 256 * 1024 * 1024,
    ) -> None:
        self.schemes = (schemes,) if isinstance(schemes, Scheme) else tuple(schemes)
        self.dtype = dtype
        self.kind = kind
        self.quantized_start = quantized_start
        self.prefill_scratch = prefill_scratch
        self.page_product = page_product
        """How pages are multiplied; the self-check replaces it where the device lacks it."""
        self.backend: Backend | None = None
        """What attends in the place of plain operations; None: nothing does."""
        self.layers = [
            LayerStore(
                geometry,
                [scheme if floor is None else scheme.at_least(floor) for scheme in self.schemes],
                dtype,
            )
            for geometry, floor in zip(layers, floors or [None] * len(layers), strict=True)
        ]
        self.allocators = [PageAllocator(level) for level in self.levels]
        self.spare: Callable[[], int] | None = None
        """How many bytes, as `charge` counts, pools may grow ahead of need; None: no limit.

        What rows need is theirs in any case: who admits them sees that it fits.
        """
        self.reclaim: Callable[[], None] = self.give_back_ahead
        """What to do where pools must grow and others hold the room for it ahead of need."""
        self.rows: list[Row] = []
        self.snapshots: list[RowSnapshot] = []
        self.step: DecodeStep | PrefillStep | PrefillGroup | None = None
        self.flushes = 0
        self.goals: dict[int, int] = {}
        """By level, the capacity that its pools are growing to (`kvd.worker.cache.pool_growth`)."""
        self._free_slots: list[int] = []
        self._dirty_slots: set[int] = set()
        self._tail_slots = 0
        self._tables: tuple[tuple[int, list[Row]], list[LevelTable]] | None = None
        self._page_list: tuple[tuple[int, list[Row]], PageList] | None = None
        self._places: dict[Row, np.ndarray] = {}
        """Of rows whose pages are as they were: their part of tables and lists."""
        self._epoch = 0
        self.copies = Copies()

    # What it costs.

    @property
    def levels(self) -> range:
        """All levels of the ladder."""
        return range(len(self.schemes))

    @property
    def scheme(self) -> Scheme:
        """The scheme at the top, where new rows start."""
        return self.schemes[0]

    def page_bytes(self, level: int = 0) -> int:
        """Bytes of one page in all layers."""
        return sum(self.layer_page_bytes(level))

    def layer_page_bytes(self, level: int = 0) -> tuple[int, ...]:
        """Bytes of one page in each layer."""
        return self._layer_page_bytes[level]

    @cached_property
    def _layer_page_bytes(self) -> list[tuple[int, ...]]:
        # Asked for in every step, by all that count memory.
        return [
            tuple(layer.geometry.page_bytes(layer.pools[level].scheme) for layer in self.layers)
            for level in self.levels
        ]

    def most_bytes(self, length: int, chunk: int = 0, level: int = 0) -> int:
        """Return the most bytes of pages that one row fills on its way to ``length`` tokens.

        Each page with its share of the copy that growing a layer's pool takes. ``chunk``: tokens
        that are prefilled at once, whose pages a window holds for a moment. ``level``: where it
        starts.
        """
        first = level or (1 if self.quantized_start else 0)
        pages = self.kind.max_pages(length, chunk)
        bytes_ = pages * self.charge(first)
        if first > level:
            dense = self.kind.max_pages(min(length, self.quantized_start + chunk), chunk)
            # For a moment both: dense pages, and what they become.
            bytes_ = max(bytes_, dense * (self.charge(0) + self.charge(1)))
        return bytes_

    def charge(self, level: int = 0) -> int:
        """Return what a page is charged with: itself, and its share of growing a layer's pool."""
        return self.page_bytes(level) + max(self.layer_page_bytes(level))

    @property
    def charged_bytes(self) -> int:
        """Bytes of the pools, with the share of growing that `most_bytes` counts."""
        return sum(self._coming(one) * self.charge(one.level) for one in self.allocators)

    @property
    def tail_slots(self) -> int:
        """Rows that there are tails for."""
        return self._tail_slots

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's tail in all layers."""
        return sum(layer.geometry.dense_bytes(TAIL_TOKENS) for layer in self.layers)

    @property
    def pages_bytes(self) -> int:
        """Bytes of the pools, also while one of them is being resized."""
        return sum(pool.nbytes for layer in self.layers for pool in layer.pools)

    @property
    def used_bytes(self) -> int:
        """Bytes of the pages that rows hold, frozen ones too."""
        return sum(one.used * self.page_bytes(one.level) for one in self.allocators)

    @property
    def idle_charge(self) -> int:
        """Bytes of the pages that only frozen rows hold, as `charge` counts."""
        return sum(one.idle * self.charge(one.level) for one in self.allocators)

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the frozen rows' tails."""
        return sum(row.nbytes for row in self.snapshots)

    @property
    def tails_bytes(self) -> int:
        """Bytes of the tails."""
        return self._tail_slots * self.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of pools and tails: exactly what their arrays hold."""
        return self.pages_bytes + self.tails_bytes + self.snapshot_bytes

    # Rows come and go by integers.

    def new_row(self, level: int = 0) -> Row:
        """Return an empty row, whose pages will be on this level."""
        if not self._free_slots:
            self._add_tail()
        row = Row(self._free_slots.pop(0), level, anchored=self.kind.anchored_pages)
        if row.slot in self._dirty_slots:
            self._dirty_slots.remove(row.slot)
            for layer in self.layers:
                layer.clear_tail(row.slot)
        self.rows.append(row)
        return row

    def fork(self, row: Row) -> Row:
        """Return a new row with the same content: pages by reference, the tail copied.

        As `freeze`, `thaw` and `drop`.
        """
        snapshot = self.snapshot(row)
        try:
            return self.restore(snapshot)
        finally:
            self.drop(snapshot)

    def snapshot(self, row: Row) -> RowSnapshot:
        """Return what a row is now: pages by reference, the tail's tokens copied; evaluated.

        The device must be idle. Pages are never written again once they are full, so sharing them
        needs no copy, ever. A row that has outgrown the top level leaves it, as before a step.
        """
        self._leave_top([row] if self.outgrown(row) else [])
        tails = [layer.copy_tail(row.slot, row.tail_length) for layer in self.layers]
        mx.eval(tails)
        snapshot = RowSnapshot(tails=tails)
        snapshot.become(row)
        self.keep(snapshot)
        return snapshot

    def keep(self, snapshot: RowSnapshot) -> None:
        """Let a frozen row hold its pages."""
        self._retain(snapshot)
        self.snapshots.append(snapshot)

    def restore(self, snapshot: RowSnapshot) -> Row:
        """Return a new row with the content of a frozen one, which stays; the device must be idle.

        What it computes from then on is to the bit what the row would have that was frozen.
        """
        if not snapshot.alive:
            raise ValueError("the frozen row was dropped")
        row = self.new_row()
        try:
            for layer, (keys, values) in zip(self.layers, snapshot.tails, strict=True):
                layer.fill_tail(row.slot, keys, values)
        except BaseException:
            self.free(row, clean=False)
            raise
        row.become(snapshot)
        self._retain(row)
        return row

    def drop(self, snapshot: RowSnapshot) -> None:
        """Give a frozen row's pages and tail back, at any time: no step reads it."""
        if not snapshot.alive:
            raise ValueError("the frozen row was dropped already")
        snapshot.alive = False
        self._release(snapshot, snapshot.pages)
        self.snapshots.remove(snapshot)

    def _retain(self, row: Row) -> None:
        for page in row.pages:
            self.allocators[page.level].retain(page, snapshot=row.is_snapshot)

    def give_up_early(self, row: Row) -> None:
        """Give back what was written early of a row: its tail has the tokens."""
        self._release(row, row.early)
        row.early = []

    def _release(self, row: Row, pages: Iterable[PageId]) -> None:
        for page in pages:
            self.allocators[page.level].release(page, snapshot=row.is_snapshot)

    @property
    def holders(self) -> list[Row]:
        """All who hold pages."""
        return [*self.rows, *self.snapshots]

    def can_trim(self, row: Row, count: int) -> bool:
        """Return whether the row still has all that it saw ``count`` tokens ago."""
        length = row.length - count
        if length < 0 or not row.skipped:
            return length >= 0
        oldest = row.start(row.anchored) if len(row.pages) > row.anchored else row.tail_start
        return self.kind.low(length) >= oldest

    def trim(self, row: Row, count: int) -> None:
        """Take a row's newest tokens back. The device must be idle.

        A page that is cut becomes dense again: its head goes into the tail, as attention saw it.
        """
        if not self.can_trim(row, count):
            raise ValueError(f"{count} tokens cannot be taken back from {row.length}")
        self.give_up_early(row)
        length = row.length - count
        cut = None
        while row.tail_start > length:
            cut = row.pages.pop()
            rest = length - row.tail_start
            if rest > 0:
                for layer in self.layers:
                    layer.refill_tail(row.slot, cut, rest)
            self._release(row, [cut])
        row.length = length
        row.trimmed = True
        self._changed([row])

    def free(self, row: Row, *, clean: bool = True) -> None:
        """Give a row's pages and tail back. No step in flight may still read them.

        Not ``clean``: its tail may hold NaN, which no mask keeps from a product (0 x NaN is NaN);
        it is cleared before another row gets it. Pages are overwritten whole.
        """
        if not row.alive:
            raise ValueError("the row is free already")
        row.alive = False
        if not clean:
            self._dirty_slots.add(row.slot)
        self._release(row, row.held)
        self.rows.remove(row)
        self._free_slots.append(row.slot)
        self._free_slots.sort()
        self._changed([row])

    def discard(self) -> None:
        """Free all rows but the frozen ones, whatever state a step that failed left them in.

        `shrink` gives their memory back.
        """
        for row in self.rows:
            row.alive = False
        self.rows = []
        self.changed()
        for allocator in self.allocators:
            allocator.release_running()

    # Steps.

    def begin_decode(self, rows: list[Row], batch: int | None = None) -> DecodeStep:
        """Start a forward pass of one token for each row; lengths count it from now on.

        ``batch`` is the number of sequences that the model will see: rows, then padding. Raises
        ``ValueError`` if a row needs a flush before (`needs_flush`); nothing has changed then.
        """
        tables = partial(self._tables_of, list(rows))
        step = decode_step(rows, tables, batch or len(rows), self._tail_slots, self.kind)
        if step.turned:
            # By their own lengths too, since it shows in how pages are shared out among threads.
            self._leave_behind(step.turned, 1)
            self._changed(step.turned)
        if self.backend is not None:
            backend = self.backend.decode(self.layers, self.kind, rows, self._pages_of(rows))
            step = replace(step, backend=backend)
        self.step = step
        if step.turned and not (step.backend and step.backend.moves_tails):
            slots = mx.array([row.slot for row in step.turned])
            for layer in self.layers:
                layer.move_up(slots)
        return step

    def _tables_of(self, rows: list[Row]) -> list[LevelTable]:
        key = (self._epoch, rows)
        if self._tables is None or self._tables[0] != key:
            self._tables = (key, level_tables(self._places_of(rows)))
        return self._tables[1]

    def _pages_of(self, rows: list[Row]) -> PageList:
        """Return the same for backends."""
        key = (self._epoch, list(rows))
        if self._page_list is None or self._page_list[0] != key:
            self._page_list = (key, PageList.joined(self._places_of(rows)))
        return self._page_list[1]

    def _places_of(self, rows: Iterable[Row]) -> list[np.ndarray]:
        found = []
        for row in rows:
            if row not in self._places:
                self._places[row] = places_of(row)
            found.append(self._places[row])
        return found

    def begin_prefill(self, row: Row, count: int) -> PrefillStep:
        """Start a forward pass of ``count`` tokens of one row; `finish_prefill` ends it."""
        self.give_up_early(row)
        self.step = step = self._with_backend(prefill_step(row, count))
        self.copies.nbytes = 0
        return step

    def _with_backend(self, step: PrefillStep) -> PrefillStep:
        if self.backend is None:
            return step
        return replace(step, backend=self.backend.prefill(self.kind, step.row, step.count))

    def begin_group(self, rows: list[Row], counts: list[int], width: int) -> PrefillGroup:
        """Start a forward pass of several rows' chunks, each padded to ``width`` tokens.

        `finish_prefill` ends it.
        """
        for row in rows:
            self.give_up_early(row)
        step = prefill_group(rows, counts, width)
        self.step = step = replace(step, steps=tuple(map(self._with_backend, step.steps)))
        self.copies.nbytes = 0
        return step

    def note_scratch(self, nbytes: int) -> bool:
        """Count a dense copy of a prefill step; return whether it is time to evaluate."""
        self.copies.nbytes += nbytes
        if self.copies.nbytes < self.prefill_scratch:
            return False
        self.copies.nbytes = 0
        return True

    def claim_scratch(self, nbytes: int) -> bool:
        """Count dense copies that are about to be made; return whether earlier ones must go before.

        They go when what was computed from them is evaluated, that of steps in flight too.
        """
        before = self.copies.nbytes
        beyond = before > 0 and before + nbytes > self.prefill_scratch
        self.copies.nbytes = nbytes if beyond else before + nbytes
        return beyond

    def finish_prefill(self) -> None:
        """Evaluate the chunks and write them: the device must otherwise be idle."""
        step, self.step = self.step, None
        if not isinstance(step, PrefillStep | PrefillGroup):
            raise TypeError("no prefill step is under way")
        self.finish_chunks(step.steps if isinstance(step, PrefillGroup) else [step])

    def finish_chunks(self, steps: Sequence[PrefillStep]) -> None:
        """Count the chunks of all these rows and write their pages, in one flush."""
        mx.eval(self.arrays())
        filled = []
        for step in steps:
            step.row.length += step.count
            filled += [step.row] * step.new_pages
        self._write(filled, reading=[step.row for step in steps])
        self._leave_behind(step.row for step in steps if step.row.alive)

    def undo_prefill(self) -> bool:
        """Forget a prefill step that failed before `finish_prefill`; return whether there was one.

        The rows are as they were: a chunk changes nothing before it is written.
        """
        if not isinstance(self.step, PrefillStep | PrefillGroup):
            return False
        self.step = None
        for layer in self.layers:
            layer.pending.clear()
            layer.new_tails.clear()
        return True

    # The flush.

    def needs_flush(self, rows: list[Row]) -> bool:
        """Return whether one of these rows lacks its next page, or is to leave the top."""
        return any((row.at_the_end and not row.early) or self.outgrown(row) for row in rows)

    def first_level(self, length: int) -> int:
        """Return the level of a row of this length that nobody has stepped down."""
        return 1 if 0 < self.quantized_start <= length else 0

    def unlowered(self, row: Row) -> bool:
        """Return whether a row, and each of its pages, is on the level of its length."""
        level = self.first_level(row.length)
        return row.level == level and all(page.level == level for page in row.pages)

    def outgrown(self, row: Row) -> bool:
        """Return whether a row is to leave the top level before it goes on."""
        return row.level < self.first_level(row.length)

    def arrays(self) -> list[mx.array]:
        """Everything that steps leave lazy, for `mx.async_eval`: tails, and pages of prompts."""
        return [array for layer in self.layers for array in layer.lazy_arrays()]

    def flush(self) -> None:
        """Write the next page of all rows that have its tokens; the device must be idle."""
        self._write([])

    def _write(self, filled: list[Row], *, reading: Collection[Row] = ()) -> None:
        """Write pages: a row of ``filled`` for each that a chunk has filled, and early ones.

        ``filled`` is in the order of the layers' own lists; those who are ``reading`` get new
        tails, and nothing early.
        """
        self.copies.nbytes = 0
        outgrown = [row for row in self.rows if self.outgrown(row)]
        for row in outgrown:
            self.give_up_early(row)  # it is written anew, on the level that the row goes to
        due = [row for row in self.rows if row.wants_early and row not in reading]
        arrivals = [self._arrival(level, filled, due) for level in self.levels]
        self._make_ready({one.level: one.count for one in arrivals})
        placements = []
        for one in arrivals:
            if one.count:
                one.pages = self.take_pages(one.level, one.count)
                placements.append(one.placement())
        flushing.flush(self.layers, placements)
        for one in arrivals:
            one.hand_over()
        self._leave_top(outgrown)
        if filled:
            self._changed(filled)
        self.flushes += 1

    def _arrival(self, level: int, filled: list[Row], due: list[Row]) -> _Arrival:
        waiting = [row for row in filled if row.level == level]
        early = [row for row in due if max(row.level, self.first_level(row.length)) == level]
        return _Arrival(level, waiting, early)

    def _leave_behind(self, rows: Iterable[Row], coming: int = 0) -> None:
        """Free the pages of these rows that no query sees behind the one that is ``coming``.

        Steps in flight may still read them: nobody writes there before the device is idle.
        """
        if not self.kind.bounded:
            return
        for row in rows:
            count = row.outdated(self.kind.low(row.length - coming))
            gone = row.pages[row.anchored : row.anchored + count]
            del row.pages[row.anchored : row.anchored + count]
            row.skipped += count
            self._release(row, gone)
            if gone:
                self._changed([row])

    def _leave_top(self, rows: list[Row]) -> None:
        """Quantize rows that have reached the length for it.

        Who shares their pages and has not reached it keeps them dense, as if it were alone.
        """
        if not rows:
            return
        self._make_ready({1: len(_at_the_top(rows))})
        due = _at_the_top(rows)  # where room had to be made for them, pages moved
        for row in rows:
            row.level = 1
            if row.early and row.early[0].level == 0:
                self.give_up_early(row)
        for start in range(0, len(due), SLICE_PAGES):
            self.convert(0, 1, due[start : start + SLICE_PAGES], rows)

    def changed(self) -> None:
        """Note that rows have other pages than before: tables are built anew."""
        self._epoch += 1
        self._places.clear()

    def _changed(self, rows: Iterable[Row]) -> None:
        """Note that only these have."""
        self._epoch += 1
        for row in rows:
            self._places.pop(row, None)

    # Pools grow and shrink while the device is idle, one layer at a time.

    def take_pages(self, level: int, count: int) -> list[PageId]:
        """Take pages of a level, growing its pools where they are too small."""
        allocator = self.allocators[level]
        if not allocator.can_take(count):
            self._grow(allocator, allocator.used + count)
        return allocator.take(count)

    def _make_ready(self, wanted: Mapping[int, int]) -> None:
        """See that so many pages of each level can be taken; pages may move for it.

        Where the limit has no room, all pools give back what they grew ahead of need: rows are
        admitted on what they need, on whatever level and of whatever kind.
        """
        missing = sum(
            max(0, one.used + wanted.get(one.level, 0) - self._coming(one)) * self.charge(one.level)
            for one in self.allocators
        )
        tight = self.spare is not None and missing > max(0, self.spare())
        if tight:
            self.reclaim()
        for level, count in wanted.items():
            allocator = self.allocators[level]
            if not allocator.can_take(count):
                self._grow(allocator, allocator.used + count, tight=tight)

    def _coming(self, allocator: PageAllocator) -> int:
        """Return the capacity that is charged: what there is, or what it is growing to."""
        return max(allocator.capacity, self.goals.get(allocator.level, 0))

    def _grow(self, allocator: PageAllocator, needed: int, *, tight: bool = False) -> None:
        wanted = max(needed, self.goals.pop(allocator.level, 0) or self.ahead(allocator))
        if tight:  # and so the next one that lacks room finds some
            wanted = (needed + wanted) // 2
        for layer in self.layers:
            layer.pools[allocator.level].grow(wanted)
        allocator.grow(wanted)  # last: where memory is short there are no slots without storage

    def ahead(self, allocator: PageAllocator) -> int:
        """Return the capacity that a pool grows to ahead of need, as far as `spare` goes."""
        wanted = allocator.capacity + max(SLAB_PAGES, allocator.capacity // 4)
        if self.spare is not None:
            room = self.spare() // self.charge(allocator.level)
            wanted = min(wanted, allocator.capacity + max(0, room))
        return wanted

    def convert(
        self, source: int, target: int, pages: list[PageId], rows: Iterable[Row] | None = None
    ) -> None:
        """Bring pages of one level to another, for all rows that hold them or for some.

        The device must be idle. Whatever goes wrong, all of them are on one level or the other.
        """
        new = self.take_pages(target, len(pages))
        try:
            for layer in self.layers:
                layer.move(
                    source, target, [page.slot for page in pages], [page.slot for page in new]
                )
        except BaseException:
            for page in new:
                self.allocators[target].release(page)
            raise
        self._replace_pages(
            dict(zip(pages, new, strict=True)), self.holders if rows is None else rows
        )

    def _replace_pages(self, new: dict[PageId, PageId], rows: Iterable[Row]) -> None:
        """Put freshly taken pages in the place of others, in these rows."""
        for row in rows:
            for pages in (row.pages, row.early):
                for index, page in enumerate(pages):
                    if page in new:
                        pages[index] = new[page]
                        self.allocators[new[page].level].retain(new[page], snapshot=row.is_snapshot)
                        self.allocators[page.level].release(page, snapshot=row.is_snapshot)
        for page in new.values():
            self.allocators[page.level].release(page)  # the hold of the taking
        self.changed()

    def compact(self, pages: int = 0) -> int:
        """Move the pages of every level together and cut its pools; return the bytes given back.

        The top level keeps room for ``pages`` pages, less what lower levels take of that. Pages in
        use move within their pools; the device must be idle.
        """
        before = self.pages_bytes
        self.goals.clear()
        lower = sum(one.used * self.charge(one.level) for one in self.allocators[1:])
        pages -= -(-lower // self.charge())
        for allocator in self.allocators:
            kept = pages if allocator.level == 0 else 0
            self._cut(allocator, max(allocator.used, kept))
        return before - self.pages_bytes

    def give_back_ahead(self) -> None:
        """Cut pools down to what is used, but for levels that rows are being stepped down to."""
        goals = {
            row.level for row in self.holders if any(page.level < row.level for page in row.pages)
        }
        for allocator in self.allocators:
            if allocator.level not in goals and self._coming(allocator) > allocator.used:
                self.goals.pop(allocator.level, None)
                self._cut(allocator, allocator.used)

    def _cut(self, allocator: PageAllocator, capacity: int) -> None:
        """Move a level's pages together, and cut its pools; one layer's copies at a time."""
        if moves := allocator.packing():
            self._move_within(allocator, moves)
        capacity = min(allocator.capacity, capacity)
        allocator.cut(capacity)
        for layer in self.layers:
            layer.pools[allocator.level].cut(capacity)

    def _move_within(self, allocator: PageAllocator, moves: dict[int, int]) -> None:
        level = allocator.level
        for layer in self.layers:
            layer.move(level, level, list(moves), list(moves.values()))
        allocator.moved(moves)
        for row in self.holders:
            row.pages, row.early = (
                [
                    PageId(level, moves[page.slot])
                    if page.level == level and page.slot in moves
                    else page
                    for page in pages
                ]
                for pages in (row.pages, row.early)
            )
        self.changed()

    def shrink(self, pages: int = 0) -> None:
        """Keep room for ``pages`` pages, or what frozen rows hold; give all other memory back.

        No running row may be left.
        """
        if self.rows:
            raise ValueError(f"{len(self.rows)} rows are still there")
        self.step = None
        self._free_slots = []
        self._dirty_slots = set()
        self._tail_slots = 0
        self._tables = None
        self._page_list = None
        for layer in self.layers:
            layer.drop_tails()
        self.compact(pages)
        top = self.allocators[0]  # the level of new rows
        if top.capacity < pages and not self.snapshots:
            for layer in self.layers:
                layer.pools[0].grow(pages)
            top.grow(pages)

    def cut_tails(self) -> None:
        """Give back tails that no row has; the device must be idle."""
        if not self._free_slots:
            return
        free = iter(self._free_slots)
        count = len(self.rows)
        for row in sorted(self.rows, key=lambda one: -one.slot):
            if row.slot >= count:
                target = next(free)
                for layer in self.layers:
                    layer.move_tail(row.slot, target)
                row.slot = target
        for layer in self.layers:
            layer.cut_tails(count)
        self._free_slots = []
        self._dirty_slots = set()
        self._tail_slots = count
        self.changed()

    def _add_tail(self) -> None:
        for layer in self.layers:
            layer.add_tail()
        self._free_slots.append(self._tail_slots)
        self._tail_slots += 1

    # Looking inside.

    def read(self, row: Row, layer: int) -> tuple[mx.array, mx.array]:
        """Return the keys and values that a row holds, ``[heads, tokens, dim]``.

        Of `positions`, in ascending order: all of them, but for pages that fell out.
        """
        store = self.layers[layer]
        keys, values = store.tail_keys[row.slot], store.tail_values[row.slot]
        keys, values = keys[:, : row.tail_length], values[:, : row.tail_length]
        if not row.pages:
            return keys, values
        paged = [store.pools[page.level].read(mx.array([page.slot])) for page in row.pages]
        k, v = (mx.concatenate([page[side][0] for page in paged], axis=1) for side in (0, 1))
        return mx.concatenate([k, keys], axis=1), mx.concatenate([v, values], axis=1)

    def positions(self, row: Row) -> list[int]:
        """Return the positions of the tokens that `read` returns."""
        starts = [row.start(index) for index in range(len(row.pages))]
        paged = [start + token for start in starts for token in range(PAGE_TOKENS)]
        return paged + list(range(row.tail_start, row.length))

    def check(self) -> None:
        """Assert the invariants: references, lengths, bytes."""
        held: dict[PageId, int] = {}
        for row in self.holders:
            row.check()
            for page in row.held:
                held[page] = held.get(page, 0) + 1
        snapshot = {page for row in self.snapshots for page in row.held}
        running = {page for row in self.rows for page in row.held}
        for allocator in self.allocators:
            allocator.check()
            mine = {page: count for page, count in held.items() if page.level == allocator.level}
            assert mine == {page: allocator.references(page) for page in mine}
            assert len(mine) == allocator.used, "a page is held by no row"
            assert allocator.idle == sum(page in mine for page in snapshot - running)
            pools = [layer.pools[allocator.level] for layer in self.layers]
            assert all(pool.capacity >= allocator.capacity for pool in pools), "a slot without room"
        for row in self.snapshots:
            tails = [layer.geometry.dense_bytes(row.tail_length) for layer in self.layers]
            assert row.nbytes == sum(tails), "a frozen tail has other tokens than its row"
        assert self.nbytes == sum(layer.nbytes for layer in self.layers) + self.snapshot_bytes
        for row, places in self._places.items():
            assert np.array_equal(places, places_of(row)), "a table has other pages than its row"
        slots = [row.slot for row in self.rows] + self._free_slots
        assert sorted(slots) == list(range(self._tail_slots)), "a tail is lost or shared"


def _at_the_top(rows: Iterable[Row]) -> list[PageId]:
    """Return the pages of level 0 that these rows hold, each once."""
    return list(dict.fromkeys(page for row in rows for page in row.pages if page.level == 0))
