"""The cache of one model: rows, pages and tails of all layers, moved together.

The life of a step::

    begin_decode(rows) or begin_prefill(row, count)     host integers change, the step is set
        the model runs; each layer appends and attends  lazy
    ...                                                 any number of decode steps
    flush()                                             drained: pools are written

Rows that share the batch never change what a row attends to (`rows`).
"""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.packed import page_product
from kvd.worker.cache.pages import PageAllocator, PageId
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.steps import (
    TAIL_TOKENS,
    DecodeStep,
    LevelTable,
    PrefillStep,
    decode_step,
    level_tables,
    prefill_step,
)

SLAB_PAGES = 64
"""Pools grow by at least this many pages, so that growing (a copy) stays rare."""


class KVStore:
    """Keys and values of every row of a model, in pages of one scheme.

    ``dtype`` is that of the activations; ``prefill_scratch`` the bytes of dequantized layers that
    a prefill step may hold at once.
    """

    def __init__(
        self,
        layers: list[LayerGeometry],
        scheme: Scheme,
        dtype: mx.Dtype,
        *,
        prefill_scratch: int = 256 * 1024 * 1024,
    ) -> None:
        self.scheme = scheme
        self.dtype = dtype
        self.prefill_scratch = prefill_scratch
        self.page_product = page_product
        """How pages are multiplied; the self-check replaces it where the device lacks it."""
        self.layers = [LayerStore(geometry, [scheme], dtype) for geometry in layers]
        self.allocator = PageAllocator(level=0)
        self.page_limit: int | None = None
        """The most pages that the pools may grow to; None: no limit."""
        self.rows: list[Row] = []
        self.step: DecodeStep | PrefillStep | None = None
        self.flushes = 0
        self._free_slots: list[int] = []
        self._tail_slots = 0
        self._pending_rows: list[Row] = []
        self._tables: tuple[tuple[int, list[Row]], list[LevelTable]] | None = None
        self._epoch = 0
        self._scratch = 0

    # What it costs.

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        return sum(layer.geometry.page_bytes(self.scheme) for layer in self.layers)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row's tail in all layers."""
        return sum(layer.geometry.dense_bytes(TAIL_TOKENS) for layer in self.layers)

    @property
    def pages_bytes(self) -> int:
        """Bytes of the pools."""
        return self.allocator.capacity * self.page_bytes

    @property
    def tails_bytes(self) -> int:
        """Bytes of the tails."""
        return self._tail_slots * self.row_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of pools and tails: exactly what their arrays hold."""
        return self.pages_bytes + self.tails_bytes

    # Rows come and go by integers.

    def new_row(self) -> Row:
        """Return an empty row."""
        if not self._free_slots:
            self._add_tails(4)  # growing copies the tails, so not one by one
        row = Row(self._free_slots.pop(0))
        self.rows.append(row)
        return row

    def free(self, row: Row) -> None:
        """Give a row's pages and tail back. No step in flight may still read them."""
        if not row.alive:
            raise ValueError("the row is free already")
        row.alive = False
        for page in row.pages:
            self.allocator.release(page)
        self.rows.remove(row)
        self._free_slots.append(row.slot)
        self._free_slots.sort()
        self._epoch += 1

    # Steps.

    def begin_decode(self, rows: list[Row], batch: int | None = None) -> DecodeStep:
        """Start a forward pass of one token for each row; lengths count it from now on.

        ``batch`` is the number of sequences that the model will see: rows, then padding.
        """
        self.step = step = decode_step(
            rows, self._tables_of(rows), batch or len(rows), self._tail_slots
        )
        if step.seal is not None:
            self._pending_rows += step.seal.rows
        return step

    def _tables_of(self, rows: list[Row]) -> list[LevelTable]:
        key = (self._epoch, list(rows))
        if self._tables is None or self._tables[0] != key:
            self._tables = (key, level_tables(rows))
        return self._tables[1]

    def begin_prefill(self, row: Row, count: int) -> PrefillStep:
        """Start a forward pass of ``count`` tokens of one row; `finish_prefill` ends it."""
        self.step = step = prefill_step(row, count)
        self._scratch = 0
        return step

    def note_scratch(self, nbytes: int) -> bool:
        """Count a dense copy of a prefill step; return whether it is time to evaluate."""
        self._scratch += nbytes
        if self._scratch < self.prefill_scratch:
            return False
        self._scratch = 0
        return True

    def finish_prefill(self) -> None:
        """Evaluate the chunk and write it: the device must otherwise be idle."""
        step = self.step
        if not isinstance(step, PrefillStep):
            raise TypeError("no prefill step is under way")
        self.step = None
        step.row.length += step.count
        step.row.pending += step.new_pages
        self._pending_rows += [step.row] * step.new_pages
        mx.eval(self.arrays())
        self.flush()

    # The flush.

    def needs_flush(self, rows: list[Row]) -> bool:
        """Return whether one of these rows has no room for another token."""
        return any(row.tail_length >= TAIL_TOKENS for row in rows)

    def arrays(self) -> list[mx.array]:
        """Everything that steps leave lazy, for `mx.async_eval`: tails and pending pages."""
        return [array for layer in self.layers for array in layer.lazy_arrays()]

    def flush(self) -> None:
        """Write all pending pages into the pools; the device must be idle."""
        waiting, self._pending_rows = self._pending_rows, []
        kept = [index for index, row in enumerate(waiting) if row.alive]
        owners = [waiting[index] for index in kept]
        self._make_room(len(owners))
        pages = self.allocator.take(len(owners))
        shifts = self._shifts(owners)
        for layer in self.layers:
            layer.flush(
                [page.slot for page in pages],
                None if len(kept) == len(waiting) else kept,
                shifts,
            )
        for row, page in zip(owners, pages, strict=True):
            row.pages.append(page)
            row.pending -= 1
        self._epoch += 1
        self.flushes += 1

    def _shifts(self, owners: list[Row]) -> dict[int, list[int]]:
        # A prefilled row's tail is written anew; the others move up by what left them.
        prefilled = {slot for slot, _ in self.layers[0].new_tails}
        shifts: dict[int, list[int]] = {}
        for row in dict.fromkeys(owners):
            if row.slot not in prefilled:
                shifts.setdefault(row.pending, []).append(row.slot)
        return shifts

    def _make_room(self, pages: int) -> None:
        if self.allocator.can_take(pages):
            return
        capacity = self.allocator.capacity
        needed = self.allocator.used + pages
        wanted = max(needed, capacity + max(SLAB_PAGES, capacity // 4))
        if self.page_limit is not None:
            wanted = max(needed, min(wanted, self.page_limit))
        self.allocator.grow(wanted)
        for layer in self.layers:
            layer.pools[0].grow(wanted)

    def shrink(self, pages: int = 0) -> None:
        """Keep room for ``pages`` pages and give all other memory back; no row may be left."""
        if self.rows:
            raise ValueError(f"{len(self.rows)} rows are still there")
        self.allocator.reset(pages)
        self.step = None
        self._pending_rows = []
        self._free_slots = []
        self._tail_slots = 0
        for layer in self.layers:
            layer.reset(pages)

    def _add_tails(self, count: int) -> None:
        for layer in self.layers:
            layer.add_tails(count)
        self._free_slots += range(self._tail_slots, self._tail_slots + count)
        self._tail_slots += count

    # Looking inside.

    def read(self, row: Row, layer: int) -> tuple[mx.array, mx.array]:
        """Return a row's keys and values as attention sees them, ``[heads, length, dim]``."""
        store = self.layers[layer]
        keys, values = store.tail_keys[row.slot], store.tail_values[row.slot]
        keys, values = keys[:, : row.tail_length], values[:, : row.tail_length]
        if not row.pages:
            return keys, values
        paged = store.pools[0].read(mx.array([page.slot for page in row.pages]))
        k, v = (side.swapaxes(0, 1).flatten(1, 2) for side in paged)
        return mx.concatenate([k, keys], axis=1), mx.concatenate([v, values], axis=1)

    def check(self) -> None:
        """Assert the invariants: references, lengths, bytes."""
        self.allocator.check()
        held: dict[PageId, int] = {}
        for row in self.rows:
            row.check()
            for page in row.pages:
                held[page] = held.get(page, 0) + 1
        assert held == {page: self.allocator.references(page) for page in held}
        assert len(held) == self.allocator.used, "a page is held by no row"
        assert self.nbytes == sum(layer.nbytes for layer in self.layers)
        slots = [row.slot for row in self.rows] + self._free_slots
        assert sorted(slots) == list(range(self._tail_slots)), "a tail is lost or shared"
