"""What happened to a state machine, in a ring; enough to tell its story and to replay it.

The ring has two segments. When the newer one is full the older one is forgotten, and the state in
which the newer one began is where a replay starts. So a dump is always complete in itself: a
snapshot, then every event since with the commands that it caused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from actors.machines.machine import InvalidTransition, Machine

if TYPE_CHECKING:
    from collections.abc import Callable

E = TypeVar("E")
C = TypeVar("C")

STORY = 20
"""Entries that an error carries."""


class Entry(msgspec.Struct, Generic[E, C]):
    """One event: when it was last seen, how often in a row, and what it caused."""

    at: float
    event: E
    commands: list[C]
    times: int = 1

    def line(self) -> str:
        """Tell it in one line."""
        often = f" x{self.times}" if self.times > 1 else ""
        caused = f" -> {', '.join(map(repr, self.commands))}" if self.commands else ""
        return f"{self.at:.3f} {self.event!r}{often}{caused}"


class _Segment(Generic[E, C]):
    def __init__(self, machine: Machine[E, C]) -> None:
        self.base = msgspec.json.encode(machine)
        self.entries: list[Entry[E, C]] = []


class EventHistory(Generic[E, C]):
    """A machine and its recent past: give events to `handle` instead of to the machine.

    `signs` are events that come many times a second and only say "now": of several in a row the
    last one alone has the same effect, so that one is kept, and the story reaches further back.
    """

    def __init__(
        self, machine: Machine[E, C], *, signs: tuple[type, ...] = (), segment: int = 256
    ) -> None:
        self._machine = machine
        self._signs = signs
        self._limit = segment
        self._old: _Segment[E, C] | None = None
        self._new: _Segment[E, C] = _Segment(machine)

    def handle(self, event: E, now: float) -> list[C]:
        """Let the machine handle an event, and write it down; an illegal one gets the story."""
        try:
            commands = self._machine.handle(event, now)
        except InvalidTransition as error:
            error.story = self.story()
            raise
        self._write(event, now, commands)
        return commands

    def story(self, most: int = STORY) -> list[str]:
        """Tell the newest events, one line each."""
        entries = [*(self._old.entries if self._old else []), *self._new.entries]
        return [entry.line() for entry in entries[-most:]]

    def dump(self) -> bytes:
        """Write the snapshot and the entries as lines of JSON, for `replay`."""
        oldest = self._old or self._new
        entries = [*(self._old.entries if self._old else []), *self._new.entries]
        return b"\n".join([oldest.base, *map(msgspec.json.encode, entries)]) + b"\n"

    def _write(self, event: E, now: float, commands: list[C]) -> None:
        entries = self._new.entries
        entry = Entry(now, event, commands)
        if not commands and (place := self._same_sign(event)) is not None:
            entry.times += entries.pop(place).times
        entries.append(entry)
        if len(entries) >= self._limit:
            self._old, self._new = self._new, _Segment(self._machine)

    def _same_sign(self, event: E) -> int | None:
        """Return the place of the same sign, if only signs came after it."""
        entries = self._new.entries
        for place in range(len(entries) - 1, -1, -1):
            entry = entries[place]
            if not isinstance(entry.event, self._signs) or entry.commands:
                return None
            if entry.event == event:
                return place
        return None


class ReplayDiffers(AssertionError):
    """A machine did something else in the replay than what was written down."""


def replay(dump: bytes, machine: Any, event: Any) -> Any:
    """Replay a dump and return the machine as it is afterwards.

    `machine` and `event` are the types, such as ``Lifecycle`` and ``lifecycle.Event``.
    """
    base, *lines = dump.splitlines()
    subject = msgspec.json.decode(base, type=machine)
    decode: Callable[[bytes], Entry[Any, Any]] = msgspec.json.Decoder(Entry[event, Any]).decode
    for line in lines:
        entry = decode(line)
        commands = subject.handle(entry.event, entry.at)
        subject.check()
        if msgspec.to_builtins(commands) != entry.commands:
            raise ReplayDiffers(f"{entry.line()}\nnow: {commands!r}")
    return subject
