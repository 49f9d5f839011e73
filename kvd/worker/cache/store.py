"""The layers of one attention kind: their rows, pages and tails, which change together.

The life of a step::

    begin_decode(rows), begin_prefill(row, count)       host integers change, `step` is set
    or begin_packed(rows, counts, batch)
        the model runs; each layer appends and attends  lazy
    ...                                                 up to 64 decode steps
    flush()                                             device idle: pools are written

A row commits a page when its own length calls for it (`rows`). If the page is not written yet, a
flush must come before the step. The flush also writes the next page of every other row whose tail
has the tokens for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import mlx.core as mx

from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.backend import Backend
from kvd.worker.cache.dense_start import DenseStart
from kvd.worker.cache.flush import Flusher
from kvd.worker.cache.layer import LayerStore, fill_tails
from kvd.worker.cache.packed import Packed, page_product
from kvd.worker.cache.page_store import PageStore
from kvd.worker.cache.page_tables import PageTables
from kvd.worker.cache.row_snapshots import RowSnapshot, RowSnapshots
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.cache.settings import Scratch
from kvd.worker.cache.steps import (
    DecodeStep,
    PackedPrefill,
    PrefillStep,
    decode_step,
    packed_prefill,
    prefill_step,
)
from kvd.worker.cache.tails import TailSlots
from kvd.worker.device import launches_in_order


def evaluate(stores: Sequence[KVStore], others: Sequence[mx.array] = ()) -> bool:
    """Evaluate what a prefill pass left in all stores, and ``others``.

    Return whether the device is done. It may still compute if kernels write all pages and tails.
    The host then prepares the flush while the device computes.
    """
    arrays = [array for store in stores for array in store.arrays()]
    if launches_in_order() and all(store.is_flushed_by_kernel for store in stores):
        mx.async_eval(arrays, others)  # type: ignore[no-untyped-call]
        return False
    mx.eval(arrays, others)
    return True


class KVStore:
    """Keys and values of every row, for the layers of one attention kind.

    ``schemes`` has one KV scheme per precision level; new rows start on level 0. ``layer_schemes``
    has the schemes of each layer by level; None: those of ``schemes``. ``dtype`` is that of the
    activations. With ``quantized_start``, level 0 is for rows with fewer tokens; a row
    leaves it before its first step at that length. ``scratch`` limits the dense copies of a step.
    """

    def __init__(
        self,
        layers: list[LayerGeometry],
        schemes: Scheme | Sequence[Scheme],
        dtype: mx.Dtype,
        *,
        kind: Kind = FULL,
        layer_schemes: Sequence[list[Scheme]] | None = None,
        quantized_start: int = 0,
        scratch: Scratch | None = None,
    ) -> None:
        self.schemes = (schemes,) if isinstance(schemes, Scheme) else tuple(schemes)
        self.dtype = dtype
        self.kind = kind
        self.quantized_start = quantized_start
        self.scratch = Scratch() if scratch is None else scratch
        self.page_product = page_product
        """The probe replaces it on devices without gathered products."""
        self.backend: Backend | None = None
        by_layer = layer_schemes or [list(self.schemes)] * len(layers)
        self.layers = [
            LayerStore(geometry, own, dtype) for geometry, own in zip(layers, by_layer, strict=True)
        ]
        self.rows: list[Row] = []
        self.step: DecodeStep | PrefillStep | PackedPrefill | None = None
        self.on_chunk: Callable[[LayerStore], None] | None = None
        """Called in a prefill pass with each layer that has got its keys and values."""
        self.flushes = 0
        self.tables = PageTables()
        self.tails = TailSlots(self.layers)
        self.pages = PageStore(self.layers, len(self.schemes), self._holders, self.tables)
        self.dense_start = DenseStart(quantized_start, self.pages)
        self.snapshots = RowSnapshots(self.layers, self.pages, self.dense_start, kind)
        self.flusher = Flusher(self.layers, self.pages, self.dense_start, self._pack_tails)

    def _pack_tails(
        self, layer: LayerStore, level: int, slots: Sequence[int]
    ) -> tuple[Packed, Packed] | None:
        return None if self.backend is None else self.backend.pack_tails(layer, level, slots)

    def _holders(self) -> list[Row]:
        return [*self.rows, *self.snapshots.all]

    @property
    def nbytes(self) -> int:
        return self.pages.nbytes + self.tails.nbytes + self.snapshots.nbytes

    def most_bytes(self, length: int, chunk: int = 0, level: int = 0) -> int:
        """Return the most bytes of pages that one row uses on its way to ``length`` tokens.

        Pages count as `PageStore.charge`. ``chunk`` is the number of tokens prefilled at once: a
        window holds their pages until the chunk ends. ``level`` is where the row starts.
        """
        first = level or (1 if self.quantized_start else 0)
        pages = self.kind.max_pages(length, chunk)
        nbytes = pages * self.pages.charge(first)
        if first > level:
            dense = self.kind.max_pages(min(length, self.quantized_start + chunk), chunk)
            # Dense pages and the pages that replace them exist at the same time.
            nbytes = max(nbytes, dense * (self.pages.charge(0) + self.pages.charge(1)))
        return nbytes

    # Rows.

    def new_row(self, level: int = 0, coming: int = 1) -> Row:
        """Return an empty row. ``coming``: new rows before the next step, this one included."""
        row = Row(self.tails.take(coming), level, anchored=self.kind.anchored_pages)
        self.rows.append(row)
        return row

    def restore(self, snapshot: RowSnapshot, coming: int = 1) -> Row:
        """Return a new row that equals the snapshot bit for bit. The device must be idle.

        ``coming``: as for `new_row`.
        """
        row = self.unplaced_row(snapshot)
        try:
            self.place(row, coming)
        except BaseException:
            self.free(row, clean=False)
            raise
        return row

    def unplaced_row(self, snapshot: RowSnapshot | None, level: int = 0) -> Row:
        """Return a row without a slot: an empty one, or one with a snapshot's content.

        It takes part in no step before `place`. Steps may be in flight.
        """
        row = Row(-1, level, anchored=self.kind.anchored_pages)
        row.tails = [layer.no_tail() for layer in self.layers]
        if snapshot is not None:
            if not snapshot.alive:
                raise ValueError("the snapshot was dropped")
            row.copy_from(snapshot)
            row.tails = list(snapshot.tails)
            self.pages.retain(row.pages)
        self.rows.append(row)
        return row

    def place(self, row: Row, coming: int = 1) -> None:
        """Give a row its slot, and copy its tail there. The device must be idle.

        ``coming``: as for `new_row`.
        """
        slot = self.tails.take(coming)
        try:
            fill_tails(self.layers, slot, row.tails)
        except BaseException:
            self.tails.free(slot, clean=False)
            raise
        row.slot, row.tails = slot, []

    def replace_content(
        self,
        row: Row,
        content: Row,
        tails: Sequence[tuple[mx.array, mx.array]],
    ) -> None:
        """Give a row without a slot the length, level and pages of ``content``, and these tails.

        The row takes over the references to pages that it does not hold yet. Steps may be in
        flight.
        """
        gone = set(row.held).difference(content.pages)
        row.copy_from(content)
        row.tails = list(tails)
        self.pages.release(gone)

    def fork(self, row: Row) -> Row:
        snapshot = self.snapshots.take(row)
        try:
            return self.restore(snapshot)
        finally:
            self.snapshots.drop(snapshot)

    def can_trim(self, row: Row, count: int) -> bool:
        """Return whether the row still has all tokens that it saw ``count`` tokens ago."""
        length = row.length - count
        if length < 0 or not row.skipped:
            return length >= 0
        oldest = row.start(row.anchored) if len(row.pages) > row.anchored else row.tail_start
        return self.kind.low(length) >= oldest

    def trim(self, row: Row, count: int) -> None:
        """Remove a row's newest ``count`` tokens. The device must be idle.

        If that cuts a page, the page's remaining tokens go back into the tail, dequantized.
        """
        if not self.can_trim(row, count):
            raise ValueError(f"{count} tokens cannot be taken back from {row.length}")
        self.pages.release_written_ahead(row)
        length = row.length - count
        while row.tail_start > length:
            cut = row.pages.pop()
            rest = length - row.tail_start
            if rest > 0:
                for layer in self.layers:
                    layer.refill_tail(row.slot, cut, rest)
            self.pages.release([cut])
        row.length = length
        row.trimmed = True
        self.tables.invalidate([row])

    def free(self, row: Row, *, clean: bool = True) -> None:
        """Free a row's pages and tail. No step in flight may still read them.

        Pass ``clean=False`` if the tail may hold NaN. No mask removes NaN from a product (0 x NaN
        is NaN), so the tail is cleared before another row gets it. Pages are always overwritten
        whole.
        """
        if not row.alive:
            raise ValueError("the row is already free")
        row.alive = False
        if row.is_placed:
            self.tails.free(row.slot, clean=clean)
        self.pages.release(row.held)
        self.rows.remove(row)
        self.tables.invalidate([row])

    def discard(self) -> None:
        """Free all running rows after a failed step. Snapshots stay; `shrink` frees the memory."""
        self.flusher.take_launched()
        for row in self.rows:
            row.alive = False
        self.rows = []
        self.tables.invalidate()
        for allocator in self.pages.allocators:
            allocator.release_running()

    # Steps.

    def begin_decode(self, rows: list[Row], batch: int | None = None) -> DecodeStep:
        """Start a forward pass of one token for each row. Lengths count the token from now on.

        ``batch`` is the number of sequences that the model sees: the rows, then padding. Raises
        ``ValueError``, with nothing changed, if a row needs a flush first (`needs_flush`).
        """
        tables = partial(self.tables.by_level, list(rows))
        step = decode_step(rows, tables, batch or len(rows), self.tails.count, self.kind)
        if step.committed:
            # Only rows that commit a page drop pages, so a row's length alone decides when it does.
            # The number of its pages decides how attention splits them among threads, and so
            # affects rounding.
            self._drop_unseen(step.committed, 1)
            self.tables.invalidate(step.committed)
        if self.backend is not None:
            page_list = self.tables.page_list(rows)
            backend = self.backend.decode(self.layers, self.kind, rows, page_list)
            step = replace(step, backend=backend)
        self.step = step
        if step.committed and not (step.backend and step.backend.moves_tails):
            slots = mx.array([row.slot for row in step.committed])
            for layer in self.layers:
                layer.remove_committed(slots)
        return step

    def begin_prefill(self, row: Row, count: int) -> PrefillStep:
        """Start a forward pass of ``count`` tokens of one row; `finish_prefill` ends it."""
        self.pages.release_written_ahead(row)
        self.step = step = self._with_backend(prefill_step(row, count))
        self.scratch.clear()
        self.snapshots.forget_kept()
        return step

    def _with_backend(self, step: PrefillStep) -> PrefillStep:
        if self.backend is None:
            return step
        return replace(step, backend=self.backend.prefill(self.kind, step))

    def begin_packed(
        self, rows: list[Row], counts: list[int], batch: int, *, keeps_tails: bool = False
    ) -> PackedPrefill:
        """Start a pass over chunks (`packed_prefill`); `finish_prefill` ends it.

        A row may have several chunks only if `can_chain`.
        """
        for row in rows:
            self.pages.release_written_ahead(row)
        plan = packed_prefill(rows, counts, batch, keeps_tails=keeps_tails)
        self.step = plan = replace(plan, steps=tuple(map(self._with_backend, plan.steps)))
        self.scratch.clear()
        self.snapshots.forget_kept()
        return plan

    def can_chain(self, row: Row) -> bool:
        """Return whether several chunks of a row in one pass equal as many passes to the bit."""
        # A row leaves the dense start between chunks. Attention reads pages level by level, and
        # those of the pass last.
        lowest = max((page.level for page in row.pages), default=0)
        return not self.quantized_start and lowest <= row.level

    def finish_prefill(self, *, waits: bool = True) -> None:
        """Evaluate the chunks and write them.

        A step may be in flight only if `is_flushed_by_kernel`. ``waits``: if False, `Flusher.wait`
        must follow.
        """
        step, self.step = self.step, None
        if not isinstance(step, PrefillStep | PackedPrefill):
            raise TypeError("no prefill step is under way")
        if isinstance(step, PackedPrefill):
            step.shared.clear()  # frees the dense copies of `kvd.worker.attention.fused_prefill`
        self.finish_chunks(step.steps if isinstance(step, PackedPrefill) else [step])
        if waits:
            self.flusher.wait()

    @property
    def is_flushed_by_kernel(self) -> bool:
        """Whether kernels write all that a flush would write now, behind the steps in flight."""
        return all(layer.is_flushed_by_kernel for layer in self.layers)

    def finish_chunks(self, steps: Sequence[PrefillStep]) -> None:
        """Add the chunks to their rows' lengths and write all their pages in one flush.

        `Flusher.wait` must follow.
        """
        evaluate([self])
        filled = []
        for step in steps:
            step.row.length += step.count
            filled += [step.row] * step.new_pages
        self._write(filled, [step.row for step in steps])
        self._drop_unseen(step.row for step in steps if step.row.alive)
        self.snapshots.keep(steps)

    def undo_prefill(self) -> bool:
        """Drop an unfinished prefill; the rows are unchanged. Returns whether there was one."""
        if not isinstance(self.step, PrefillStep | PackedPrefill):
            return False
        self.step = None
        for layer in self.layers:
            layer.forget_chunks()
        return True

    @contextmanager
    def paused_prefill(self) -> Iterator[None]:
        """Allow decode steps of other rows, but no flush, while a prefill pass is unfinished.

        An exception drops the pass.
        """
        step, self.step = self.step, None
        aside = [(layer.pending, layer.new_tails) for layer in self.layers]
        for layer in self.layers:
            layer.pending, layer.new_tails = [], []
        yield
        self.step = step
        for layer, (pending, new_tails) in zip(self.layers, aside, strict=True):
            layer.pending, layer.new_tails = pending, new_tails

    def _drop_unseen(self, rows: Iterable[Row], new_tokens: int = 0) -> None:
        """Free the pages that the ``new_tokens`` newest tokens and later ones do not see."""
        # Steps in flight may still read these pages. Nothing overwrites them before the device is
        # idle.
        if not self.kind.bounded:
            return
        for row in rows:
            count = row.pages_before(self.kind.low(row.length - new_tokens))
            unseen = row.pages[row.anchored : row.anchored + count]
            del row.pages[row.anchored : row.anchored + count]
            row.skipped += count
            self.pages.release(unseen)
            if unseen:
                self.tables.invalidate([row])

    def arrays(self) -> list[mx.array]:
        """Return what steps leave lazy, for `mx.async_eval`: tails, and pages of prompts."""
        return [array for layer in self.layers for array in layer.lazy_arrays()]

    # The flush.

    def needs_flush(self, rows: list[Row], steps: int = 1) -> bool:
        """Return whether these rows need a flush before one of their next ``steps`` steps.

        They do if a row commits a page that is not written, or must leave the dense start now.
        """
        return any(
            (row.commits_within(steps) and not row.written_ahead) or self.dense_start.outgrown(row)
            for row in rows
        )

    def flush(self) -> None:
        """Write the next page of every row whose tail has the tokens. The device must be idle."""
        self._write([])
        self.flusher.wait()

    def _write(self, filled: list[Row], prefilled: Collection[Row] = ()) -> None:
        self.scratch.clear()
        self.flusher.write(self.rows, filled, prefilled)
        if filled:
            self.tables.invalidate(filled)
        self.flushes += 1

    # Giving memory back, while the device is idle.

    def cut_tails(self) -> None:
        if self.tails.cut([row for row in self.rows if row.is_placed]):
            self.tables.invalidate()

    def shrink(self, pages: int = 0) -> None:
        """Free all memory except snapshots and room for at most ``pages`` more pages.

        No row may be running.
        """
        if self.rows:
            raise ValueError(f"{len(self.rows)} rows are still running")
        self.step = None
        self.snapshots.evaluate()
        self.snapshots.forget_kept()
        self.tails.clear()
        self.tables.clear()
        self.pages.leave_room(pages)

    # Inspection.

    def read(self, row: Row, layer: int) -> tuple[mx.array, mx.array]:
        """Return keys and values of a row's `positions` in a layer, ``[heads, tokens, dim]``."""
        store = self.layers[layer]
        keys, values = store.tail_keys[row.slot], store.tail_values[row.slot]
        keys, values = keys[:, : row.tail_length], values[:, : row.tail_length]
        if not row.pages:
            return keys, values
        paged = [store.pools[page.level].read(mx.array([page.slot])) for page in row.pages]
        k, v = (mx.concatenate([page[side][0] for page in paged], axis=1) for side in (0, 1))
        return mx.concatenate([k, keys], axis=1), mx.concatenate([v, values], axis=1)

    def positions(self, row: Row) -> list[int]:
        """Return the positions of the tokens that a row holds: all that have not left a window."""
        starts = [row.start(index) for index in range(len(row.pages))]
        paged = [start + token for start in starts for token in range(PAGE_TOKENS)]
        return paged + list(range(row.tail_start, row.length))
