"""What the scanners of call bodies have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class Malformed(Exception):
    """The text is no call; the message says why."""


@dataclass
class FoundCall:
    """A call, as far as its body was read."""

    name: str
    pieces: list[str] = field(default_factory=list)
    """The arguments as JSON, in pieces. A consumer may remove those that it has read."""
    complete: bool = False

    def take(self) -> str:
        """Return the arguments that were not taken yet."""
        text = "".join(self.pieces)
        self.pieces.clear()
        return text


class Scanner(Protocol):
    """Reads the body between the markers of a call, in pieces of any size."""

    calls: list[FoundCall]
    """Calls whose name is known. Only the last one may be incomplete."""
    done: bool
    """Whether the body is complete."""

    def push(self, text: str) -> str:
        """Read more text; return what follows the body, or a complete call, in it.

        Raises `Malformed`.
        """
        ...

    def push_end(self, text: str) -> str:
        """Read the closing marker, if it is a token, as `push` does.

        Inside a string it is ordinary text.
        """
        ...
