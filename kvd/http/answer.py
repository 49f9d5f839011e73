"""The parts that streamed answers and answers in one piece share. Sans-io.

Choice c of prompt p has the index p * n + c.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

import kvd
from kvd.http.request_stats import RequestStats
from kvd.http.responses import Body, Choice, Extension, FinishReason, Usage

if TYPE_CHECKING:
    from kvd.http.formats import Format
    from protocol import messages
    from protocol.messages import Generate
    from protocol.parts import Piece
    from protocol.types import TokenLogprob

_FINGERPRINT = f"kvd-{kvd.__version__}"
_json = msgspec.json.Encoder()


@dataclass(frozen=True)
class Head:
    """The fields that all chunks of an answer have in common."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    format: Format

    def whole(self, choices: list[Choice], usage: Usage, extension: Extension) -> bytes:
        return self._encoded(self.format.whole_object, choices, usage, extension)

    def chunk(
        self,
        choices: list[Choice],
        usage: Usage | UnsetType | None = UNSET,
        extension: Extension | UnsetType = UNSET,
    ) -> bytes:
        """Return a chunk as a server-sent event."""
        return b"data: %b\n\n" % self._encoded(self.format.chunk_object, choices, usage, extension)

    def _encoded(
        self,
        kind: str,
        choices: list[Choice],
        usage: Usage | UnsetType | None,
        extension: Extension | UnsetType,
    ) -> bytes:
        body = Body(
            id=f"{self.format.prefix}{self.id}",
            object=kind,
            created=self.created,
            model=self.model,
            system_fingerprint=_FINGERPRINT,
            choices=choices,
            usage=usage,
            kvd=extension,
        )
        return _json.encode(body)


@dataclass(frozen=True)
class Wanted:
    """The calls of an HTTP request, and its fields that affect the answer."""

    calls: list[Generate]
    n: int
    echo: bool = False
    include_usage: bool = False
    stream: bool = False
    prompt_only: bool = False
    """The answer leaves out the generated token."""
    hides_reasoning: bool = False
    """The answer leaves out the reasoning."""


class Answer:
    """The base of both kinds of answers."""

    def __init__(self, head: Head, wanted: Wanted, now: float) -> None:
        self.head = head
        self.wanted = wanted
        self.stats = RequestStats(len(wanted.calls), now)

    @property
    def over(self) -> bool:
        return self.stats.over

    @property
    def usage(self) -> Usage:
        """Tokens of all calls, without those that the answer leaves out."""
        usage = self.stats.usage
        if not self.wanted.prompt_only:
            return usage
        return replace(usage, completion_tokens=0, total_tokens=usage.prompt_tokens)

    def reason(self, reason: messages.FinishReason, calls: int) -> FinishReason:
        """Return the reason of a choice with this many calls."""
        if reason == "length" or self.wanted.prompt_only:
            return "length"
        return "tool_calls" if calls and reason == "stop" else "stop"

    def is_hidden(self, piece: Piece) -> bool:
        return self.wanted.hides_reasoning and piece.part.kind == "reasoning"


def text_length(text: str, logprobs: list[TokenLogprob] | None) -> int:
    """Return by how much this text advances the text offsets of the following tokens."""
    return len(text) if logprobs is None else sum(len(token.text) for token in logprobs)
