"""Histograms of durations, which workers report and metrics add up."""

from __future__ import annotations

import msgspec

SPAN_BOUNDS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
"""Upper bounds of the buckets, in seconds: from a small model's decode step to a chunk of an 8B
model on a CPU."""


class DurationHistogram(msgspec.Struct, frozen=True):
    """Durations by bucket.

    Buckets end at 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250 and 500 ms, and at 1, 2.5, 5, 10 and 30 s.
    The last one has no end.
    """

    counts: tuple[int, ...] = (0,) * (len(SPAN_BOUNDS_S) + 1)
    """Durations in each bucket alone, not cumulative."""
    total_s: float = 0.0
    """Sum of all durations, in seconds."""

    def __add__(self, other: DurationHistogram) -> DurationHistogram:
        counts = tuple(a + b for a, b in zip(self.counts, other.counts, strict=True))
        return DurationHistogram(counts, self.total_s + other.total_s)
