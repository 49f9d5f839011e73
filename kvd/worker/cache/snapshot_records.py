"""Snapshots as bytes, and back: what is written when a row is swapped out to disk.

::

    outline   lengths, levels and pages of each row; shapes of states   JSON, one record
    rest      tails and states of each sequence                         one record each
    pages     each page once, even if shared: `SLICE_PAGES` pages of    one record each
              a level and a layer

Records are written and read one at a time, in pieces small enough to run between decode steps. The
slots of pages are looked up for each record, because pages may have moved since the last one. The
restored sequences equal the snapshots bit for bit, with each page on its level.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import msgspec

from kvd.worker.cache.host_copy import Record, expect_bytes
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.page_store import SLICE_PAGES
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.row_snapshots import RowSnapshot
from kvd.worker.cache.rows import SequenceRow
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.sequence_snapshots import SequenceSnapshot
from kvd.worker.cache.store import KVStore
from protocol.record_file import DamagedFile


class RowOutline(msgspec.Struct, frozen=True):
    """A `RowSnapshot` without the content of its tail and pages."""

    level: int
    length: int
    pages: list[int]
    """Indices into the store's list of pages."""
    anchored: int
    skipped: int
    trimmed: bool


class SequenceOutline(msgspec.Struct, frozen=True):
    """A `SequenceSnapshot` without its content."""

    length: int
    rows: list[RowOutline]
    states: list[list[list[int] | None]]


class Outline(msgspec.Struct, frozen=True):
    """Everything that is written, without the content."""

    sequences: list[SequenceOutline]
    levels: list[list[int]]
    """For each store, the levels of its pages, in the order of its list."""


@dataclass(frozen=True)
class _Piece:
    """Some pages of one level, in one layer: one record."""

    store: int
    layer: int
    level: int
    pages: tuple[int, ...]


def _pieces(cache: ModelCache, levels: Sequence[Sequence[int]]) -> Iterator[_Piece]:
    for index, (store, page_levels) in enumerate(zip(cache.stores, levels, strict=True)):
        for level in store.pages.levels:
            numbers = [number for number, found in enumerate(page_levels) if found == level]
            for start in range(0, len(numbers), SLICE_PAGES):
                pages = tuple(numbers[start : start + SLICE_PAGES])
                for layer in range(len(store.layers)):
                    yield _Piece(index, layer, level, pages)


class _PageIndex:
    """Numbers the pages of sequences, and finds their slots through the first row that has them."""

    def __init__(self, sequences: Sequence[SequenceSnapshot | SequenceRow], stores: int) -> None:
        self._sequences = sequences
        self.numbers: list[dict[PageId, int]] = [{} for _ in range(stores)]
        """For each store, the number of each page. Keys are the pages' places at the start."""
        self._holders: list[list[tuple[int, int]]] = [[] for _ in range(stores)]
        """For each store and page number: index of a sequence, and of the page in its row."""
        for index, numbers in enumerate(self.numbers):
            for holder, sequence in enumerate(sequences):
                for position, page in enumerate(sequence.rows[index].pages):
                    if page not in numbers:
                        numbers[page] = len(numbers)
                        self._holders[index].append((holder, position))

    def slots(self, piece: _Piece) -> list[int]:
        holders = (self._holders[piece.store][page] for page in piece.pages)
        return [
            self._sequences[holder].rows[piece.store].pages[position].slot
            for holder, position in holders
        ]


class SnapshotWriter:
    """Converts snapshots to records. The snapshots must not be dropped before the last record."""

    def __init__(self, cache: ModelCache, sequences: Sequence[SequenceSnapshot]) -> None:
        self._cache = cache
        self._sequences = list(sequences)
        self._pages = _PageIndex(self._sequences, len(cache.stores))
        self._levels = [[page.level for page in pages] for pages in self._pages.numbers]
        self.nbytes = sum(sequence.nbytes for sequence in self._sequences) + sum(
            store.pages.page_bytes(level)
            for store, levels in zip(cache.stores, self._levels, strict=True)
            for level in levels
        )
        """Bytes of all records except the outline."""

    def records(self) -> Iterator[bytes]:
        """Yield the records. The device must be idle whenever the next one is requested."""
        yield msgspec.json.encode(
            Outline([self._outline(one) for one in self._sequences], self._levels)
        )
        for sequence in self._sequences:
            yield bytes_of(rest_of(sequence))
        for piece in _pieces(self._cache, self._levels):
            layer = self._cache.stores[piece.store].layers[piece.layer]
            sides = layer.pools[piece.level].copy(mx.array(self._pages.slots(piece)))
            yield bytes_of([array for side in sides for array in side])

    def _outline(self, sequence: SequenceSnapshot) -> SequenceOutline:
        rows = [
            RowOutline(
                row.level,
                row.length,
                [numbers[page] for page in row.pages],
                row.anchored,
                row.skipped,
                row.trimmed,
            )
            for row, numbers in zip(sequence.rows, self._pages.numbers, strict=True)
        ]
        states = [
            [None if array is None else list(array.shape) for array in part]
            for part in sequence.state
        ]
        return SequenceOutline(sequence.length, rows, states)


