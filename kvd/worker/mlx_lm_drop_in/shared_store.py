"""One layer's pages, shared by all drop-in caches of that layer, and the references to its rows.

mlx-lm merges, splits, copies and drops its caches at any time. Here, that moves references. A row
with several references is copied when one of the caches that hold it is about to write it. Only the
tail is copied then, since pages are immutable.

Rows may be dropped at any time, in any order, from any thread:

* A finalizer only puts its rows on a queue. The queue is emptied at the beginning of an operation
  by the thread that holds the lock, or by the finalizer itself if the lock is free.
* Freeing changes integers only. A page keeps its bytes until a flush overwrites them, and a flush
  first waits for everything that was given to the device (`SharedStore.flush`).
* A graph that was built and never evaluated still reads the right bytes. MLX's arrays are values:
  a buffer that is still referenced is copied instead of overwritten.

A `Reading` has the places of pages, not their bytes. Layers that share keys use it one after the
other, so no page may move during a pass. Pools are cut before the pass's tables are built, and the
pages that the pass reads are not reused while its own chunks are written. After the pass, using the
`Reading` raises an error.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import mlx.core as mx

from kvd.worker.attention.decode import decode_attention
from kvd.worker.attention.prefill import prefill_attention
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.batch import DecodeHandle, OpaqueKV, PrefillHandle
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.steps import PrefillStep
from kvd.worker.cache.store import KVStore
from kvd.worker.mlx_lm_drop_in.padding import Span
from protocol.pages import SLAB_PAGES


@dataclass(eq=False)
class SharedRow:
    """A sequence's row, and the number of caches that reference it."""

    row: Row | None = None
    holders: int = 0
    coming: int = 0
    """Tokens of a pass that attention has not read yet."""

    @property
    def length(self) -> int:
        return self.coming + (0 if self.row is None else self.row.length)


class LayerRows(KVStore):
    """A store of one layer that also prefills several rows in one pass."""

    def finish_chunks(self, steps: Sequence[PrefillStep]) -> None:
        """Add the chunks to their rows' lengths and write all their pages in one flush."""
        # Layers that share these keys may still read pages that leave the window now. So the pages
        # that this pass reads are retained until the flush is launched. The next flush, which may
        # overwrite them, ends the pass.
        self.step = None
        read = [page for step in steps if step.row.alive for page in step.row.pages]
        self.pages.retain(read)
        try:
            super().finish_chunks(steps)
        finally:
            self.pages.release(read)

    @property
    def mostly_free(self) -> bool:
        needed = self.pages.used_bytes + SLAB_PAGES * self.pages.page_bytes()
        return self.pages.nbytes > 2 * needed


class Reading(OpaqueKV):
    """Stands for a batch's keys and values in one forward pass. Only attention can use it."""

    def __init__(self, shared: SharedStore) -> None:
        self.shared = shared
        self.kind = shared.kind
        self.store = shared.rows
        self._passes = shared.passes

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attend causally. Raises ``RuntimeError`` after the pass, since pages may have moved."""
        if self._passes != self.shared.passes:
            raise RuntimeError(
                "these keys and values belong to a forward pass that is over; call"
                " update_and_fetch in each pass"
            )
        return self._attend(queries, scale, sinks)

    def _attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        raise NotImplementedError


class DecodeReading(Reading):
    """One new token for each row."""

    def __init__(self, shared: SharedStore, handle: DecodeHandle) -> None:
        super().__init__(shared)
        self._handle = handle

    def _attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        output = decode_attention(queries, self._handle, scale, sinks)
        self.shared.latest = output
        return output


class ChunkReading(Reading):
    """Chunks of unequal length, evaluated row by row, so that only one dense layer exists."""

    def __init__(
        self,
        shared: SharedStore,
        rows: Sequence[SharedRow],
        parts: list[PrefillHandle | None],
        spans: Sequence[Span],
    ) -> None:
        super().__init__(shared)
        self.rows = list(rows)
        self.parts = parts
        """One per row; None if all of its tokens are padding."""
        self._spans = spans
        for row, span in zip(rows, spans, strict=True):
            row.coming = span.count

    def _attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attend with each row's own tokens; the result is evaluated. Padding gets zeros."""
        _, heads, tokens, _ = queries.shape
        v_dim = self.store.layers[0].geometry.v_dim
        rows = []
        for index, (part, span) in enumerate(zip(self.parts, self._spans, strict=True)):
            if part is None:
                rows.append(mx.zeros((1, heads, tokens, v_dim), queries.dtype))
                continue
            end = span.start + span.count
            own = queries[index : index + 1, :, span.start : end]
            row = prefill_attention(own, part, scale, sinks)
            if span.count < tokens:
                row = mx.pad(row, [(0, 0), (0, 0), (span.start, tokens - end), (0, 0)])
            mx.eval(row)
            rows.append(row)
        output = rows[0] if len(rows) == 1 else mx.concatenate(rows)
        mx.eval(output)
        self.shared.finish(self)
        return output


