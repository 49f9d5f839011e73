"""How the pages of a batch are divided among the thread groups that attend to them.

A *split* is a run of one row's pages, or its tail. Thread groups attend to splits separately, and
the partial results of a row are combined in order. The size of a row's splits follows from the
row's own number of pages, so its results never depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from kvd.worker.lean_imports import np

LEAST, MOST = 4, 64
"""Limits for the pages of a split.

With fewer, combining costs more than it saves. With more, a long row keeps too few groups busy.
"""
WANTED = 64
"""Splits that a row's pages are divided into, as far as the limits above allow."""
PADDING = -1
"""Row index of splits that pad the list."""


def split_pages(pages: int) -> int:
    """Return the pages per split, a power of two, of a row with ``pages`` pages."""
    least = -(-pages // WANTED)
    return max(LEAST, min(MOST, 1 << max(0, least - 1).bit_length()))


@dataclass(frozen=True)
class Splits:
    """The splits of a batch, row by row: each row's pages in order of position, then its tail."""

    array: mx.array
    """``[splits or more, 4]`` int32: row or `PADDING`, first page, end page, and 1 for the row's
    tail, which has no pages."""
    ends: tuple[int, ...]
    """Index after each row's last split."""
    _padded: dict[int, Splits] = field(default_factory=dict)

    @staticmethod
    def of(page_ends: Sequence[int]) -> Splits:
        """Split rows whose pages end at ``page_ends`` in a common list."""
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
        return self.ends[-1]

    def padded(self, splits: int) -> Splits:
        missing = splits - self.array.shape[0]
        if missing <= 0:
            return self
        if splits not in self._padded:
            array = mx.pad(self.array, [(0, missing), (0, 0)], constant_values=mx.array(PADDING))
            self._padded[splits] = self.with_array(array)
        return self._padded[splits]

    def with_array(self, array: mx.array) -> Splits:
        """Return a copy with another array, such as the input of a compiled step."""
        return Splits(array, self.ends)
