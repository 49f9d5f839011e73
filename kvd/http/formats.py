"""The two response formats: chat completions and text completions, whole and in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import accumulate

from msgspec import UNSET, Raw

from kvd.http import responses
from kvd.http.answer_parts import Content
from kvd.http.responses import Choice, FinishReason
from protocol import types
from protocol.fields import NO_LOGPROB
from protocol.parts import PartKind, Piece

Logprobs = list[types.TokenLogprob]
"""Logprobs from the daemon's events, one per token."""


@dataclass(frozen=True)
class Position:
    """Where a piece of a choice is."""

    offset: int = 0
    """Characters of the choice before it."""
    call: int = 0
    """Number of its call, if it belongs to one."""


class Format(ABC):
    """Base of both response formats."""

    prefix: str
    whole_object: str
    chunk_object: str

    @abstractmethod
    def opening(self, index: int, kind: PartKind) -> Choice | None:
        """Return the first chunk of a choice, if the format has one; its first part follows."""

    @abstractmethod
    def piece(self, index: int, piece: Piece, logprobs: Logprobs | None, at: Position) -> Choice:
        """Return the next piece of a choice."""

    @abstractmethod
    def ending(self, index: int, reason: FinishReason) -> Choice: ...

    @abstractmethod
    def logprobs(
        self, logprobs: Logprobs, offset: int
    ) -> responses.ChatLogprobs | responses.TextLogprobs:
        """Return the logprobs of tokens whose text begins at ``offset``."""

    @abstractmethod
    def whole(
        self, index: int, content: Content, logprobs: Raw | None, reason: FinishReason
    ) -> Choice: ...


class ChatFormat(Format):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int, kind: PartKind) -> Choice | None:
        content = None if kind == "call" else ""
        return responses.ChatDelta(index, responses.Delta(role="assistant", content=content))

    def piece(self, index: int, piece: Piece, logprobs: Logprobs | None, at: Position) -> Choice:
        encoded = None if logprobs is None else self.logprobs(logprobs, at.offset)
        return responses.ChatDelta(index, _delta(piece, at.call), encoded)

    def ending(self, index: int, reason: FinishReason) -> Choice:
        return responses.ChatDelta(index, responses.Delta(), finish_reason=reason)

    def logprobs(
        self,
        logprobs: Logprobs,
        offset: int,  # noqa: ARG002 - chats have no offsets
    ) -> responses.ChatLogprobs:
        return responses.ChatLogprobs(
            [
                responses.TokenLogprob(
                    token.text,
                    _logprob(token),
                    _bytes(token),
                    [
                        responses.Alternative(top.text, _logprob(top), _bytes(top))
                        for top in token.top
                    ],
                )
                for token in logprobs
            ]
        )

    def whole(
        self, index: int, content: Content, logprobs: Raw | None, reason: FinishReason
    ) -> Choice:
        text = _decoded(content.text)
        reasoning = _decoded(content.reasoning) if content.reasoning else UNSET
        calls = [
            responses.ToolCall(
                call.start.call,
                responses.CalledFunction(_decoded(call.arguments), call.start.name),
            )
            for call in content.calls
        ]
        message = responses.Message(
            text if text or not calls else None,
            reasoning_content=reasoning,
            reasoning=reasoning,
            tool_calls=calls or UNSET,
        )
        return responses.ChatChoice(index, message, logprobs, reason)


class TextFormat(Format):
    """``/v1/completions``."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def opening(self, index: int, kind: PartKind) -> Choice | None:  # noqa: ARG002 - text follows
        return None

    def piece(self, index: int, piece: Piece, logprobs: Logprobs | None, at: Position) -> Choice:
        encoded = None if logprobs is None else self.logprobs(logprobs, at.offset)
        return responses.TextChoice(index, piece.text, encoded)

    def ending(self, index: int, reason: FinishReason) -> Choice:
        return responses.TextChoice(index, "", finish_reason=reason)

    def logprobs(self, logprobs: Logprobs, offset: int) -> responses.TextLogprobs:
        starts = accumulate((len(token.text) for token in logprobs), initial=offset)
        return responses.TextLogprobs(
            tokens=[token.text for token in logprobs],
            token_logprobs=[token.logprob for token in logprobs],
            top_logprobs=[
                None if token.logprob is None else {top.text: _logprob(top) for top in token.top}
                for token in logprobs
            ],
            text_offset=list(starts)[:-1],
        )

    def whole(
        self, index: int, content: Content, logprobs: Raw | None, reason: FinishReason
    ) -> Choice:
        return responses.TextChoice(index, _decoded(content.text), logprobs, reason)


def _delta(piece: Piece, call: int) -> responses.Delta:
    match piece.part.kind:
        case "text":
            return responses.Delta(content=piece.text)
        case "reasoning":
            return responses.Delta(content=None, reasoning_content=piece.text, reasoning=piece.text)
        case "call" if piece.begins:
            function = responses.CalledFunction(piece.text, piece.part.name)
            begun = responses.ToolCallDelta(call, function, piece.part.call, "function")
            return responses.Delta(content=None, tool_calls=[begun])
        case "call":
            more = responses.ToolCallDelta(call, responses.CalledFunction(piece.text))
            return responses.Delta(content=None, tool_calls=[more])


def _decoded(content: bytearray) -> str:
    return content.decode("utf-8", "replace")


def text_of(tokens: Logprobs) -> str:
    """Return the text of these tokens, joined as bytes: a token may end within a character."""
    return bytes_of(tokens).decode("utf-8", "replace")


def bytes_of(tokens: Logprobs) -> bytes:
    """Return the bytes of these tokens joined; they may end within a character."""
    return b"".join(bytes(_bytes(token)) for token in tokens)


def _bytes(token: types.Alternative) -> list[int]:
    return list(token.text.encode()) if token.bytes is None else token.bytes


def _logprob(token: types.Alternative) -> float:
    return NO_LOGPROB if token.logprob is None else token.logprob
