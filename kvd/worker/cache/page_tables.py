"""Flat tables of the pages that a batch reads, reused between steps.

Plain attention uses one table per precision level. Backends use one list of all pages.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, compress, repeat
from typing import Any, TypeAlias

import mlx.core as mx

from kvd.worker.cache.packed import PageIndex, Slots
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.splits import Splits

EARLIER = 64
"""In a chunk's page list, number of the first level whose pages are not in a pool: earlier chunks
of the same pass fill them."""

Locations: TypeAlias = "array[int]"
"""Level, slot and first position of one page after the other: an ``array`` of int32."""
PAGE_NUMBERS = 3
"""Numbers of each page in `Locations`."""


@dataclass(frozen=True)
class PageList:
    """The pages of a batch, row by row. Valid until a row gains, loses or moves pages."""

    array: mx.array
    """``[pages or more, 3]`` int32: index into `levels`, slot in that level's pools, position of
    the page's first token."""
    count: int
    ends: tuple[int, ...]
    """Index after each row's last page."""
    levels: tuple[int, ...]
    _padded: dict[int, PageList] = field(default_factory=dict)

    @staticmethod
    def of(rows: Sequence[Row]) -> PageList:
        return PageList.joined([page_locations(row) for row in rows])

    @staticmethod
    def joined(locations: Sequence[Locations]) -> PageList:
        ends = tuple(accumulate(len(part) // PAGE_NUMBERS for part in locations))
        pages = _concatenated(locations)
        levels = tuple(sorted(set(pages[::PAGE_NUMBERS])))
        if levels != tuple(range(len(levels))):
            index = {level: number for number, level in enumerate(levels)}
            pages[::PAGE_NUMBERS] = array("i", map(index.__getitem__, pages[::PAGE_NUMBERS]))
        # Never empty: MLX does not evaluate an operation over an array without elements.
        filled = pages or array("i", [0] * PAGE_NUMBERS)
        found = to_mlx(filled).reshape(-1, PAGE_NUMBERS)
        return PageList(found, ends[-1] if ends else 0, ends, levels)

    @cached_property
    def splits(self) -> Splits:
        return Splits.of(self.ends)

    def padded(self, pages: int) -> PageList:
        """Return the list padded to ``pages`` entries. No row refers to the padding."""
        missing = pages - self.array.shape[0]
        if missing <= 0:
            return self
        if pages not in self._padded:
            self._padded[pages] = self.with_array(mx.pad(self.array, [(0, missing), (0, 0)]))
        return self._padded[pages]

    def with_array(self, array: mx.array) -> PageList:
        """Return a copy with another array, such as the input of a compiled step."""
        return replace(self, array=array, _padded={})


def page_locations(row: Row) -> Locations:
    """Return the locations of a row's pages."""
    count, anchored = len(row.pages), min(row.anchored, len(row.pages))
    # A row may have thousands of pages, so there is no Python loop over them.
    pages = array("i", chain.from_iterable(row.pages))
    found = array("i", bytes(PAGE_NUMBERS * count * pages.itemsize))
    found[::PAGE_NUMBERS], found[1::PAGE_NUMBERS] = pages[::2], pages[1::2]
    places = chain(range(anchored), range(anchored + row.skipped, count + row.skipped))
    found[2::PAGE_NUMBERS] = array("i", map(PAGE_TOKENS.__mul__, places))
    return found


def to_mlx(numbers: array[int]) -> mx.array:
    """Return host integers as an array of MLX, int32 or uint32."""
    buffer: Any = numbers  # mlx's stubs do not declare it
    return mx.array(buffer)


def _concatenated(locations: Iterable[Locations]) -> Locations:
    found = array("i")
    for part in locations:
        found += part
    return found


@dataclass(frozen=True)
class LevelTable:
    """The pages of one precision level that a batch attends to."""

    level: int
    slots: mx.array
    """``[pages]`` int32, as all indices of gathers: slots in the level's pools."""
    rows: mx.array
    """``[pages]`` uint32: index of each page's row in the batch, ascending."""
    owners: tuple[int, ...]
    """`rows` on the host."""
    starts: tuple[int, ...]
    """Position of each page's first token."""
    host_slots: Slots
    """`slots` on the host, without `padding`."""
    padding: int = 0
    """Entries at the end that repeat the last page, so that compiled steps have few shapes.

    Attention masks these entries.
    """
    _indices: dict[int, tuple[PageIndex, PageIndex]] = field(default_factory=dict)
    _padded: dict[int, LevelTable] = field(default_factory=dict)

    def padded(self, pages: int) -> LevelTable:
        """Return the table with ``pages`` entries: the last page and its row are repeated.

        So no other row can see the padding.
        """
        missing = pages - len(self.owners)
        if not missing:
            return self
        if pages not in self._padded:
            owners, starts = (side + side[-1:] * missing for side in (self.owners, self.starts))
            slots = mx.concatenate([self.slots, mx.broadcast_to(self.slots[-1:], (missing,))])
            self._padded[pages] = LevelTable(
                self.level,
                slots,
                mx.array(owners, mx.uint32),
                owners,
                starts,
                self.host_slots,
                missing,
            )
        return self._padded[pages]

    @cached_property
    def real_pages(self) -> mx.array | None:
        """``[pages, 1]`` bool mask, False for padding; None if the table is not padded."""
        if not self.padding:
            return None
        count = len(self.owners)
        return mx.arange(count)[:, None] < count - self.padding

    def with_arrays(
        self, slots: mx.array, rows: mx.array, indices: dict[int, tuple[PageIndex, PageIndex]]
    ) -> LevelTable:
        """Return a copy with other arrays, such as the inputs of a compiled step."""
        return replace(self, slots=slots, rows=rows, _indices=indices, _padded={})

    def indices(self, heads: int) -> tuple[PageIndex, PageIndex]:
        """Return the indices for products of pages with queries, and with attention weights.

        Queries have one entry per row and KV head, weights one per page and KV head.
        """
        if heads not in self._indices:
            each = mx.arange(heads, dtype=mx.uint32)
            pages = mx.arange(self.slots.size, dtype=mx.uint32)
            right, by_row, by_page = (
                index[:, None] * heads + each
                for index in (self.slots.astype(mx.uint32), self.rows, pages)
            )
            self._indices[heads] = (PageIndex(by_row, right), PageIndex(by_page, right))
        return self._indices[heads]


def level_tables(locations: Sequence[Locations]) -> list[LevelTable]:
    """Build one table per precision level from the `page_locations` of a batch's rows."""
    pages = _concatenated(locations)
    levels, slots, starts = (pages[number::PAGE_NUMBERS] for number in range(PAGE_NUMBERS))
    counts = (len(part) // PAGE_NUMBERS for part in locations)
    owners = array("I", chain.from_iterable(map(repeat, range(len(locations)), counts)))
    tables = []
    for level in sorted(set(levels)):
        here = [one == level for one in levels]
        rows, own = array("I", compress(owners, here)), array("i", compress(slots, here))
        tables.append(
            LevelTable(
                level,
                to_mlx(own),
                to_mlx(rows),
                tuple(rows),
                tuple(compress(starts, here)),
                Slots(own),
            )
        )
    return tables


class PageTables:
    """Builds tables, and keeps those of the last batch until its rows or any pages change."""

    def __init__(self) -> None:
        self._version = 0
        self._tables: tuple[tuple[int, list[Row]], list[LevelTable]] | None = None
        self._page_list: tuple[tuple[int, list[Row]], PageList] | None = None
        self._locations: dict[Row, Locations] = {}
        """`page_locations` of each row, valid until `invalidate`."""

    def by_level(self, rows: list[Row]) -> list[LevelTable]:
        key = (self._version, rows)
        if self._tables is None or self._tables[0] != key:
            self._tables = (key, level_tables(self.locations_of(rows)))
        return self._tables[1]

    def page_list(self, rows: list[Row]) -> PageList:
        key = (self._version, list(rows))
        if self._page_list is None or self._page_list[0] != key:
            self._page_list = (key, PageList.joined(self.locations_of(rows)))
        return self._page_list[1]

    def locations_of(self, rows: list[Row]) -> list[Locations]:
        """Return the `page_locations` of each row."""
        for row in rows:
            if row not in self._locations:
                self._locations[row] = page_locations(row)
        return [self._locations[row] for row in rows]

    def invalidate(self, rows: Iterable[Row] | None = None) -> None:
        """Mark the tables as stale, because pages of these rows, or of any row, have changed."""
        self._version += 1
        if rows is None:
            self._locations.clear()
            return
        for row in rows:
            self._locations.pop(row, None)

    def clear(self) -> None:
        self._tables = None
        self._page_list = None
