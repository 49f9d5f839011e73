"""The pages of a batch as one list: what attention that is one operation a layer reads.

Pages of all levels, row after row, each row's in the order of their positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain

import mlx.core as mx
import numpy as np

from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.splits import Splits


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
    _padded: dict[int, PageList] = field(default_factory=dict)

    @staticmethod
    def of(rows: Sequence[Row]) -> PageList:
        """List the rows' pages."""
        return PageList.joined([places_of(row) for row in rows])

    @staticmethod
    def joined(parts: Sequence[np.ndarray]) -> PageList:
        """List the pages of rows of which each has its `places_of`."""
        ends = tuple(accumulate(len(part) for part in parts))
        # Never empty: MLX does not evaluate an operation over an array without elements.
        found = np.concatenate(parts) if ends and ends[-1] else np.zeros((1, 3), np.int32)
        count = ends[-1] if ends else 0
        levels = np.flatnonzero(np.bincount(found[:count, 0]))
        found[:count, 0] = np.searchsorted(levels, found[:count, 0])
        return PageList(mx.array(found), count, ends, tuple(levels.tolist()))

    @cached_property
    def splits(self) -> Splits:
        """How the rows' pages are shared out (`kvd.worker.cache.splits`)."""
        return Splits.of(self.ends)

    def padded(self, pages: int) -> PageList:
        """Return the same list with room for so many pages, which no row refers to."""
        more = pages - self.array.shape[0]
        if more <= 0:
            return self
        if pages not in self._padded:
            self._padded[pages] = self.with_array(mx.pad(self.array, [(0, more), (0, 0)]))
        return self._padded[pages]

    def with_array(self, array: mx.array) -> PageList:
        """Return the same list over another array: that of a function that is being traced."""
        return replace(self, array=array, _padded={})


def places_of(row: Row) -> np.ndarray:
    """Return level, slot and first position of each of a row's pages, ``[pages, 3]`` int32."""
    count = len(row.pages)
    found = np.zeros((count, 3), np.int32)
    # Thousands of pages: no loop over them here.
    found[:, :2] = np.fromiter(chain.from_iterable(row.pages), np.int32, 2 * count).reshape(-1, 2)
    found[:, 2] = np.arange(count)
    found[row.anchored :, 2] += row.skipped
    found[:, 2] *= PAGE_TOKENS
    return found
