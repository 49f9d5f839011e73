"""How long the worker was in each phase, in a few buckets: what a step costs for it is a bisection.

Phases that follow each other without a break are one: a decode step enters ``decode`` twice.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import TYPE_CHECKING

from protocol.histogram import SPAN_BOUNDS_S, DurationHistogram

if TYPE_CHECKING:
    from protocol.worker import Phase


class _Times:
    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(SPAN_BOUNDS_S) + 1)
        self.total_s = 0.0


class Phases:
    """Tell it when a phase begins (`enter`) and when nothing of the kind goes on (`leave`)."""

    def __init__(self) -> None:
        self._times: dict[Phase, _Times] = {}
        self._phase: Phase | None = None
        self._since = 0.0

    def enter(self, phase: Phase, now: float) -> None:
        """Note that a phase begins; the one before it is over. Being idle is none."""
        if phase != self._phase:
            self.leave(now)
            if phase != "idle":
                self._phase, self._since = phase, now

    def leave(self, now: float) -> None:
        """Note that the phase is over."""
        if (phase := self._phase) is None:
            return
        self._phase = None
        if (times := self._times.get(phase)) is None:
            times = self._times[phase] = _Times()
        took_s = now - self._since
        times.counts[bisect_left(SPAN_BOUNDS_S, took_s)] += 1
        times.total_s += took_s

    def spreads(self) -> dict[Phase, DurationHistogram]:
        """Return what is known of each phase that there was."""
        return {
            phase: DurationHistogram(tuple(times.counts), times.total_s)
            for phase, times in self._times.items()
        }
