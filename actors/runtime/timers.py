"""One alarm per actor: rings at a time of the event loop's clock, or not at all."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


TIMER_SLACK_S = 0.001
"""A loop may fire a timer one tick of its clock early; then a deadline would not have passed yet,
and the alarm would ring without end."""


class Alarm:
    """Calls `ring` when its time comes.

    A deadline moves with each sign of life, so `set` does not cancel a timer that is early: it
    may ring too early, and the machine behind it ignores that and is asked for its deadline again.
    """

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at: float | None) -> None:
        """Ring at `at`, or earlier; None: not before the next `set`."""
        if at is None:
            self.cancel()
            return
        if self._handle is not None:
            if self._handle.when() <= at + TIMER_SLACK_S:
                return
            self._handle.cancel()
        self._handle = asyncio.get_running_loop().call_at(at + TIMER_SLACK_S, self._fire)

    def cancel(self) -> None:
        """Do not ring."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _fire(self) -> None:
        self._handle = None
        self._ring()
