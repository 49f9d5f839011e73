"""One layer's pages, shared by all the drop-in caches of that layer, and who holds which row.

mlx-lm merges, splits, copies and drops its caches at will. Here that moves references: a
`SharedRow` is a sequence's row and a count of the caches that hold it. A row is copied when one of
several holders is about to write it, and then only its tail is (pages are shared for good).

Why rows may be dropped at any time, in any order, from any thread:

* A finalizer only puts its rows on a queue. The queue is emptied by whoever has the lock, at the
  beginning of an operation, or by the finalizer itself if nobody has it.
* What is freed then is integers. The page's bytes stay until a flush writes others in their place,
  and a flush first waits for everything that was given to the device (`SharedStore.flush`).
* Even a graph that was built and never evaluated reads what it should: MLX's arrays are values, and
  what is still read is copied rather than overwritten.

A `Reading` knows places and not bytes, and layers that share keys ask it again after the first one.
So in a pass nothing moves: pools are cut before its tables are made, and the pages that it looks at
are not given away while its own chunks are written. After the pass it refuses to be asked.

Does not cover: the interface that mlx-lm sees (`dropin`).
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
from kvd.worker.cache.page_store import SLAB_PAGES
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.steps import PrefillStep
from kvd.worker.cache.store import KVStore
from kvd.worker.mlx_lm_drop_in.padding import Span


@dataclass(eq=False)
class SharedRow:
    """A sequence's row, and how many caches hold it. An empty sequence has no row yet."""

    row: Row | None = None
    holders: int = 0
    coming: int = 0
    """Tokens of a pass that has not been attended to yet."""

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return self.coming + (0 if self.row is None else self.row.length)


class LayerRows(KVStore):
    """A store of one layer that also fills several rows in one pass."""

    def finish_chunks(self, steps: Sequence[PrefillStep]) -> None:
        """Count the chunks of all these rows and write their pages, in one flush.

        One, because what fell out of windows is freed behind it, and the next one would write there
        while layers that share these keys may still ask for them. In this one nobody gets them.
        """
        self.step = None
        seen = [page for step in steps if step.row.alive for page in step.row.pages]
        self.take_hold(seen)
        try:
            super().finish_chunks(steps)
        finally:
            self.let_go(seen)

    def take_hold(self, pages: list[PageId]) -> None:
        """Add a holder to each of these pages."""
        for page in pages:
            self.pages.allocators[page.level].retain(page)

    def let_go(self, pages: list[PageId]) -> None:
        """Give up a hold on each of these pages."""
        for page in pages:
            self.pages.allocators[page.level].release(page)

    @property
    def wasteful(self) -> bool:
        """Whether most of the pools is free."""
        needed = self.pages.used_bytes + SLAB_PAGES * self.pages.page_bytes()
        return self.pages.nbytes > 2 * needed

    def give_back(self) -> None:
        """Cut the pools where most of them is free; right after a flush, and between passes."""
        if self.wasteful:
            self.pages.compact(self.pages.allocators[0].used + SLAB_PAGES)


