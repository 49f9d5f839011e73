"""The whole cache of one model: a store per attention kind, and the recurrent states.

A sequence consists of a row in each store and a state, which change together. Steps take the course
that `kvd.worker.cache.store` describes. The model is called with `ModelCache.views`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, KVCache

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.backend import Backend
from kvd.worker.cache.batch import BatchQuantizedKVCache, RectangleKVCache
from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.layout import Access, AttentionPart, Layout, StatePart
from kvd.worker.cache.pass_growth import grow_before
from kvd.worker.cache.pool_growth import lacks_room, make_room
from kvd.worker.cache.rectangle import RectangleScratch
from kvd.worker.cache.recurrent_states import StateStore
from kvd.worker.cache.rows import SequenceRow
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.sequence_costs import SequenceCosts
from kvd.worker.cache.sequence_snapshots import SequenceSnapshot, SequenceSnapshots
from kvd.worker.cache.settings import CacheSettings, Scratch
from kvd.worker.cache.store import KVStore, evaluate
from kvd.worker.cache.usage import CacheUsage
from kvd.worker.device import launches_in_order, on_cpu

Start = Callable[[], None]
"""Starts the evaluation of a stage."""
RunStage = Callable[[int, Start], None]
"""``run_stage(left, start)`` calls ``start``; ``left``: stages after that one."""


@dataclass(frozen=True)
class Stages:
    """How a pass is divided, so that decode steps run between its parts."""

    share: float
    """See `ModelCache.stage_ends`."""
    run: RunStage
    settle: Callable[[], None]
    """Reads the step in flight, if any, and delivers its tokens."""


def settle_pass(cache: ModelCache, stages: Stages) -> None:
    """Launch the rest of a pass. Unless kernels write it, wait, and read the step in flight.

    `ModelCache.finish_prefill` must follow.
    """
    if evaluate(cache.stores, cache.states.arrays()):
        with paused_prefill(cache):
            stages.settle()


@contextmanager
def paused_prefill(cache: ModelCache) -> Iterator[None]:
    """Pause the pass of each store; see `KVStore.paused_prefill`."""
    with ExitStack() as stack:
        for store in cache.stores:
            stack.enter_context(store.paused_prefill())
        yield


class ModelCache:
    """Keys, values and states of all sequences of a model.

    ``access`` says how the model reads each attention kind of the layout (default: as pages).
    ``batched`` says whether the model takes several rows in one pass.
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
        self.scheme = settings.schemes[0]
        self.levels = len(settings.schemes)
        self.backend: Backend | None = None
        scratch = Scratch(settings.prefill_scratch)
        self.stores = [_store_of(layout, settings, kind, scratch) for kind in layout.kinds]
        for store in self.stores:
            store.pages.spare, store.pages.reclaim = self._spare_bytes, self._cut_to_used
        self.states = StateStore(list(layout.states()))
        pairs = zip(self.stores, self.access.values(), strict=True)
        rectangles = (n for n, (_, access) in enumerate(pairs) if access is Access.RECTANGLES)
        self.rectangles = RectangleScratch({n: self.stores[n] for n in rectangles})
        self.costs = SequenceCosts(settings, self.stores, self.states, self.rectangles)
        self.usage = CacheUsage(self.stores, self.states, self.levels)
        self.row_bytes = self.costs.row_bytes
        self.sequences: list[SequenceRow] = []
        self.snapshots = SequenceSnapshots(self.stores, self.states)
        self.limit_bytes: int | None = None
        """Bytes of pools, tails, states and snapshots up to which pools may grow ahead of need.
        None: no limit."""
        self._attention_views: list[BatchQuantizedKVCache] = []
        self._views = self._make_views()
        self._prefilling: list[tuple[SequenceRow, int]] = []
        self._widest = PAGE_TOKENS
        """Most tokens that a row has added in one step or between two flushes, so far."""

    def _make_views(self) -> list[Any]:
        stores = dict(zip(self.layout.kinds, self.stores, strict=True))
        layers = dict.fromkeys(self.layout.kinds, 0)
        states = iter(self.states.caches)
        views: list[Any] = []
        for entry in self.layout.entries:
            parts: list[Any] = []
            for part in entry.parts:
                if isinstance(part, AttentionPart):
                    paged = self.access[part.kind] is Access.PAGES
                    view_class = BatchQuantizedKVCache if paged else RectangleKVCache
                    layer = layers[part.kind]
                    parts.append(view_class(stores[part.kind], layer, batched=self.batched))
                    self._attention_views.append(parts[-1])
                    layers[part.kind] += 1
                else:
                    parts.append(next(states) if isinstance(part, StatePart) else KVCache())
            views.append(CacheList(*parts) if entry.composed else parts[0])
        return views

    def views(self, _sequences: Sequence[SequenceRow]) -> list[Any]:
        """Return the caches with which the model is called, one object per entry of the layout."""
        return self._views

    # Byte counts.

    @property
    def charged_bytes(self) -> int:
        """Bytes of the pools, as `PageStore.charge` counts them."""
        return sum(store.pages.charged_bytes for store in self.stores)

    @property
    def tail_slots(self) -> int:
        """Number of sequences for which tails or states are allocated."""
        tails = (store.tails.count for store in self.stores)
        placed = sum(sequence.is_placed for sequence in self.sequences)
        return max(placed, self.states.places, *tails)

    @property
    def snapshot_charge(self) -> int:
        """Bytes that only snapshots hold (`SequenceSnapshots.charge`)."""
        return self.snapshots.charge

    @property
    def nbytes(self) -> int:
        return self.usage.pages_bytes + self.usage.tails_bytes + self.snapshots.nbytes

    def _spare_bytes(self) -> int:
        if self.limit_bytes is None:
            return 1 << 62
        tails = self.tail_slots * self.row_bytes + self.snapshots.nbytes
        rectangles = sum(
            self.rectangles.excess_bytes(sequence.length + self._widest, self._widest)
            for sequence in self.sequences
        )
        return self.limit_bytes - self.charged_bytes - tails - rectangles

    # Sequences.

    def new_row(self, level: int = 0, coming: int = 1) -> SequenceRow:
        """Return an empty sequence. ``coming``: see `KVStore.new_row`."""
        start = self.settings.store_level(level)
        sequence = SequenceRow([store.new_row(start, coming) for store in self.stores])
        self.states.add(sequence)
        self.sequences.append(sequence)
        return sequence

    def restore(self, snapshot: SequenceSnapshot, coming: int = 1) -> SequenceRow:
        """Return a sequence with a snapshot's content (`KVStore.restore`)."""
        if not snapshot.alive:
            raise ValueError("the snapshot was dropped")
        rows = []
        with ExitStack() as undo:
            for store, row in zip(self.stores, snapshot.rows, strict=True):
                rows.append(store.restore(row, coming))
                undo.callback(store.free, rows[-1])
            undo.pop_all()
        sequence = SequenceRow(rows, snapshot.length)
        self.states.restore(sequence, snapshot.state)
        self.sequences.append(sequence)
        return sequence

    def free(self, sequence: SequenceRow, *, clean: bool = True) -> None:
        """Free a sequence (`KVStore.free`). No step in flight may still read it."""
        sequence.alive = False
        for store, row in zip(self.stores, sequence.rows, strict=True):
            store.free(row, clean=clean)
        if sequence.is_placed:
            self.states.remove(sequence)
        self.sequences.remove(sequence)

    def discard(self) -> None:
        """Free all memory except snapshots, in whatever state a failed step left the sequences."""
        for view in self._attention_views:
            view.forget()
        for sequence in self.sequences:
            sequence.alive = False
        self.sequences = []
        self._prefilling = []
        for store in self.stores:
            store.discard()
        self.shrink()

    # Steps.

    def begin_decode(self, sequences: list[SequenceRow], batch: int | None = None) -> None:
        """Start a forward pass of one token for each sequence, padded to ``batch`` sequences."""
        for index, store in enumerate(self.stores):
            store.begin_decode([sequence.rows[index] for sequence in sequences], batch)
        self.states.begin(sequences, batch or len(sequences))
        for sequence in sequences:
            sequence.length += 1

    def begin_prefill(self, sequence: SequenceRow, count: int) -> None:
        """Start a forward pass of ``count`` tokens of one sequence; `finish_prefill` ends it."""
        self._widest = max(self._widest, count)
        if self.rectangles.stores and self._spare_bytes() < 0:
            self._cut_to_used()  # growth ahead of need took memory that the rectangle needs
        for store, row in zip(self.stores, sequence.rows, strict=True):
            store.begin_prefill(row, count)
        self.states.begin([sequence], 1)
        self._prefilling = [(sequence, count)]

    @property
    def can_pack(self) -> bool:
        """Whether chunks of several sequences can be prefilled in one packed pass."""
        # Rectangles are gathered for one row per pass. Recurrent states need a row's tokens in
        # sequence.
        paged = all(access is Access.PAGES for access in self.access.values())
        return self.batched and paged and not self.states.parts

    def begin_packed(
        self, sequences: list[SequenceRow], counts: list[int], batch: int, later: int = 0
    ) -> None:
        """Start a forward pass over chunks in a batch of ``batch`` tokens. Needs `can_pack`.

        A sequence may have several chunks, one after the other, only if `can_chain`. ``later``: see
        `pass_growth`.
        """
        keeps = self.snapshots.keeps_tails(max(counts))
        rows = [[one.rows[index] for one in sequences] for index in range(len(self.stores))]
        grow_before(self.stores, rows, counts, later)
        for store, own in zip(self.stores, rows, strict=True):
            store.begin_packed(own, counts, batch, keeps_tails=keeps)
        self._prefilling = list(zip(sequences, counts, strict=True))

    def can_chain(self, sequence: SequenceRow) -> bool:
        """Return whether a packed pass may have several chunks of a sequence."""
        return all(map(KVStore.can_chain, self.stores, sequence.rows))

    def end_pass(self) -> None:
        """Take over the states that the forward pass left. Must be called after every pass."""
        self.states.end()
        for view in self._attention_views:
            view.forget()

    def finish_prefill(self, *, waits: bool = True) -> None:
        """Evaluate the chunks and write them. If a step is in flight, call `settle_pass` first.

        ``waits``: if False, kernels may still write when this returns, until `wait`. Snapshots can
        be taken already.
        """
        if not self._prefilling:
            raise RuntimeError("no prefill step is under way")
        prefilled, self._prefilling = self._prefilling, []
        evaluate(self.stores, self.states.arrays())
        for store in self.stores:
            store.finish_prefill(waits=not launches_in_order())
        for sequence, count in prefilled:
            sequence.length += count
        if waits:
            self.wait()

    def wait(self) -> None:
        """Wait until the last pass or flush is written."""
        mx.eval([store.flusher.take_launched() for store in self.stores])

    def undo_prefill(self) -> bool:
        """Drop a failed prefill pass. Returns whether sequences and their states are unchanged."""
        for view in self._attention_views:
            view.forget()
        self._prefilling = []
        undone = [store.undo_prefill() for store in self.stores]
        return all(undone) and not self.states.parts

    def stage_ends(self, share: float) -> list[int]:
        """Return the layers at which the stages of a prefill pass end.

        Each has about ``share`` of the layers, and at least one. The last may have fewer.
        """
        layers = len(self._attention_views)
        # The first layer's keys take one product, and each further layer about the same time.
        size = max(1, int(share * (layers - 1)))
        return [*range(1 + size, layers, size), layers]

    @contextmanager
    def stages(
        self, share: float, run_stage: RunStage, *, starts_early: bool = False
    ) -> Iterator[None]:
        """Evaluate a pass in stages while the model builds it. Needs `can_pack`.

        The evaluation of a stage starts when its last layer has got its keys and values, so the
        device computes while the host builds the next layers. CPUs start with each layer: a start
        costs the host less than the layer costs them. ``run_stage`` is called at the end of each
        stage. It may run decode steps of other sequences that need no flush. Its exceptions drop
        the pass. ``share``: see `stage_ends`. ``starts_early``: whether the layers of the first
        stage start one by one too, because the device has nothing else to do.
        """
        ends = self.stage_ends(share)
        by_layer = on_cpu()
        built = 0
        waiting: list[LayerStore] = []

        def on_chunk(layer: LayerStore) -> None:
            nonlocal built
            built += 1
            waiting.append(layer)
            if built in ends[:-1]:  # the last one ends when the whole pass is built
                self._run_stage(waiting, partial(run_stage, len(ends) - ends.index(built) - 1))
            elif by_layer or (starts_early and built < ends[0]):
                self._run_stage(waiting)

        for store in self.stores:
            store.on_chunk = on_chunk
        try:
            yield
        finally:
            for store in self.stores:
                store.on_chunk = None
        self._run_stage(waiting, partial(run_stage, 0))

    def _run_stage(
        self, layers: list[LayerStore], run: Callable[[Start], None] | None = None
    ) -> None:
        """Start the evaluation of ``layers``, or let ``run`` start it, and clear the list."""
        # Otherwise the views would keep the dense keys and values of all layers so far.
        aside = [view.set_aside() for view in self._attention_views]
        arrays = [layer.unfinished for layer in layers]
        layers.clear()

        def start() -> None:
            mx.async_eval(arrays)  # type: ignore[no-untyped-call]
            arrays.clear()

        if run is None:
            start()
        else:
            with paused_prefill(self):
                run(start)
            self.snapshots.evaluate()  # by now the device has the work of a whole stage
        for view, fetched in zip(self._attention_views, aside, strict=True):
            view.put_back(fetched)

    def needs_flush(self, sequences: list[SequenceRow], steps: int = 1) -> bool:
        """Return whether a flush must come before one of the next ``steps`` decode steps."""
        return any(
            store.needs_flush([sequence.rows[index] for sequence in sequences], steps)
            for index, store in enumerate(self.stores)
        )

    def arrays(self, share: float = 1.0) -> list[mx.array]:
        """Return all arrays that steps leave lazy, for `mx.async_eval`.

        ``share``: below 1, only those that about this share of a step computes, without states.
        """
        stores = (store.layers[: int(share * len(store.layers))] for store in self.stores)
        found = [array for layers in stores for layer in layers for array in layer.lazy_arrays()]
        return found if share < 1 else found + self.states.arrays()

    def flush(self) -> None:
        """Flush each store (`KVStore.flush`). The device must be idle."""
        for store in self.stores:
            store.flush()

    def make_room(self, seconds: float, clock: Callable[[], float]) -> None:
        """Grow pools for the next flush, for about ``seconds``. The device must be idle."""
        end = clock() + seconds
        for store in self.stores:
            make_room(store, end - clock(), clock)
            if clock() >= end:
                return

    def lacks_room(self, idle_pages: int | None = None) -> bool:
        """Return whether pools should grow before the next flush.

        ``idle_pages``: of an idle engine, whether they should grow until it has free places for
        these pages (`PageStore.lacks_room`). Kinds with a window or chunk keep none.
        """
        if idle_pages is None:
            return any(lacks_room(store) for store in self.stores)
        kept = (store.pages for store in self.stores if not store.kind.bounded)
        return any(pages.lacks_room(idle_pages) for pages in kept)

    def make_idle_room(self, pages: int) -> None:
        """Grow a piece of the pools that lack room for ``pages`` pages. The device must be idle."""
        for store in self.stores:
            if not store.kind.bounded and store.pages.lacks_room(pages):
                store.pages.grow_towards(pages)
                return

    def use(self, page_product: Callable[..., mx.array], backend: Backend | None = None) -> None:
        """Set the backend, and the page product for attention that the backend does not do."""
        for store, access in zip(self.stores, self.access.values(), strict=True):
            store.page_product = page_product
            store.backend = backend if access is Access.PAGES else None
        self.backend = backend

    # Giving memory back, while the device is idle.

    def compact(self, pages: int = 0) -> int:
        """Cut pools to the pages in use. Returns the bytes freed.

        Kinds without a window or chunk keep room for ``pages`` pages.
        """
        return sum(store.pages.compact(0 if store.kind.bounded else pages) for store in self.stores)

    def _cut_to_used(self) -> None:
        for store in self.stores:
            store.pages.cut_to_used()

    def cut_tails(self) -> None:
        """Free the tails and states of sequences that ended."""
        for store in self.stores:
            store.cut_tails()
        self.states.drop_gone()

    def shrink(self, pages: int = 0) -> None:
        """Free all memory except snapshots and room for at most ``pages`` more pages.

        No sequence may run. Kinds with a window or chunk keep no room.
        """
        for store in self.stores:
            store.shrink(0 if store.kind.bounded else pages)
        self.states.clear()


def _store_of(layout: Layout, settings: CacheSettings, kind: Kind, scratch: Scratch) -> KVStore:
    """Return the store of one kind's layers."""
    parts = [(entry, part) for entry, part in layout.attention() if part.kind == kind]
    schemes = settings.layer_schemes(len(layout.entries))
    return KVStore(
        [part.geometry for _, part in parts],
        settings.store_schemes,
        layout.dtype,
        kind=settings.kind(kind),
        layer_schemes=[schemes[entry] for entry, _ in parts],
        quantized_start=settings.quantized_start,
        scratch=scratch,
    )
