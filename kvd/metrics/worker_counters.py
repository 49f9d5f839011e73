"""Sums the counters of successive worker processes, so that they never fall.

Work after the last report of a process that dies is missing; reports come four times a second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.types import DurationHistogram, PrefixUse, WorkerStats

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBERS = ("step", "flushes", "kernel_launches", "computed_tokens")
_PREFIX_NUMBERS = ("queries", "query_tokens", "hit_tokens", "evicted")


@dataclass
class WorkerCounters:
    """The counters of all processes of one model."""

    _stats: WorkerStats = field(default_factory=WorkerStats)
    """The newest counters of the current or last process."""
    _life: int = 0
    _before: WorkerStats = field(default_factory=WorkerStats)
    """The sums of all earlier processes."""
    peak: int = 0
    """Peak bytes of the current or last process's allocator. Each report has the peak since the one
    before it."""

    def update(self, life: int, stats: WorkerStats) -> None:
        """Store the newest counters of the process with the number ``life``."""
        if life != self._life:
            self._before, self._life, self.peak = self.total, life, 0
        self._stats = stats
        self.peak = max(self.peak, stats.memory.peak)

    @property
    def total(self) -> WorkerStats:
        """The counters of all processes; other fields keep their defaults."""
        before, now = self._before, self._stats
        numbers = {name: getattr(before, name) + getattr(now, name) for name in _NUMBERS}
        prefix = {
            name: getattr(before.prefix, name) + getattr(now.prefix, name)
            for name in _PREFIX_NUMBERS
        }
        phases = _sum(before.phases, now.phases)
        return WorkerStats(**numbers, prefix=PrefixUse(**prefix), phases=phases)


def _sum(
    one: Mapping[str, DurationHistogram], other: Mapping[str, DurationHistogram]
) -> dict[str, DurationHistogram]:
    names = one.keys() | other.keys()
    return {
        name: one.get(name, DurationHistogram()) + other.get(name, DurationHistogram())
        for name in sorted(names)
    }
