"""Histograms of how long the worker spends in each phase.

Recording a duration costs one bisection. Consecutive entries of the same phase count as one: a
decode step enters ``decode`` twice.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

from protocol.types import SPAN_BOUNDS_S, DurationHistogram
from protocol.worker import Phase


class Phases:
    """Call `enter` when a phase begins, and `leave` when the worker leaves it."""

    def __init__(self) -> None:
        self._counts: dict[Phase, list[int]] = {}
        self._total_s: defaultdict[Phase, float] = defaultdict(float)
        self._phase: Phase | None = None
        self._since = 0.0

    def enter(self, phase: Phase, now: float) -> None:
        """End the previous phase and begin this one. Idle time is not recorded."""
        if phase != self._phase:
            self.leave(now)
            if phase != "idle":
                self._phase, self._since = phase, now

    def leave(self, now: float) -> None:
        if (phase := self._phase) is None:
            return
        self._phase = None
        took_s = now - self._since
        counts = self._counts.setdefault(phase, [0] * (len(SPAN_BOUNDS_S) + 1))
        counts[bisect_left(SPAN_BOUNDS_S, took_s)] += 1
        self._total_s[phase] += took_s

    def histograms(self) -> dict[Phase, DurationHistogram]:
        return {
            phase: DurationHistogram(tuple(counts), self._total_s[phase])
            for phase, counts in self._counts.items()
        }