class SnapshotReader:
    """Reads records into `sequences`, which are complete after the last record.

    Their tails and pages are allocated together, before the first record of pages is read. No step
    may use the sequences before the last record. Pools may grow when `run` starts, and it raises
    MLX's errors if memory is short. Call `forget` if a record is missing or damaged.
    """

    def __init__(self, cache: ModelCache, records: Iterator[bytes | memoryview]) -> None:
        self._cache = cache
        self._records = records
        self.sequences: list[SequenceRow] = []

    def run(self) -> Iterator[None]:
        """Read everything except pages, then one record of pages after each yield.

        The device must be idle.
        """
        outline = self._read_outline()
        rests = [self._read_rest(sequence) for sequence in outline.sequences]
        self._make(outline, rests)
        pages = _PageIndex(self.sequences, len(self._cache.stores))
        yield
        for piece in _pieces(self._cache, outline.levels):
            self._write(piece, pages)
            yield

    def forget(self) -> None:
        for sequence in self.sequences:
            if sequence.alive:
                self._cache.free(sequence)

    def _read_outline(self) -> Outline:
        try:
            outline = msgspec.json.decode(next(self._records), type=Outline)
        except (msgspec.MsgspecError, StopIteration) as error:
            raise DamagedFile("the outline is missing or unreadable") from error
        stores = len(self._cache.stores)
        if len(outline.levels) != stores or any(len(o.rows) != stores for o in outline.sequences):
            raise DamagedFile("the records are from another model")
        return outline

    def _next(self) -> Record:
        try:
            return next(self._records)
        except StopIteration:
            raise DamagedFile("a record is missing") from None

    def _read_rest(self, outline: SequenceOutline) -> list[mx.array]:
        like: list[tuple[tuple[int, ...], mx.Dtype]] = []
        for store, row in zip(self._cache.stores, outline.rows, strict=True):
            loose = row.length - PAGE_TOKENS * (len(row.pages) + row.skipped)
            for layer in store.layers:
                g = layer.geometry
                like.append(((g.kv_heads, loose, g.k_dim), store.dtype))
                like.append(((g.kv_heads, loose, g.v_dim), store.dtype))
        for part, shapes in zip(self._cache.states.parts, outline.states, strict=True):
            for dtype, shape in zip(part.dtypes, shapes, strict=True):
                if shape is not None:
                    like.append((tuple(shape), dtype))
        return arrays_of(self._next(), like)

    def _make(self, outline: Outline, rests: list[list[mx.array]]) -> None:
        """Make the sequences. Their pages have no content yet."""
        taken = [
            _take(store, levels)
            for store, levels in zip(self._cache.stores, outline.levels, strict=True)
        ]
        for sequence, rest in zip(outline.sequences, rests, strict=True):
            arrays = iter(rest)
            rows = [
                _snapshot_row(store, row, pages, arrays)
                for store, row, pages in zip(self._cache.stores, sequence.rows, taken, strict=True)
            ]
            state = [
                [None if shape is None else next(arrays) for shape in part]
                for part in sequence.states
            ]
            snapshot = self._cache.snapshots.add(SequenceSnapshot(rows, state, sequence.length))
            try:
                self.sequences.append(self._cache.restore(snapshot))
            finally:
                self._cache.snapshots.drop(snapshot)
        for store, pages in zip(self._cache.stores, taken, strict=True):
            store.pages.release(pages)  # the references from `take`

    def _write(self, piece: _Piece, pages: _PageIndex) -> None:
        layer = self._cache.stores[piece.store].layers[piece.layer]
        wait = layer.write_record(piece.level, pages.slots(piece), self._next())
        if wait is not None:
            wait()


def _take(store: KVStore, levels: Sequence[int]) -> list[PageId]:
    taken = {level: iter(store.pages.take(level, levels.count(level))) for level in set(levels)}
    return [next(taken[level]) for level in levels]


def _snapshot_row(
    store: KVStore, outline: RowOutline, pages: Sequence[PageId], arrays: Iterator[mx.array]
) -> RowSnapshot:
    return RowSnapshot(
        level=outline.level,
        length=outline.length,
        pages=[pages[number] for number in outline.pages],
        anchored=outline.anchored,
        skipped=outline.skipped,
        trimmed=outline.trimmed,
        tails=[(next(arrays), next(arrays)) for _ in store.layers],
    )


def rest_of(sequence: SequenceSnapshot) -> list[mx.array]:
    """Return a snapshot's tails and states, in the order in which they are written."""
    tails = [array for row in sequence.rows for sides in row.tails for array in sides]
    return tails + [array for part in sequence.state for array in part if array is not None]


def bytes_of(arrays: Sequence[mx.array]) -> bytes:
    views: list[Any] = [array.reshape(-1).view(mx.uint8) for array in arrays if array.size]
    mx.eval(views)
    return b"".join(memoryview(view) for view in views)


def arrays_of(record: Record, like: Sequence[tuple[tuple[int, ...], mx.Dtype]]) -> list[mx.array]:
    """Return a record as arrays of these shapes and dtypes; they do not refer to its memory.

    They are views of evaluated copies, which are lazy: an evaluation would wait for the step in
    flight. Raises `DamagedFile` if it has another length.
    """
    sizes = [math.prod(shape) * dtype.size for shape, dtype in like]
    expect_bytes(record, sum(sizes))
    view, start, arrays = memoryview(record), 0, []
    for (shape, dtype), size in zip(like, sizes, strict=True):
        arrays.append(_array_of(view[start : start + size], shape, dtype))
        start += size
    return arrays


def _array_of(raw: memoryview, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if not raw.nbytes:
        return mx.zeros(shape, dtype)
    flat: Any = raw  # a buffer, which mlx accepts although its stubs do not say so
    return mx.array(flat).view(dtype).reshape(shape)
