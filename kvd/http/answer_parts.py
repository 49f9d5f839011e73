"""The parts of one choice so far: what a stream counts, and what an answer in one piece keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.parts import PartReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.messages import Tokens
    from protocol.parts import PartStart, Piece


@dataclass
class PartCounter:
    """Splits the text of one choice, and numbers its calls."""

    calls: int = 0
    """Calls that have begun."""
    _reader: PartReader = field(default_factory=PartReader)

    @property
    def part(self) -> PartStart:
        """The part that the newest text belongs to."""
        return self._reader.part

    def split(self, event: Tokens) -> Iterator[tuple[Piece, int]]:
        """Yield the pieces of the next text, each with the number of the newest call."""
        for piece in self._reader.split(event.text, event.parts):
            self.calls += piece.begins and piece.part.kind == "call"
            yield piece, self.calls - 1


@dataclass
class CallText:
    """One call so far."""

    start: PartStart
    arguments: bytearray = field(default_factory=bytearray)


@dataclass
class Content:
    """All parts of a choice so far, as UTF-8."""

    text: bytearray = field(default_factory=bytearray)
    reasoning: bytearray = field(default_factory=bytearray)
    calls: list[CallText] = field(default_factory=list)

    def add(self, piece: Piece) -> int:
        """Append a piece; return its bytes."""
        content = piece.text.encode()
        match piece.part.kind:
            case "text":
                self.text += content
            case "reasoning":
                self.reasoning += content
            case "call":
                if piece.begins:
                    self.calls.append(CallText(piece.part))
                self.calls[-1].arguments += content
        return len(content)
