"""One alarm per actor, on the event loop's clock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TIMER_SLACK_S = 0.001
"""Seconds added to each deadline. The loop may fire a timer one clock tick early. Without the
slack the deadline would not have passed yet, and the alarm would fire again and again."""


class Alarm:
    """Calls `callback` at the time that was `set`, or earlier.

    Deadlines move with every heartbeat, so `set` does not replace a timer that is due earlier. When
    that timer fires early, the state machine ignores it, and the actor sets the next deadline.
    """

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback = callback
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        """Fire at `at` or earlier; None: do not fire until the next `set`."""
        if at is None:
            self.cancel()
            return
        if self._handle is not None:
            if self._handle.when() <= at + TIMER_SLACK_S:
                return
            self._handle.cancel()
        self._handle = asyncio.get_running_loop().call_at(at + TIMER_SLACK_S, self._fire)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._callback()
