"""The newest events of a state machine, for error messages."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from actors.machines.machine import InvalidTransition, Machine

E = TypeVar("E")
C = TypeVar("C")


@dataclass
class Entry(Generic[E, C]):
    """One event and the commands that it caused."""

    at: float
    """Time of the latest of `times` merged events."""
    event: E
    commands: list[C]
    times: int = 1

    def line(self) -> str:
        times = f" x{self.times}" if self.times > 1 else ""
        commands = f" -> {', '.join(map(repr, self.commands))}" if self.commands else ""
        return f"{self.at:.3f} {self.event!r}{times}{commands}"


class EventHistory(Generic[E, C]):
    """A state machine and its newest events. Call `handle` instead of the machine's.

    Events of the types in `merged` arrive many times a second and matter only by their time.
    Equal ones in a row without commands become one entry, so the history covers more time.
    """

    def __init__(
        self, machine: Machine[E, C], *, merged: tuple[type, ...] = (), limit: int = 512
    ) -> None:
        self._machine = machine
        self._merged = merged
        self._entries: deque[Entry[E, C]] = deque(maxlen=limit)

    def handle(self, event: E, now: float) -> list[C]:
        """Pass an event to the machine and record it; `InvalidTransition` gets the story."""
        try:
            commands = self._machine.handle(event, now)
        except InvalidTransition as error:
            error.story = self.story()
            raise
        self._record(event, now, commands)
        return commands

    def story(self, lines: int = 20) -> list[str]:
        return [entry.line() for entry in list(self._entries)[-lines:]]

    def _record(self, event: E, now: float, commands: list[C]) -> None:
        entry = Entry(now, event, commands)
        if not commands and (index := self._find_mergeable(event)) is not None:
            entry.times += self._entries[index].times
            del self._entries[index]
        self._entries.append(entry)

    def _find_mergeable(self, event: E) -> int | None:
        """Return the index of an equal event that only merged events follow."""
        for index in range(len(self._entries) - 1, -1, -1):
            entry = self._entries[index]
            if not isinstance(entry.event, self._merged) or entry.commands:
                return None
            if entry.event == event:
                return index
        return None