class Reading(OpaqueKV):
    """Stands for a batch's keys and values in one forward pass; it can only be attended to."""

    def __init__(self, shared: SharedStore) -> None:
        self.shared = shared
        self.kind = shared.kind
        self.store = shared.rows
        self._passes = shared.passes

    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attend the new tokens' queries, ``[batch, q_heads, tokens, k_dim]``, causally.

        Raises ``RuntimeError`` once the pass is over: its pages may be elsewhere by then.
        """
        if self._passes != self.shared.passes:
            raise RuntimeError(
                "these keys and values were there during one forward pass, which is over; call"
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
        """Attend one query a row; lazy."""
        output = decode_attention(queries, self._handle, scale, sinks)
        self.shared.latest = output
        return output


class ChunkReading(Reading):
    """Chunks of unequal length, one a row; evaluated and written row by row.

    Attention of several rows with several tokens each would need a rectangle as wide as the longest
    row; one row at a time, the scratch is one row's dense layer.
    """

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
        """One a row; None where all of its tokens are padding."""
        self._spans = spans
        for one, span in zip(rows, spans, strict=True):
            one.coming = span.count

    def _attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attend each row's own tokens; the padding gets zeros. Evaluated when it returns."""
        rows = [
            self._row(queries[index : index + 1], part, span, scale, sinks)
            for index, (part, span) in enumerate(zip(self.parts, self._spans, strict=True))
        ]
        output = rows[0] if len(rows) == 1 else mx.concatenate(rows)
        mx.eval(output)
        self.shared.finish(self)
        return output

    def _row(
        self,
        queries: mx.array,
        part: PrefillHandle | None,
        span: Span,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        _, heads, tokens, _ = queries.shape
        v_dim = self.store.layers[0].geometry.v_dim
        if part is None:
            return mx.zeros((1, heads, tokens, v_dim), queries.dtype)
        end = span.start + span.count
        output = prefill_attention(queries[:, :, span.start : end], part, scale, sinks)
        if span.count < tokens:
            padding = [(0, 0), (0, 0), (span.start, tokens - end), (0, 0)]
            output = mx.pad(output, padding)
        mx.eval(output)
        return output


class SharedStore:
    """One layer's rows, made when the first keys show their shape, and the caches' hold on them.

    ``ladder``, ``kind`` and ``quantized_start`` are `KVStore`'s. ``home`` marks the store that a
    model's new caches use: rows that meet rows of another store move there.
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
        """Whether caches keep a pass's `Reading` for layers that ask for it again."""
        self.asked_again = False
        """Whether a layer has."""
        self.passes = 0
        """Counts what ends a pass: the next one, and whatever else writes or moves pages."""
        self.latest: mx.array | None = None
        """What the newest decode step attended to: evaluated, nothing reads the pools any more."""
        self._rows: LayerRows | None = None
        self._open: ChunkReading | None = None
        self._dropped: deque[list[SharedRow]] = deque()
        self._lock = threading.Lock()

    @property
    def rows(self) -> LayerRows:
        """The rows; there are none before the first keys."""
        if self._rows is None:
            raise ValueError("no keys were stored yet")
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes of all pools and tails, used or free; 0 when no row is left."""
        return 0 if self._rows is None else self._rows.nbytes

    # Who holds what.

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Hold the lock, with all earlier passes written and all dropped rows freed."""
        with self._lock:
            self._finish_open()
            self._settle()
            try:
                yield
            finally:
                self._settle()

    def hold(self, rows: Sequence[SharedRow]) -> list[SharedRow]:
        """Add a holder to each of these rows; returns them."""
        for one in rows:
            one.holders += 1
        return list(rows)

    def drop(self, rows: list[SharedRow]) -> None:
        """Take a holder away from each of these rows, now or at the next operation.

        Called by finalizers: at any time, on any thread, in the middle of another operation too.
        """
        self._dropped.append(rows)
        if self._lock.acquire(blocking=False):
            try:
                self._settle()
            finally:
                self._lock.release()

    def _settle(self) -> None:
        while self._dropped:
            with suppress(IndexError):  # emptied by another thread
                for one in self._dropped.popleft():
                    one.holders -= 1
                    if not one.holders:
                        self._free(one)
        if self._rows is not None and not self._rows.rows:
            self._rows = self._open = self.latest = None

    def _free(self, one: SharedRow) -> None:
        if one.row is None or self._rows is None:
            return
        # Nobody has looked whether what it computed was finite.
        self._rows.free(one.row, clean=False)
        one.row = None

    # New tokens.

    def add(
        self, rows: list[SharedRow], spans: Sequence[Span], keys: mx.array, values: mx.array
    ) -> Reading:
        """Take new tokens of these rows, ``[rows, heads, tokens, dim]``; call it `at_work`.

        ``rows`` is changed in place where a row was shared with another holder.
        """
        _, heads, _, k_dim = keys.shape
        geometry = LayerGeometry(heads, k_dim, values.shape[-1], keys.dtype.size)
        store = self.prepared(geometry, keys.dtype)
        self.passes += 1
        own = self._own(rows)
        if keys.shape[2] == 1 and all(span.count for span in spans):
            if store.needs_flush(own):
                self.flush()
            step = store.begin_decode(own)
            store.step = None
            step.append(store.layers[0], keys, values)
            return DecodeReading(self, DecodeHandle(store, store.layers[0], step))
        # A row leaves the dense start here as it does before a single token: by its own length.
        if store.wasteful or any(map(store.dense_start.outgrown, own)):
            self.flush()
        self._drain()
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
        """Take tokens that nobody attends to from here; call it `at_work`."""
        self.add(rows, spans, keys, values)
        self._finish_open()

    def finish(self, reading: ChunkReading) -> None:
        """Write the chunks of a pass that has been attended to."""
        with self._lock:
            if self._open is reading:
                self._finish_open()

    def _finish_open(self) -> None:
        reading, self._open = self._open, None
        if reading is not None:
            for one in reading.rows:
                one.coming = 0
            self.rows.finish_chunks([part.step for part in reading.parts if part is not None])

    def flush(self) -> None:
        """Write pages, when the device reads the pools no more; no pass is under way.

        mlx-lm's loop has given a step to the device and builds the next one meanwhile. The outputs
        of attention stand for its reading: of the newest step here, and so of all earlier ones.
        """
        self.drain()
        self.rows.flush()
        self.rows.give_back()

    def drain(self) -> None:
        """Wait until the device neither reads the pools nor writes tails; no pass is under way."""
        self.passes += 1
        self._drain()
        mx.eval(self.rows.arrays())

    def _drain(self) -> None:
        if self.latest is not None:
            mx.eval(self.latest)
            self.latest = None

    def prepared(self, geometry: LayerGeometry, dtype: mx.Dtype) -> LayerRows:
        """Return the rows for keys and values of this shape and dtype, new ones if there are none.

        Raises ``ValueError`` if there are others.
        """
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
        """Return what earlier steps left to be evaluated."""
        return [] if self._rows is None else self._rows.arrays()

    def _own(self, rows: list[SharedRow]) -> list[Row]:
        """Return rows that nobody else holds: new for empty sequences, twins of shared ones."""
        for index, one in enumerate(rows):
            if one.holders > 1:
                twin = self._twin(one)
                one.holders -= 1
                rows[index] = SharedRow(twin, 1)
            elif one.row is None:
                one.row = self.rows.new_row()
        return [one.row for one in rows if one.row is not None]

    def _twin(self, one: SharedRow) -> Row:
        if one.row is None:
            return self.rows.new_row()
        return self.rows.fork(one.row)

    # Fewer tokens.

    def trim(self, rows: list[SharedRow], count: int) -> None:
        """Take back the newest ``count`` tokens of each row, or all that it has; `at_work`.

        Raises ``ValueError`` if tokens that would be seen again have left a window.
        """
        if self._rows is None or not count:
            return
        for one in rows:
            if one.row is not None and not self._rows.can_trim(one.row, min(count, one.length)):
                raise ValueError(
                    f"{count} tokens cannot be taken back: what {self.kind.name} would show then"
                    " has left the window"
                )
        self.passes += 1
        own = self._own(rows)
        for row in own:
            self._rows.trim(row, min(count, row.length))

    def check(self, holders: Sequence[Sequence[SharedRow]]) -> None:
        """Assert the invariants, given the rows of all caches that are alive."""
        with self.at_work():
            counts: dict[SharedRow, int] = {}
            for rows in holders:
                for one in rows:
                    counts[one] = counts.get(one, 0) + 1
            assert all(one.holders == count for one, count in counts.items()), "a hold is lost"
            held = {one.row for one in counts if one.row is not None}
            assert held == set(() if self._rows is None else self._rows.rows), "a row is lost"
            if self._rows is not None:
                self._rows.check()
