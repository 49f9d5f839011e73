"""The time, errors, events and steps that all tests of the lifecycle use."""

from __future__ import annotations

from actors.machines import lifecycle as lc
from actors.machines import lifecycle_events as ev
from protocol.errors import ErrorInfo

NOW = 1000.0
WHY = ErrorInfo("worker_died", "why")
MEMORY = ErrorInfo("insufficient_memory", "no room")
EXCEEDED = ev.MemoryExceeded(7, 900 << 20, 400 << 20)


def feed(m: lc.Lifecycle, *events: ev.Event, now: float = NOW) -> list[ev.Command]:
    commands = [command for event in events for command in m.handle(event, now)]
    m.check()
    return commands
