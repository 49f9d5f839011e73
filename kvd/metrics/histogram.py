"""Counts by size: what a histogram of Prometheus is before it is written down."""

from __future__ import annotations

from bisect import bisect_left


class Histogram:
    """How many values were at most as large as each bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        """Of each size alone; the last one: above all bounds."""
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
