"""The pages of a batch as one list, for backends: attention in one operation per layer.

The list has the pages of all levels, row by row, each row's in the order of their positions.
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
    """The pages of a batch. Valid until a row gains, loses or moves pages."""

    array: mx.array
    """``[pages or more, 3]`` int32: index into `levels`, slot in its pools, position of the first
    token."""
    count: int
    ends: tuple[int, ...]
    """Index after each row's last page."""
    levels: tuple[int, ...]
    """Precision levels that occur, ascending."""
    _padded: dict[int, PageList] = field(default_factory=dict)

    @staticmethod
    def of(rows: Sequence[Row]) -> PageList:
        return PageList.joined([page_locations(row) for row in rows])

    @staticmethod
    def joined(locations: Sequence[np.ndarray]) -> PageList:
        """Join the `page_locations` of several rows."""
        ends = tuple(accumulate(len(part) for part in locations))
        # Never empty: MLX does not evaluate an operation over an array without elements.
        pages = np.concatenate(locations) if ends and ends[-1] else np.zeros((1, 3), np.int32)
        count = ends[-1] if ends else 0
        levels = np.flatnonzero(np.bincount(pages[:count, 0]))
        pages[:count, 0] = np.searchsorted(levels, pages[:count, 0])
        return PageList(mx.array(pages), count, ends, tuple(levels.tolist()))

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
        """Return the list over another array, such as one of a function that is being traced."""
        return replace(self, array=array, _padded={})


def page_locations(row: Row) -> np.ndarray:
    """Return level, slot and first position of each of a row's pages, ``[pages, 3]`` int32."""
    count = len(row.pages)
    found = np.zeros((count, 3), np.int32)
    # A row may have thousands of pages, so there is no Python loop over them.
    found[:, :2] = np.fromiter(chain.from_iterable(row.pages), np.int32, 2 * count).reshape(-1, 2)
    found[:, 2] = np.arange(count)
    found[row.anchored :, 2] += row.skipped
    found[:, 2] *= PAGE_TOKENS
    return found