class SharedStore:
    """One layer's rows, created with the first keys, and the references of caches to them.

    ``schemes``, ``kind`` and ``quantized_start`` are those of `KVStore`. ``home`` marks the store
    of a model's own caches: in a merge, rows of other stores are copied to it.
    """

    def __init__(
        self,
        schemes: Sequence[Scheme],
        kind: Kind = FULL,
        *,
        quantized_start: int = 0,
        home: bool = False,
    ) -> None:
        self.schemes = tuple(schemes)
        self.kind = kind
        self.quantized_start = quantized_start
        self.home = home
        self.keeps_reading = True
        """Whether caches keep a pass's `Reading` for layers that use it again."""
        self.asked_again = False
        """Whether a layer has used a pass's `Reading` again."""
        self.passes = 0
        """Counts events that end a pass: the next pass, and writes or moves of pages."""
        self.latest: mx.array | None = None
        """Output of the newest decode step. Once it is evaluated, nothing reads the pools."""
        self._rows: LayerRows | None = None
        self._open: ChunkReading | None = None
        self._dropped: deque[list[SharedRow]] = deque()
        self._lock = threading.Lock()

    @property
    def rows(self) -> LayerRows:
        """The rows. Raises ``ValueError`` before the first keys."""
        if self._rows is None:
            raise ValueError("no keys were stored yet")
        return self._rows

    @property
    def nbytes(self) -> int:
        return 0 if self._rows is None else self._rows.nbytes

    # References.

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Hold the lock, with all earlier passes written and all dropped rows freed."""
        with self._lock:
            self._finish_open()
            self._free_dropped()
            try:
                yield
            finally:
                self._free_dropped()

    def hold(self, rows: Sequence[SharedRow]) -> list[SharedRow]:
        for row in rows:
            row.holders += 1
        return list(rows)

    def drop(self, rows: list[SharedRow]) -> None:
        """Remove a reference to each of these rows, now or at the next operation.

        Finalizers call this at any time, on any thread, even in the middle of another operation.
        """
        self._dropped.append(rows)
        if self._lock.acquire(blocking=False):
            try:
                self._free_dropped()
            finally:
                self._lock.release()

    def _free_dropped(self) -> None:
        while self._dropped:
            with suppress(IndexError):  # another thread emptied the queue
                for row in self._dropped.popleft():
                    row.holders -= 1
                    if not row.holders and row.row is not None and self._rows is not None:
                        # Not clean: its results were never checked for NaN.
                        self._rows.free(row.row, clean=False)
                        row.row = None
        if self._rows is not None and not self._rows.rows:
            self._rows = self._open = self.latest = None

    # New tokens.

    def add(
        self, rows: list[SharedRow], spans: Sequence[Span], keys: mx.array, values: mx.array
    ) -> Reading:
        """Append keys and values, ``[rows, heads, tokens, dim]``. Call it inside `at_work`.

        Rows that other caches hold as well are replaced by copies in ``rows``.
        """
        _, heads, _, k_dim = keys.shape
        geometry = LayerGeometry(heads, k_dim, values.shape[-1], keys.dtype.size)
        store = self.prepared(geometry, keys.dtype)
        self.passes += 1
        own = self._unshared(rows)
        if keys.shape[2] == 1 and all(span.count for span in spans):
            if store.needs_flush(own):
                self.flush()
            step = store.begin_decode(own)
            store.step = None
            step.append(store.layers[0], keys, values)
            return DecodeReading(self, DecodeHandle(store, store.layers[0], step))
        # As before a decode step, a row whose length has outgrown the dense start leaves it.
        if store.mostly_free or any(map(store.dense_start.outgrown, own)):
            self.flush()
        self._wait_for_readers()
        parts = [
            self._chunk(store, row, keys[index : index + 1], values[index : index + 1], span)
            for index, (row, span) in enumerate(zip(own, spans, strict=True))
        ]
        store.step = None
        self._open = ChunkReading(self, rows, parts, spans)
        return self._open

    @staticmethod
    def _chunk(
        store: LayerRows, row: Row, keys: mx.array, values: mx.array, span: Span
    ) -> PrefillHandle | None:
        if not span.count:
            return None
        step = store.begin_prefill(row, span.count)
        here = slice(span.start, span.start + span.count)
        chunk = step.append(store.layers[0], keys[:, :, here], values[:, :, here])
        return PrefillHandle(store, store.layers[0], step, chunk)

    def fill(
        self, rows: list[SharedRow], spans: Sequence[Span], keys: mx.array, values: mx.array
    ) -> None:
        """Add tokens without attending to them. Call it inside `at_work`."""
        self.add(rows, spans, keys, values)
        self._finish_open()

    def finish(self, reading: ChunkReading) -> None:
        """Write the chunks of a pass after attention has read them."""
        with self._lock:
            if self._open is reading:
                self._finish_open()

    def _finish_open(self) -> None:
        reading, self._open = self._open, None
        if reading is not None:
            for row in reading.rows:
                row.coming = 0
            self.rows.finish_chunks([part.step for part in reading.parts if part is not None])
            self.rows.flusher.wait()

    def flush(self) -> None:
        """Write pages once the device no longer reads the pools. No pass may be under way."""
        self.drain()
        self.rows.flush()
        if self.rows.mostly_free:
            self.rows.pages.compact(self.rows.pages.allocators[0].used + SLAB_PAGES)

    def drain(self) -> None:
        """Wait until the device neither reads the pools nor writes tails, between two passes."""
        self.passes += 1
        self._wait_for_readers()
        mx.eval(self.rows.arrays())

    def _wait_for_readers(self) -> None:
        # The newest step's output depends on its reads of the pools, and on all earlier ones.
        if self.latest is not None:
            mx.eval(self.latest)
            self.latest = None

    def prepared(self, geometry: LayerGeometry, dtype: mx.Dtype) -> LayerRows:
        """Return the rows, created at the first call. Raises ``ValueError`` for other shapes."""
        if self._rows is None:
            self._rows = LayerRows(
                [geometry],
                self.schemes,
                dtype,
                kind=self.kind,
                quantized_start=self.quantized_start,
            )
        layer = self._rows.layers[0]
        if (layer.geometry, layer.dtype) != (geometry, dtype):
            raise ValueError(
                f"this layer holds {layer.geometry} in {layer.dtype}, not {geometry} in {dtype}"
            )
        return self._rows

    def lazy_arrays(self) -> list[mx.array]:
        return [] if self._rows is None else self._rows.arrays()

    def _unshared(self, rows: list[SharedRow]) -> list[Row]:
        """Return rows without other references: new for empty sequences, forks of shared ones."""
        for index, shared in enumerate(rows):
            if shared.holders > 1:
                row = self.rows.new_row() if shared.row is None else self.rows.fork(shared.row)
                shared.holders -= 1
                rows[index] = SharedRow(row, 1)
            elif shared.row is None:
                shared.row = self.rows.new_row()
        return [shared.row for shared in rows if shared.row is not None]

    # Fewer tokens.

    def trim(self, rows: list[SharedRow], count: int) -> None:
        """Remove the newest ``count`` tokens of each row, or all of them. Call it inside `at_work`.

        Raises ``ValueError`` if tokens that would be visible again have left a window.
        """
        if self._rows is None or not count:
            return
        for shared in rows:
            row = shared.row
            if row is not None and not self._rows.can_trim(row, min(count, shared.length)):
                raise ValueError(
                    f"{count} tokens cannot be taken back: tokens that would become visible again"
                    f" have left the cache ({self.kind.name})"
                )
        self.passes += 1
        for row in self._unshared(rows):
            self._rows.trim(row, min(count, row.length))
