"""Segments as bytes, and back: the part of a prompt's snapshot that lies beyond a shorter prefix.

::

    outline   length, level and page numbers of each row; shapes of states      JSON, one record
    rest      tails and states at the segment's end                             one record
    pages     `SegmentOutline.record_pages` pages of one layer                  one record each

A page's *number* is its place in the sequence: number 3 holds the tokens 192 to 255. A segment
contains the pages that its base lacks. If the base is longer, it has all pages, except those that
left its windows. A restored row takes its tails and states from the last
segment, and each page from the segment that has it. Pages that left a window are in no row, and
need not be in a segment.

The restored sequence equals the snapshot bit for bit.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Generator, Iterator, Sequence
from typing import Annotated

import mlx.core as mx
import msgspec
from msgspec import Meta

from kvd.worker.cache import cuda_driver, device_copy
from kvd.worker.cache.host_copy import COPIED_TOGETHER, Record, needs_idle_device
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.pool_growth import GrowthBehindSteps, lacks_room_for
from kvd.worker.cache.rows import Row, SequenceRow
from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages
from kvd.worker.cache.sequence_snapshots import SequenceSnapshot
from kvd.worker.cache.snapshot_records import arrays_of, bytes_of, rest_of
from kvd.worker.cache.store import KVStore
from protocol.record_file import DamagedFile

RECORD_PAGES = 16
"""Most pages of one layer in a record, except with CUDA."""
MOST_RECORD_BYTES = 10 * 1024 * 1024
"""Limit of the records with more than `RECORD_PAGES` pages."""
CUDA_RECORD_PAGES = 64
"""Most pages of one layer in a record with CUDA. A copy costs the host 0.14 ms, and the bus as much
for 9 MB, which are 64 pages of Qwen3-0.6B or 8B (H200)."""
Records = Iterator[Record | None]
"""The records of one file. None: the next one is not read yet."""


class SegmentRow(msgspec.Struct, frozen=True):
    """One store's row at the segment's end."""

    level: int
    skipped: int
    pages: list[int]
    """Numbers of the pages that the segment contains, ascending."""


class SegmentOutline(msgspec.Struct, frozen=True):
    """Everything that a segment contains, without the content."""

    length: int
    rows: list[SegmentRow]
    states: list[list[list[int] | None]]
    record_pages: Annotated[int, Meta(ge=1)] = 16
    """Most pages of one layer in a record. Files from before this field have 16."""


def record_pages(cache: ModelCache) -> int:
    """Return the most pages of one layer in the records that this process writes."""
    if not cuda_driver.is_usable():
        return RECORD_PAGES
    fitting = MOST_RECORD_BYTES // max(1, largest_page_bytes(cache))
    return max(RECORD_PAGES, min(CUDA_RECORD_PAGES, fitting))


def record_bytes(cache: ModelCache) -> int:
    """Return the bytes of the largest record of pages that this process writes."""
    return record_pages(cache) * largest_page_bytes(cache)


def largest_page_bytes(cache: ModelCache) -> int:
    """Return the bytes of the largest page of one layer, over all layers and levels."""
    levels = (level for store in cache.stores for level in store.pages.layer_page_bytes)
    return max((nbytes for level in levels for nbytes in level), default=0)


def page_numbers(row: Row) -> list[int]:
    """Return the numbers of a row's pages, ascending."""
    return [row.start(index) // PAGE_TOKENS for index in range(len(row.pages))]


def can_extend(cache: ModelCache, base: int, end: int) -> bool:
    """Return whether a row of ``end`` tokens has the pages of a row of ``base`` tokens.

    It does not if it left its dense start in between.
    """
    return all(
        store.dense_start.level(base) == store.dense_start.level(end) for store in cache.stores
    )


def prepare_copies(cache: ModelCache) -> None:
    """Compile what the device needs to copy records into the pools.

    It takes about a second with CUDA. Without it, records are copied by the driver.
    """
    for store in cache.stores:
        for layer in store.layers:
            for pool in layer.pools:
                device_copy.prepare(pool.arrays())


def growth_for(cache: ModelCache) -> GrowthBehindSteps:
    """Return what grows a cache's pools for reads, one after another."""
    return GrowthBehindSteps(cache.settings.step_down_scratch)


class SegmentRecords:
    """The records of one segment: a snapshot's tails and states, and the pages that its base lacks.

    ``base``: tokens of the base, which has the same beginning; 0: there is none. The snapshot
    must not be dropped, nor its pages moved to another level, before the last record.
    """

    def __init__(self, cache: ModelCache, snapshot: SequenceSnapshot, base: int) -> None:
        self._cache = cache
        self._snapshot = snapshot
        self._numbers = []
        for store, row in zip(cache.stores, snapshot.rows, strict=True):
            windows_differ = store.kind.bounded and base > snapshot.length
            first = 0 if windows_differ else full_pages(base)
            self._numbers.append([number for number in page_numbers(row) if number >= first])
        pages = (
            len(numbers) * store.pages.page_bytes(row.level)
            for store, row, numbers in zip(cache.stores, snapshot.rows, self._numbers, strict=True)
        )
        self.nbytes = snapshot.nbytes + sum(pages)
        """Bytes of all records except the outline."""

    def __iter__(self) -> Iterator[bytes]:
        """Yield the records. The device must be idle whenever the next one is requested."""
        snapshot = self._snapshot
        rows = [
            SegmentRow(row.level, row.skipped, numbers)
            for row, numbers in zip(snapshot.rows, self._numbers, strict=True)
        ]
        states = [
            [None if array is None else list(array.shape) for array in part]
            for part in snapshot.state
        ]
        together = record_pages(self._cache)
        yield msgspec.json.encode(SegmentOutline(snapshot.length, rows, states, together))
        yield bytes_of(rest_of(snapshot))
        for store, row, numbers in zip(
            self._cache.stores, snapshot.rows, self._numbers, strict=True
        ):
            for some in _slices(numbers, together):
                for layer in store.layers:
                    slots = [row.pages[row.index_of(number)].slot for number in some]
                    sides = layer.pools[row.level].copy(mx.array(slots))
                    yield bytes_of([array for side in sides for array in side])


class SegmentReader:
    """Extends a sequence to the end of a segment, from the records of that segment and its bases.

    ``segments``: the records of each, the last segment first, then its base, and so on.
    ``sequence`` holds the prompt's beginning, or nothing, and has no slots before the last record
    (`unplaced_rows`). Call `forget` if a record is missing or damaged: it frees the sequence. A
    record is used until `run` yields, and at most until `COPIED_TOGETHER` others are taken.
    ``skip(index, numbers)`` is called with the numbers of a segment's records that are not needed;
    these may be empty. ``growth``: grows the pools; None: the reader has its own. ``together``:
    returns how many copies may be under way at once, from 1 to `COPIED_TOGETHER`; `run` waits for
    all of them before it yields.
    """

    def __init__(
        self,
        cache: ModelCache,
        sequence: SequenceRow,
        segments: Sequence[Records],
        skip: Callable[[int, Container[int]], None] = lambda _index, _numbers: None,
        growth: GrowthBehindSteps | None = None,
        together: Callable[[], int] = lambda: COPIED_TOGETHER,
    ) -> None:
        self._cache = cache
        self._skip = skip
        self._together = together
        self._segments = segments
        self.sequences = [sequence]
        self.reading = 0
        """Index of the segment that is being read."""
        self._growth = growth or growth_for(cache)
        self.needs_idle_device = False
        """Whether no step may be in flight while `run` continues."""
        self._copies: list[Callable[[], None]] = []
        """Wait for the copies that were begun since `run` last yielded."""
        self._missing: list[set[int]] = []
        """For each store, the numbers of pages whose content is not read yet."""

    def run(self) -> Iterator[float]:
        """Read the segments; yield after each record, and while the next one is not read yet.

        The device must be idle whenever `needs_idle_device` is true. Pools that are too small grow
        first, one piece between two yields. Yields what `GrowthBehindSteps.make_room_for` yields,
        and 0 after other work. Raises MLX's errors if memory is short, and `DamagedFile`.
        """
        for index, records in enumerate(self._segments):
            self.reading = index
            outline = self._outline((yield from _next(records)))
            if index:
                self._skip(index, self._unneeded(outline))
            rest = yield from _next(records)
            if index == 0:
                arrays = self._read_rest(outline, rest)  # the record ends with the next yield
                yield from self._make_room(outline)
                self._extend(outline, iter(arrays))
                self._skip(index, self._unneeded(outline))
                self.needs_idle_device = needs_idle_device()
            try:
                yield from self._read_pages(outline, records)
            finally:
                self._end_copies()
            if self._is_complete:
                return  # the rest is of a longer prefix
            while (record := next(records, b"")) is None:
                yield 0.0
            if record:
                raise DamagedFile("there are more records than pages")
        if not self._is_complete:
            raise DamagedFile("the segments lack pages of the prefix")

    @property
    def _is_complete(self) -> bool:
        return bool(self._segments) and not any(self._missing)

    def forget(self) -> None:
        for sequence in self.sequences:
            if sequence.alive:
                self._cache.free(sequence, clean=False)

    def _outline(self, record: Record) -> SegmentOutline:
        try:
            outline = msgspec.json.decode(record, type=SegmentOutline)
        except msgspec.MsgspecError as error:
            raise DamagedFile("the outline is unreadable") from error
        if len(outline.rows) != len(self._cache.stores):
            raise DamagedFile("the segment is from another model")
        return outline

    def _unneeded(self, outline: SegmentOutline) -> set[int]:
        """Return the numbers of the records without a missing page. The outline has the number 0.

        The rest is among them: the row has those of the last segment.
        """
        numbers = itertools.count(2)
        unneeded = {1}
        for store, found, missing in zip(
            self._cache.stores, outline.rows, self._missing, strict=True
        ):
            for some in _slices(found.pages, outline.record_pages):
                records = list(itertools.islice(numbers, len(store.layers)))
                if missing.isdisjoint(some):
                    unneeded.update(records)
        return unneeded

    def _make_room(self, outline: SegmentOutline) -> Iterator[float]:
        """Grow pools for the pages that the sequence lacks."""
        (sequence,) = self.sequences
        parts = list(zip(self._cache.stores, sequence.rows, outline.rows, strict=True))
        lacking = first = True
        while lacking:  # other rows may take pages of one store while another one grows
            lacking = False
            for store, row, target in parts:
                if not 0 <= target.level < len(store.pages.allocators):
                    raise DamagedFile(f"there is no level {target.level}")
                held = _held(row, target.level)
                missing = [n for n in _numbers(row, target, outline.length) if n not in held]
                allocator = store.pages.allocators[target.level]
                ahead = first and lacks_room_for(store, allocator, len(missing))
                if allocator.can_take(len(missing)) and not ahead:
                    continue
                lacking = True
                if self._growth.needs_idle_device:
                    self.needs_idle_device = True
                    yield 0.0
                for seconds in self._growth.make_room_for(store, target.level, len(missing)):
                    self.needs_idle_device = self._growth.needs_idle_device
                    yield seconds
            first = False

    def _extend(self, outline: SegmentOutline, arrays: Iterator[mx.array]) -> None:
        (sequence,) = self.sequences
        for store, row, target in zip(self._cache.stores, sequence.rows, outline.rows, strict=True):
            tails = [(next(arrays), next(arrays)) for _ in store.layers]
            self._missing.append(_extend(store, row, target, outline.length, tails))
        state = [
            [None if shape is None else next(arrays) for shape in part] for part in outline.states
        ]
        sequence.state = state
        sequence.length = outline.length

    def _read_rest(self, outline: SegmentOutline, record: Record) -> list[mx.array]:
        loose = outline.length - PAGE_TOKENS * full_pages(outline.length)
        like: list[tuple[tuple[int, ...], mx.Dtype]] = []
        for store in self._cache.stores:
            for layer in store.layers:
                g = layer.geometry
                like.append(((g.kv_heads, loose, g.k_dim), store.dtype))
                like.append(((g.kv_heads, loose, g.v_dim), store.dtype))
        parts = self._cache.states.parts
        if len(outline.states) != len(parts):
            raise DamagedFile("the segment is from another model")
        for part, shapes in zip(parts, outline.states, strict=True):
            for dtype, shape in zip(part.dtypes, shapes, strict=True):
                if shape is not None:
                    like.append((tuple(shape), dtype))
        return arrays_of(record, like)

    def _read_pages(self, outline: SegmentOutline, records: Records) -> Iterator[float]:
        (sequence,) = self.sequences
        for store, row, found, missing in zip(
            self._cache.stores, sequence.rows, outline.rows, self._missing, strict=True
        ):
            for some in _slices(found.pages, outline.record_pages):
                if self._is_complete:
                    return
                for layer in store.layers:
                    record = yield from _next(records, self._end_copies)
                    if missing.intersection(some):
                        slots = [  # pages may move at each yield
                            row.pages[row.index_of(number)].slot if number in missing else None
                            for number in some
                        ]
                        wait = layer.write_record(found.level, slots, record)
                        self._copies += [] if wait is None else [wait]
                        if wait is None or len(self._copies) >= self._together():
                            self._end_copies()
                            yield 0.0
                    else:
                        self._end_copies()  # records that follow use their memory again
                missing.difference_update(some)

    def _end_copies(self) -> None:
        """Wait for the copies that were begun: the memory of their records is used again."""
        while self._copies:
            self._copies.pop()()


def _extend(
    store: KVStore,
    row: Row,
    target: SegmentRow,
    length: int,
    tails: Sequence[tuple[mx.array, mx.array]],
) -> set[int]:
    """Give a row the length, pages and tails of the target; return the pages without content."""
    numbers = _numbers(row, target, length)
    held = _held(row, target.level)
    missing = [number for number in numbers if number not in held]
    taken = dict(zip(missing, store.pages.take(target.level, len(missing)), strict=True))
    held = _held(row, target.level)  # `take` may have moved the row's pages
    pages = [taken[number] if number in taken else held[number] for number in numbers]
    content = Row(-1, target.level, length, pages, anchored=row.anchored)
    content.skipped = target.skipped
    store.replace_content(row, content, tails)
    return set(missing)


def _numbers(row: Row, target: SegmentRow, length: int) -> list[int]:
    """Return the numbers of the pages that a row has once it is extended to a segment's end."""
    paged = full_pages(length)
    anchored = min(row.anchored, paged)
    numbers = [*range(anchored), *range(anchored + target.skipped, paged)]
    if length < row.length or len(numbers) != paged - target.skipped:
        raise DamagedFile(f"a row of {length} tokens cannot skip {target.skipped} pages")
    return numbers


def _held(row: Row, level: int) -> dict[int, PageId]:
    """Return a row's pages by number, if they are at this level."""
    return dict(zip(page_numbers(row), row.pages, strict=True)) if row.level == level else {}


def _slices(numbers: Sequence[int], pages: int) -> Iterator[Sequence[int]]:
    for start in range(0, len(numbers), pages):
        yield numbers[start : start + pages]


def _next(
    records: Records, before_yield: Callable[[], None] = lambda: None
) -> Generator[float, None, Record]:
    """Return the next record; yield while it is not read yet."""
    try:
        while (record := next(records)) is None:
            before_yield()
            yield 0.0
    except StopIteration:
        raise DamagedFile("a record is missing") from None
    return record
