"""Frozen sequences as bytes, and back: what is written when a row is parked on disk.

::

    outline   lengths, levels, pages of each row; shapes of states          JSON, one record
    rest      tails and states of each sequence                             one record each
    pages     each page once, whoever shares it: `SLICE_PAGES` at a time,   one record each
              layer after layer, level after level

Records come and go one at a time, in pieces that a step can do beside decoding. Where pages lie is
looked up anew for each: they may be moved together meanwhile. What comes back is to the bit what
was frozen, with its pages on their levels.

Does not cover: files and checksums (`kvd.worker.core.swap`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import msgspec

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.page_store import SLICE_PAGES
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.sequence import SequenceRow
from kvd.worker.cache.snapshot import RowSnapshot, SequenceSnapshot
from kvd.worker.cache.store import KVStore


class DamagedRecord(Exception):
    """What was read is not what was written."""


class RowOutline(msgspec.Struct, frozen=True):
    """A frozen row, but for the content of its tail and its pages."""

    level: int
    length: int
    pages: list[int]
    """Into the store's list of pages."""
    anchored: int
    skipped: int
    trimmed: bool


class SequenceOutline(msgspec.Struct, frozen=True):
    """A frozen sequence."""

    length: int
    rows: list[RowOutline]
    """One in each store."""
    states: list[list[list[int] | None]]
    """Of each part, the shapes of its arrays."""


class Outline(msgspec.Struct, frozen=True):
    """All that is written, but for the content."""

    sequences: list[SequenceOutline]
    levels: list[list[int]]
    """Of each store's pages, in the order of the list."""


@dataclass(frozen=True)
class _Piece:
    """Some pages of one layer and level: one record."""

    store: int
    layer: int
    level: int
    pages: tuple[int, ...]
    """Into the store's list."""


def _pieces(cache: ModelCache, levels: Sequence[Sequence[int]]) -> Iterator[_Piece]:
    for index, (store, mine) in enumerate(zip(cache.stores, levels, strict=True)):
        for level in store.pages.levels:
            places = [place for place, one in enumerate(mine) if one == level]
            for start in range(0, len(places), SLICE_PAGES):
                some = tuple(places[start : start + SLICE_PAGES])
                for layer in range(len(store.layers)):
                    yield _Piece(index, layer, level, some)


class _Book:
    """Where the pages of some sequences lie now, each by its first holder."""

    def __init__(self, sequences: Sequence[SequenceSnapshot | SequenceRow], stores: int) -> None:
        self._sequences = sequences
        self.numbers: list[dict[PageId, int]] = [{} for _ in range(stores)]
        """Of each store, its pages in the order of the list; as they lay at first."""
        self._holds: list[list[tuple[int, int]]] = [[] for _ in range(stores)]
        for index, numbers in enumerate(self.numbers):
            for number, sequence in enumerate(sequences):
                for at, page in enumerate(sequence.rows[index].pages):
                    if page not in numbers:
                        numbers[page] = len(numbers)
                        self._holds[index].append((number, at))

    def slots(self, piece: _Piece) -> list[int]:
        """Return the slots of a piece's pages."""
        holds = (self._holds[piece.store][page] for page in piece.pages)
        return [self._sequences[one].rows[piece.store].pages[at].slot for one, at in holds]


class SnapshotWriter:
    """Turns frozen sequences into records; they must stay frozen until it is over."""

    def __init__(self, cache: ModelCache, sequences: Sequence[SequenceSnapshot]) -> None:
        self._cache = cache
        self._sequences = list(sequences)
        self._book = _Book(self._sequences, len(cache.stores))
        self._levels = [[page.level for page in pages] for pages in self._book.numbers]
        self.nbytes = sum(one.nbytes for one in self._sequences) + sum(
            store.pages.page_bytes(level)
            for store, levels in zip(cache.stores, self._levels, strict=True)
            for level in levels
        )
        """Of all records, but for the outline."""

    def records(self) -> Iterator[bytes]:
        """Yield one after the other; the device must be idle whenever one is asked for."""
        yield msgspec.json.encode(
            Outline([self._outline(o) for o in self._sequences], self._levels)
        )
        for sequence in self._sequences:
            yield _bytes_of(_rest(sequence))
        for piece in _pieces(self._cache, self._levels):
            layer = self._cache.stores[piece.store].layers[piece.layer]
            sides = layer.pools[piece.level].copy(mx.array(self._book.slots(piece)))
            yield _bytes_of([array for side in sides for array in side])

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
            for row, numbers in zip(sequence.rows, self._book.numbers, strict=True)
        ]
        states = [
            [None if array is None else list(array.shape) for array in part]
            for part in sequence.state
        ]
        return SequenceOutline(sequence.length, rows, states)


