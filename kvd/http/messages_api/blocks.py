"""Anthropic's content blocks, from the parts of an answer. Sans-io.

Text that is only white space is no block of its own: models put line breaks between reasoning,
text and calls, and Anthropic's API refuses such blocks in the next request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from kvd.http.messages_api.thinking import sign
from protocol.parts import PartReader

if TYPE_CHECKING:
    from collections.abc import Iterator

    from protocol.messages import Tokens
    from protocol.parts import PartKind, PartStart


@dataclass(frozen=True)
class Change:
    """What happens to a block. It begins, gets text any number of times, and ends."""

    index: int
    kind: PartKind
    what: Literal["begin", "add", "end"]
    text: str = ""
    """The text to add; at the end of a thinking block its signature."""
    name: str = ""
    """At the beginning of a call: the tool's name."""
    call: str = ""
    """At the beginning of a call: its id."""


class ContentBlocks:
    """Turns the text of one choice into changes of content blocks."""

    def __init__(self, *, omits_thinking: bool) -> None:
        self._omits_thinking = omits_thinking
        self._reader = PartReader()
        self._count = 0
        self._open: PartStart | None = None
        """The part whose block is open."""
        self._space = ""
        """White space that begins a text, until other text follows."""
        self._thoughts: list[str] = []
        self.has_calls = False

    def add(self, event: Tokens) -> Iterator[Change]:
        """Yield the changes that the next text causes."""
        for piece in self._reader.split(event.text, event.parts):
            part, text = piece.part, piece.text
            if piece.begins:
                yield from self.finish()
            if part.kind == "text" and self._open is None:
                text = self._space + text
                if text.isspace():
                    self._space = text
                    continue
            if self._open is None:
                yield self._begin(part)
            if part.kind == "reasoning":
                self._thoughts.append(text)
            if text and not (part.kind == "reasoning" and self._omits_thinking):
                yield Change(self._count - 1, part.kind, "add", text)

    def finish(self) -> Iterator[Change]:
        """Yield the end of the open block."""
        self._space = ""
        if self._open is None:
            return
        kind, self._open = self._open.kind, None
        thoughts, self._thoughts = "".join(self._thoughts), []
        signature = sign(thoughts, omitted=self._omits_thinking) if kind == "reasoning" else ""
        yield Change(self._count - 1, kind, "end", signature)

    def _begin(self, part: PartStart) -> Change:
        self._open, self._space = part, ""
        self._count += 1
        self.has_calls = self.has_calls or part.kind == "call"
        return Change(self._count - 1, part.kind, "begin", name=part.name, call=part.call)
