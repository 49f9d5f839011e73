"""The parts of a choice's text: reasoning, text for the reader, and the arguments of tool calls.

A choice has one text, and marks where its parts begin. Text before the first mark is text for the
reader. A mark counts from the text's beginning, so tokens events can be joined, and a client that
comes back says how many marks it has.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import msgspec

from protocol.fields import Count

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PartKind = Literal["text", "reasoning", "call"]


class PartStart(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a part begins. It ends where the next one begins, or with the choice."""

    at: Count
    """Bytes of the choice's text, in UTF-8, before the part."""
    kind: PartKind
    name: str = ""
    """Name of the tool that is called."""
    call: str = ""
    """Id of the call, unique in the answer."""


@dataclass(frozen=True)
class Piece:
    """A piece of one part's text. A part without text has one empty piece."""

    part: PartStart
    text: str
    begins: bool
    """Whether it is the first piece of its part."""


TEXT = PartStart(0, "text")


class PartReader:
    """Splits the text of one choice, as it arrives, into pieces of its parts."""

    def __init__(self) -> None:
        self.part = TEXT
        """The part that the newest text belongs to."""
        self._begun = False
        self._bytes = 0

    def split(self, text: str, starts: Sequence[PartStart]) -> Iterator[Piece]:
        """Yield the pieces of the next text; ``starts``: the parts that begin in it, in order."""
        content = text.encode()
        done = 0
        for start in starts:
            at = start.at - self._bytes
            if at > done:
                yield self._piece(content[done:at])
                done = at
            self.part, self._begun = start, False
            if start.kind == "call":  # a call without arguments is a call
                yield self._piece(b"")
        if done < len(content):
            yield self._piece(content[done:])
        self._bytes += len(content)

    def _piece(self, content: bytes) -> Piece:
        begins, self._begun = not self._begun, True
        return Piece(self.part, content.decode(), begins)