class SnapshotReader:
    """Brings records back: `sequences` are running ones, whole when all records were taken.

    They have their places and pages from the first record on, and so what was reserved for them is
    enough; no step may take them before the last one. Pools may grow for them at once; raises what
    MLX raises when memory is short. `forget` them where a record is not there or `DamagedRecord`.
    """

    def __init__(self, cache: ModelCache, records: Iterator[bytes]) -> None:
        self._cache = cache
        self._records = records
        self.sequences: list[SequenceRow] = []

    def run(self) -> Iterator[None]:
        """Take a record between two yields; the device must be idle."""
        outline = self._read_outline()
        rests = [self._read_rest(one) for one in outline.sequences]
        self._make(outline, rests)
        book = _Book(self.sequences, len(self._cache.stores))
        yield
        for piece in _pieces(self._cache, outline.levels):
            self._write(piece, book)
            yield

    def forget(self) -> None:
        """Give back what was taken."""
        for one in self.sequences:
            if one.alive:
                self._cache.free(one)

    def _read_outline(self) -> Outline:
        try:
            outline = msgspec.json.decode(next(self._records), type=Outline)
        except (msgspec.MsgspecError, StopIteration) as error:
            raise DamagedRecord("there is no outline") from error
        stores = len(self._cache.stores)
        if len(outline.levels) != stores or any(len(o.rows) != stores for o in outline.sequences):
            raise DamagedRecord("it is of another model")
        return outline

    def _next(self, like: list[tuple[tuple[int, ...], mx.Dtype]]) -> list[mx.array]:
        """Return the next record as arrays of these shapes and types, evaluated."""
        try:
            record = memoryview(next(self._records))
        except StopIteration:
            raise DamagedRecord("a record is missing") from None
        sizes = [math.prod(shape) * dtype.size for shape, dtype in like]
        if sum(sizes) != len(record):
            raise DamagedRecord(f"a record has {len(record)} bytes, not {sum(sizes)}")
        arrays, at = [], 0
        for (shape, dtype), size in zip(like, sizes, strict=True):
            arrays.append(_array_of(record[at : at + size], shape, dtype))
            at += size
        mx.eval(arrays)
        return arrays

    def _read_rest(self, outline: SequenceOutline) -> list[mx.array]:
        like: list[tuple[tuple[int, ...], mx.Dtype]] = []
        for store, row in zip(self._cache.stores, outline.rows, strict=True):
            loose = row.length - PAGE_TOKENS * (len(row.pages) + row.skipped)
            for layer in store.layers:
                one = layer.geometry
                like.append(((one.kv_heads, loose, one.k_dim), store.dtype))
                like.append(((one.kv_heads, loose, one.v_dim), store.dtype))
        for part, shapes in zip(self._cache.states.parts, outline.states, strict=True):
            for dtype, shape in zip(part.dtypes, shapes, strict=True):
                if shape is not None:
                    like.append((tuple(shape), dtype))
        return self._next(like)

    def _make(self, outline: Outline, rests: list[list[mx.array]]) -> None:
        """Take pages for everything; they have no content yet."""
        taken = [
            _take(store, levels)
            for store, levels in zip(self._cache.stores, outline.levels, strict=True)
        ]
        for one, rest in zip(outline.sequences, rests, strict=True):
            arrays = iter(rest)
            rows = [
                _snapshot_row(store, row, pages, arrays)
                for store, row, pages in zip(self._cache.stores, one.rows, taken, strict=True)
            ]
            state = [
                [None if shape is None else next(arrays) for shape in part] for part in one.states
            ]
            snapshot = self._cache.snapshots.add(SequenceSnapshot(rows, state, one.length))
            try:
                self.sequences.append(self._cache.restore(snapshot))
            finally:
                self._cache.snapshots.drop(snapshot)
        for store, pages in zip(self._cache.stores, taken, strict=True):
            for page in pages:
                store.pages.allocators[page.level].release(page)  # the hold of the taking

    def _write(self, piece: _Piece, book: _Book) -> None:
        layer = self._cache.stores[piece.store].layers[piece.layer]
        pool = layer.pools[piece.level]
        count = len(piece.pages)
        sides = [[(count, *array.shape[1:]) for array in side] for side in (pool.keys, pool.values)]
        types = [[array.dtype for array in side] for side in (pool.keys, pool.values)]
        arrays = self._next(
            [one for side in range(2) for one in zip(sides[side], types[side], strict=True)]
        )
        keys, values = arrays[: len(pool.keys)], arrays[len(pool.keys) :]
        layer.write(piece.level, book.slots(piece), tuple(keys), tuple(values))


def _take(store: KVStore, levels: Sequence[int]) -> list[PageId]:
    taken = {level: iter(store.pages.take(level, levels.count(level))) for level in set(levels)}
    return [next(taken[level]) for level in levels]


def _snapshot_row(
    store: KVStore, outline: RowOutline, pages: Sequence[PageId], arrays: Iterator[mx.array]
) -> RowSnapshot:
    tails = [(next(arrays), next(arrays)) for _ in store.layers]
    return RowSnapshot(
        level=outline.level,
        length=outline.length,
        pages=[pages[number] for number in outline.pages],
        anchored=outline.anchored,
        skipped=outline.skipped,
        trimmed=outline.trimmed,
        tails=tails,
    )


def _rest(sequence: SequenceSnapshot) -> list[mx.array]:
    """Return tails and states, in the order in which they are written."""
    tails = [array for row in sequence.rows for sides in row.tails for array in sides]
    return tails + [array for part in sequence.state for array in part if array is not None]


def _bytes_of(arrays: Sequence[mx.array]) -> bytes:
    views: list[Any] = [array.reshape(-1).view(mx.uint8) for array in arrays if array.size]
    mx.eval(views)
    return b"".join(memoryview(view) for view in views)


def _array_of(raw: memoryview, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    if not raw.nbytes:
        return mx.zeros(shape, dtype)
    flat: Any = raw  # a buffer, which mlx takes and its stubs do not know
    return mx.array(flat).view(dtype).reshape(shape)
