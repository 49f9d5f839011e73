"""Counters of processes that begin at 0 with each life, as one that never falls.

A worker tells its counters four times a second while it works; what it did after the last time is
not known when it dies, and missing here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.histogram import DurationHistogram
from protocol.types import PrefixUse, WorkerStats

if TYPE_CHECKING:
    from collections.abc import Mapping

_NUMBERS = ("step", "flushes", "kernel_launches", "computed_tokens")
_OF_PREFIXES = ("queries", "query_tokens", "hit_tokens", "evicted")


@dataclass
class Lives:
    """What all processes of one model have counted."""

    _stats: WorkerStats = field(default_factory=WorkerStats)
    """Of the process of now, or the last one."""
    _life: int = 0
    _before: WorkerStats = field(default_factory=WorkerStats)
    """The sums of all lives before that."""
    peak: int = 0
    """The most that this life's allocator has counted; it forgets that when it has told it."""

    def hear(self, life: int, stats: WorkerStats) -> None:
        """Take the newest counters."""
        if life != self._life:
            self._before, self._life, self.peak = self.total, life, 0
        self._stats = stats
        self.peak = max(self.peak, stats.memory.peak)

    @property
    def total(self) -> WorkerStats:
        """The counters of all lives together; of the rest nothing."""
        one, other = self._before, self._stats
        numbers = {name: getattr(one, name) + getattr(other, name) for name in _NUMBERS}
        prefix = {
            name: getattr(one.prefix, name) + getattr(other.prefix, name) for name in _OF_PREFIXES
        }
        phases = _sum(one.phases, other.phases)
        return WorkerStats(**numbers, prefix=PrefixUse(**prefix), phases=phases)


def _sum(
    one: Mapping[str, DurationHistogram], other: Mapping[str, DurationHistogram]
) -> dict[str, DurationHistogram]:
    names = one.keys() | other.keys()
    return {
        name: one.get(name, DurationHistogram()) + other.get(name, DurationHistogram())
        for name in sorted(names)
    }
