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
        ends = tuple(accumulate(len(row.pages) for row in rows))
        count = ends[-1] if ends else 0
        # Thousands of pages, after each flush: no loop over them here.
        numbers = chain.from_iterable(chain.from_iterable(row.pages for row in rows))
        places = np.fromiter(numbers, np.int32, 2 * count).reshape(count, 2)
        levels, which = np.unique(places[:, 0], return_inverse=True)
        # Never empty: MLX does not evaluate an operation over an array without elements.
        found = np.zeros((max(1, count), 3), np.int32)
        found[:count, 0] = which
        found[:count, 1] = places[:, 1]
        found[:count, 2] = np.concatenate([_starts(row) for row in rows]) if count else 0
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


def _starts(row: Row) -> np.ndarray:
    """Return `Row.start` of all of a row's pages."""
    index = np.arange(len(row.pages), dtype=np.int32)
    index[row.anchored :] += row.skipped
    return index * PAGE_TOKENS
