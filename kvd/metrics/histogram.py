"""Counts values by bucket."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """The number of values in each bucket, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Values per bucket, not cumulative; the last bucket is above all bounds."""
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
