"""How often something took how long: what a worker counts of its steps, and what travels of it."""

from __future__ import annotations

import msgspec

SPAN_BOUNDS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Of a worker's phases: from a small model's decode step to a chunk of 8B parameters on a CPU."""


class DurationHistogram(msgspec.Struct, frozen=True):
    """Times by size.

    At most 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250 and 500 ms, 1, 2.5, 5, 10 and 30 s, and longer.
    """

    counts: tuple[int, ...] = (0,) * (len(SPAN_BOUNDS_S) + 1)
    """Of each size alone."""
    total_s: float = 0.0
    """Of all of them."""

    def __add__(self, other: DurationHistogram) -> DurationHistogram:
        counts = tuple(
            ours + theirs for ours, theirs in zip(self.counts, other.counts, strict=True)
        )
        return DurationHistogram(counts, self.total_s + other.total_s)
