"""Histograms of how long the worker spends in each phase. Recording one costs a bisection.

Consecutive entries of the same phase count as one: a decode step enters ``decode`` twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from protocol.histogram import SPAN_BOUNDS_S, DurationHistogram
from protocol.worker import Phase


class _Durations:
    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(SPAN_BOUNDS_S) + 1)
        self.total_s = 0.0


class Phases:
    """Call `enter` when a phase begins, and `leave` when the worker leaves it."""

    def __init__(self) -> None:
        self._durations: defaultdict[Phase, _Durations] = defaultdict(_Durations)
        self._phase: Phase | None = None
        self._since = 0.0

    def enter(self, phase: Phase, now: float) -> None:
        """End the previous phase and begin this one. Idle time is not recorded."""
        if phase != self._phase:
            self.leave(now)
            if phase != "idle":
                self._phase, self._since = phase, now

    def leave(self, now: float) -> None:
        if self._phase is None:
            return
        durations = self._durations[self._phase]
        self._phase = None
        took_s = now - self._since
        durations.counts[bisect_left(SPAN_BOUNDS_S, took_s)] += 1
        durations.total_s += took_s

    def histograms(self) -> dict[Phase, DurationHistogram]:
        return {
            phase: DurationHistogram(tuple(durations.counts), durations.total_s)
            for phase, durations in self._durations.items()
        }
