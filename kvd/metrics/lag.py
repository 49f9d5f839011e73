"""How late the event loop is: a timer that is looked at when it comes.

Ten times a second while there are requests, else once a second: a daemon at rest should let the
machine rest. A stall between two looks is seen by the timer that was due in it.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvd.metrics.bounds import LAG_S
from kvd.metrics.histogram import Histogram

if TYPE_CHECKING:
    from collections.abc import Callable

BUSY_S = 0.1
CALM_S = 1.0


class Lag:
    """Measures from `start` to `stop`, on the running loop."""

    def __init__(self, busy: Callable[[], bool]) -> None:
        self.seen = Histogram(LAG_S)
        self._busy = busy
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin."""
        self._set(asyncio.get_running_loop())

    def stop(self) -> None:
        """End; without a start too."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, loop: asyncio.AbstractEventLoop) -> None:
        due = loop.time() + (BUSY_S if self._busy() else CALM_S)
        self._timer = loop.call_at(due, self._look, loop, due)

    def _look(self, loop: asyncio.AbstractEventLoop, due: float) -> None:
        self.seen.observe(max(0.0, loop.time() - due))
        self._set(loop)
