"""What the library's decode attention reads of a step: one array of rows, one of pages.

All on the host but for two small arrays; pages of all levels in one list, row after row, each
row's in the order of their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import mlx.core as mx

if TYPE_CHECKING:
    from kvd.worker.cache.kinds import Kind
    from kvd.worker.cache.layer import Chunk, LayerStore
    from kvd.worker.cache.rows import Row
    from kvd.worker.cache.scheme import Packing


@dataclass(frozen=True)
class PageList:
    """The pages of a batch. Good until a row gets, loses or moves pages."""

    array: mx.array
    """``[pages or more, 3]`` int32: which of `levels`, slot in its pools, position of its first
    token."""
    count: int
    ends: tuple[int, ...]
    """Where each row's pages end."""
    levels: tuple[int, ...]
    """Those that occur, ascending."""

    @staticmethod
    def of(rows: Sequence[Row]) -> PageList:
        """List the rows' pages."""
        levels = tuple(sorted({page.level for row in rows for page in row.pages}))
        place = {level: at for at, level in enumerate(levels)}
        found: list[tuple[int, int, int]] = []
        ends = []
        for row in rows:
            found += [
                (place[page.level], page.slot, row.start(index))
                for index, page in enumerate(row.pages)
            ]
            ends.append(len(found))
        # Never empty: MLX does not evaluate an operation over an array without elements.
        array = mx.array(found or [(0, 0, 0)], mx.int32)
        return PageList(array, len(found), tuple(ends), levels)

    def padded(self, pages: int) -> PageList:
        """Return the same list with room for so many pages, which no row refers to."""
        more = pages - self.array.shape[0]
        if more <= 0:
            return self
        return replace(self, array=mx.pad(self.array, [(0, more), (0, 0)]))


@dataclass(frozen=True)
class NativeStep:
    """A decode step for the library."""

    library: ModuleType
    kind: Kind
    pages: PageList
    rows: mx.array
    """``[rows, 6]`` int32: slot of the tail, tokens in it, position of its first token, first page
    and the one behind the last, and the first position that is seen beside the kept ones."""

    @staticmethod
    def of(library: ModuleType, kind: Kind, rows: Sequence[Row], pages: PageList) -> NativeStep:
        """Describe rows whose lengths count the new token."""
        about = [
            (
                row.slot,
                row.tail_length,
                row.tail_start,
                pages.ends[place - 1] if place else 0,
                pages.ends[place],
                kind.low(row.length - 1),
            )
            for place, row in enumerate(rows)
        ]
        return NativeStep(library, kind, pages, mx.array(about, mx.int32))

    def append(self, layer: LayerStore, keys: mx.array, values: mx.array) -> None:
        """Write one token for each row into its tail, ``[rows or more, heads, 1, dim]``."""
        layer.tail_keys, layer.tail_values = self.library.append(
            layer.tail_keys, layer.tail_values, keys, values, self.rows
        )

    def attend(
        self, queries: mx.array, layer: LayerStore, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Attend one query a row: as `kvd.worker.attention.decode.decode_attention`."""
        found: mx.array = self.library.decode_attention(
            queries,
            self.pages.array,
            layer.tail_keys,
            layer.tail_values,
            self.rows,
            *_pools(layer, self.pages),
            scale,
            self.kind.keep,
            sinks,
        )
        return found

    def arrays(self) -> list[Any]:
        """Return what a compiled step takes instead of these."""
        return [self.rows, self.pages.array]

    def with_arrays(self, rows: mx.array, pages: mx.array) -> NativeStep:
        """Return the same step over other arrays."""
        return replace(self, rows=rows, pages=replace(self.pages, array=pages))


@dataclass(frozen=True)
class NativePrefill:
    """A chunk of one row's prompt for the library."""

    library: ModuleType
    kind: Kind
    pages: PageList
    lows: mx.array
    """``[count]`` int32: the first position that each query sees beside the kept ones."""
    offset: int
    """Position of the first query."""
    tail_start: int
    """Position of the first token that is in no page."""

    @staticmethod
    def of(library: ModuleType, kind: Kind, row: Row, count: int) -> NativePrefill:
        """Describe a row whose length does not count the chunk yet."""
        positions = range(row.length, row.length + count)
        lows = mx.array([kind.low(position) for position in positions], mx.int32)
        return NativePrefill(library, kind, PageList.of([row]), lows, row.length, row.tail_start)

    def attend(
        self,
        queries: mx.array,
        layer: LayerStore,
        chunk: Chunk,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend a chunk: as `kvd.worker.attention.prefill.prefill_attention`."""
        found: mx.array = self.library.prefill_attention(
            queries,
            self.pages.array,
            chunk.keys,
            chunk.values,
            self.lows,
            *_pools(layer, self.pages),
            scale,
            self.kind.keep,
            sinks,
            self.pages.count,
            self.offset,
            self.tail_start,
        )
        return found


Told = list[tuple[int, int, bool]]
"""For each level, bits, group, and whether groups run along the page's tokens."""


def _pools(layer: LayerStore, pages: PageList) -> tuple[list[mx.array], Told, Told]:
    """Return the arrays of the levels that occur, and how keys and values are packed."""
    pools = [layer.pools[level] for level in pages.levels]
    return (
        [array for pool in pools for array in pool.arrays()],
        [_told(pool.key_packing) for pool in pools],
        [_told(pool.value_packing) for pool in pools],
    )


def _told(packing: Packing) -> tuple[int, int, bool]:
    return packing.bits, packing.group, not packing.per_token
