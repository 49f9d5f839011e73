"""A prefill of several rows in one forward pass: their chunks as one right-padded rectangle.

::

    row 0   t t t t t t .      t: a token of the row's chunk, at the row's own position
    row 1   t t t t . . .      .: padding, which attention ignores and the cache does not keep
    row 2   t t t t t t t
            |<- width ->|

The model's matrix products see one large batch of tokens. Each row attends, fills pages and writes
its tail according to its own `PrefillStep`, as if it were prefilled alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from kvd.worker.cache.rows import Row
from kvd.worker.cache.steps import PrefillStep, prefill_step


@dataclass(frozen=True)
class PrefillGroup:
    """New tokens of several rows, or of one row that is padded."""

    steps: tuple[PrefillStep, ...]
    width: int
    """Tokens per row that the model sees: at least the length of the longest chunk."""

    @cached_property
    def offsets(self) -> mx.array:
        """Positions of the rows' first new tokens, ``[rows]`` int32."""
        return mx.array([step.offset for step in self.steps], mx.int32)

    @property
    def even(self) -> bool:
        return all(step.count == self.width for step in self.steps)


def prefill_group(rows: list[Row], counts: list[int], width: int) -> PrefillGroup:
    """Plan ``counts`` new tokens of distinct rows that have no page written ahead."""
    if not all(0 < count <= width for count in counts):
        raise ValueError(f"chunks of {counts} tokens do not fit a rectangle {width} wide")
    steps = (prefill_step(row, count) for row, count in zip(rows, counts, strict=True))
    return PrefillGroup(tuple(steps), width)
