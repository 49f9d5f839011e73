"""What HTTP needs of the daemon; `actors.system.System` is it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Protocol

from protocol.messages import Event, Generate
from protocol.types import DaemonStatus


class Call(Protocol):
    """A completion that runs."""

    def cancel(self) -> None:
        """Want no more of it: it ends within a step, and nothing more is told. Idempotent."""
        ...


class Backend(Protocol):
    """The daemon behind the routes."""

    def generate(self, request: Generate, deliver: Callable[[Event], None]) -> Call:
        """Run a request; its events, the last of them always, go to `deliver` on the event loop."""
        ...

    def status(self) -> DaemonStatus:
        """Return the newest snapshots; waits for nobody."""
        ...


Metrics = Callable[[str], Awaitable[tuple[bytes, str]]]
"""The exposition for Prometheus, and its content type, for who sends this ``Accept``."""

Answered = Callable[[str, int], None]
"""Told of each answer: the path as the table of routes has it, else nothing, and the status."""
