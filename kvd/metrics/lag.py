"""Measures the lag of the event loop: how late a timer fires.

The timer is slower when idle, to save power. It misses no block, because a blocked loop delays it.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from kvd.metrics.bounds import LAG_S
from kvd.metrics.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

BUSY_S = 0.1
IDLE_S = 1.0


class Lag:
    """Measures from `start` to `stop`, on the running loop."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self.seen = Histogram(LAG_S)
        self._busy = busy
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._schedule(asyncio.get_running_loop())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        wait_s = BUSY_S if self._busy() else IDLE_S
        # The loop's own clock does not count the time in which the loop did not run.
        due = time.monotonic() + wait_s
        self._timer = loop.call_later(wait_s, self._measure, loop, due)

    def _measure(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self.seen.observe(max(0.0, time.monotonic() - due))
        self._schedule(loop)
