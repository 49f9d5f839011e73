"""How the pages of a batch are shared out among the groups of threads that attend to them.

A *split* is a run of one row's pages, or its tail. Each is attended to by itself, and what comes of
a row's splits is combined in their order. How many pages a split has follows from the row's own
number of pages, so a row's numbers never depend on who shares its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

LEAST, MOST = 4, 64
"""Pages of a split: fewer do not pay for combining them, more leave a long row to few groups."""
WANTED = 64
"""Splits of a row where these bounds allow it; its tail comes on top."""
PADDING = -1
"""In the place of a row: nobody's split."""


def split_pages(pages: int) -> int:
    """Return how many pages a split of a row with so many has: a power of two."""
    least = -(-pages // WANTED)
    return max(LEAST, min(MOST, 1 << max(0, least - 1).bit_length()))


@dataclass(frozen=True)
class Splits:
    """The splits of a batch, row after row, each row's in order of position, its tail's last."""

    array: mx.array
    """``[splits or more, 4]`` int32: row (`PADDING`: nobody's), first page, end page, and 1 for
    the row's tail, which has no pages."""
    ends: tuple[int, ...]
    """Where each row's splits end."""
    _padded: dict[int, Splits] = field(default_factory=dict)

    @staticmethod
    def of(page_ends: Sequence[int]) -> Splits:
        """Split rows whose pages end there in a common list."""
        parts = []
        ends = []
        first = count = 0
        for row, end in enumerate(page_ends):
            starts = np.arange(first, end, split_pages(end - first), dtype=np.int32)
            part = np.zeros((len(starts) + 1, 4), np.int32)
            part[:, 0] = row
            part[:-1, 1] = starts
            part[:-1, 2] = np.append(starts[1:], np.int32(end)) if len(starts) else starts
            part[-1, 3] = 1
            parts.append(part)
            first, count = end, count + len(part)
            ends.append(count)
        return Splits(mx.array(np.concatenate(parts)), tuple(ends))

    @property
    def count(self) -> int:
        """Splits that are somebody's."""
        return self.ends[-1]

    def padded(self, splits: int) -> Splits:
        """Return the same with room for so many, the rest nobody's."""
        more = splits - self.array.shape[0]
        if more <= 0:
            return self
        if splits not in self._padded:
            array = mx.pad(self.array, [(0, more), (0, 0)], constant_values=mx.array(PADDING))
            self._padded[splits] = self.with_array(array)
        return self._padded[splits]

    def with_array(self, array: mx.array) -> Splits:
        """Return the same over another array: that of a function that is being traced."""
        return Splits(array, self.ends)
