"""The daemon's event loop, whose clock stands still while the loop does not run.

The loop does not run while its process is stopped (SIGSTOP, a frozen container) or starved, or
while a callback blocks it. If its clock went on, every deadline could have passed when it runs
again, before it reads what arrived in the meantime: the watchdog would end healthy workers.
"""

from __future__ import annotations

import asyncio
import math
import selectors
import time
from collections.abc import Callable
from typing import Any

import structlog

LATE_S = 1.0
"""The loop runs late by milliseconds when it is busy. More than this counts as not running."""


class RunningClock:
    """Monotonic seconds, without gaps of more than `LATE_S` in which nothing read the clock."""

    def __init__(self, read: Callable[[], float], on_gap: Callable[[float], object]) -> None:
        """``read``: the monotonic clock. ``on_gap`` gets the length of each gap in seconds."""
        self._read = read
        self._on_gap = on_gap
        self._seen = read()
        self._gaps_s = 0.0
        self._now = self._seen

    def now(self, waited_s: float = 0.0) -> float:
        """Return the time. ``waited_s``: intended wait since the last call; no gap up to here."""
        at = self._read()
        gap_s = at - self._seen - waited_s
        self._seen = at
        if gap_s > LATE_S:
            self._gaps_s += gap_s
            self._on_gap(gap_s)
        # Rounding alone may put the difference 1e-14 s before the last one.
        self._now = max(self._now, at - self._gaps_s)
        return self._now


class _Selector(selectors.DefaultSelector):
    """Reports the loop's waits to the clock."""

    def __init__(self, clock: RunningClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> Any:
        self._clock.now()
        events = super().select(timeout)
        self._clock.now(math.inf if timeout is None else max(0.0, timeout))
        return events


class DaemonLoop(asyncio.SelectorEventLoop):
    """An event loop on a `RunningClock`. Gaps are logged."""

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._running_clock = RunningClock(read, _log_gap)
        super().__init__(_Selector(self._running_clock))

    def time(self) -> float:
        return self._running_clock.now()


def _log_gap(gap_s: float) -> None:
    structlog.get_logger("kvd.host.loop").warning(
        "the event loop did not run, and no deadline counts this time", seconds=round(gap_s, 1)
    )
