"""The parts of an answer as they are found: where they begin, and their texts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from kvd.worker.answer.scanner import FoundCall
from protocol.parts import PartKind

_MAX_NOTES = 4


@dataclass(frozen=True)
class Begin:
    """A part begins."""

    kind: PartKind
    name: str = ""
    """Name of the tool that is called."""


class Parts:
    """Collects what was found; a text part begins with its first character."""

    def __init__(self) -> None:
        self._found: list[Begin | str] = []
        self._kind: PartKind = "text"
        self.empty = True
        """Whether nothing was found yet."""
        self._noted = 0
        self.notes: list[str] = []
        """Why texts that look like calls are not."""

    def note(self, reason: str) -> None:
        """Record why a text is no call; a few are enough."""
        if self._noted < _MAX_NOTES:
            self._noted += 1
            self.notes.append(reason)

    def text(self, kind: PartKind, text: str) -> None:
        if not text:
            return
        if kind != self._kind:
            self._found.append(Begin(kind))
            self._kind = kind
        self._found.append(text)
        self.empty = False

    def call(self, call: FoundCall) -> None:
        """Begin a call with the arguments that were read so far."""
        self._found.append(Begin("call", call.name))
        self._kind = "call"
        self.empty = False
        self.more(call)

    def more(self, call: FoundCall) -> None:
        """Add arguments to the call that was begun last."""
        if text := call.take():
            self._found.append(text)

    def take(self) -> list[Begin | str]:
        """Return what was found since the last time."""
        found, self._found = self._found, []
        return found


class AnswerReader(Protocol):
    """Splits the tokens of one completion into parts."""

    parts: Parts

    @property
    def reasoning(self) -> bool:
        """Whether the newest token belongs to reasoning."""
        ...

    def push(self, token: int, text: str, literal: str) -> None:
        """Read a token.

        ``text``: the text that it completes. ``literal``: the text of a marker or another special
        token, which ``text`` does not contain.
        """
        ...

    def finish(self, *, ended: bool) -> None:
        """Read the end. ``ended``: the model ended the answer; False: it was cut off."""
        ...
