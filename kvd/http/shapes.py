"""How a chat's answer and a completion look, whole and in pieces; otherwise they are the same."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate

from msgspec import Raw

from kvd.http.responses import (
    Alternative,
    ChatChoice,
    ChatDelta,
    ChatLogprobs,
    Choice,
    Delta,
    FinishReason,
    Message,
    TextChoice,
    TextLogprobs,
    TokenLogprob,
)
from protocol.types import NO_LOGPROB
from protocol.types import Alternative as Told
from protocol.types import TokenLogprob as ToldToken


class Shape(ABC):
    """One of the two."""

    prefix: str
    """Of ids."""
    whole_object: str
    chunk_object: str

    @abstractmethod
    def opening(self, index: int) -> Choice | None:
        """Return what a choice begins with, if anything."""

    @abstractmethod
    def piece(self, index: int, text: str, told: list[ToldToken] | None, offset: int) -> Choice:
        """Return the next piece of a choice, whose text begins at this offset."""

    @abstractmethod
    def ending(self, index: int, reason: FinishReason) -> Choice:
        """Return the last piece of a choice."""

    @abstractmethod
    def logprobs(self, told: list[ToldToken], offset: int) -> ChatLogprobs | TextLogprobs:
        """Return what is told of tokens whose text begins at this offset."""

    @abstractmethod
    def whole(self, index: int, text: str, logprobs: Raw | None, reason: FinishReason) -> Choice:
        """Return a choice that is over; `logprobs` is the JSON of those."""


class Chat(Shape):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> Choice | None:
        """Say who speaks."""
        return ChatDelta(index, Delta(role="assistant", content=""))

    def piece(
        self,
        index: int,
        text: str,
        told: list[ToldToken] | None,
        offset: int,  # noqa: ARG002 - of completions only
    ) -> Choice:
        """Return the next piece of a choice."""
        return ChatDelta(index, Delta(content=text), None if told is None else _chat_logprobs(told))

    def ending(self, index: int, reason: FinishReason) -> Choice:
        """Return the last piece of a choice."""
        return ChatDelta(index, Delta(), finish_reason=reason)

    def logprobs(
        self,
        told: list[ToldToken],
        offset: int,  # noqa: ARG002 - of completions only
    ) -> ChatLogprobs:
        """Return what is told of tokens."""
        return _chat_logprobs(told)

    def whole(self, index: int, text: str, logprobs: Raw | None, reason: FinishReason) -> Choice:
        """Return a choice that is over."""
        return ChatChoice(index, Message(text), logprobs, reason)


class Text(Shape):
    """``/v1/completions``."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def opening(self, index: int) -> Choice | None:  # noqa: ARG002 - they begin with their text
        """Return nothing."""
        return None

    def piece(self, index: int, text: str, told: list[ToldToken] | None, offset: int) -> Choice:
        """Return the next piece of a choice."""
        return TextChoice(index, text, None if told is None else _text_logprobs(told, offset))

    def ending(self, index: int, reason: FinishReason) -> Choice:
        """Return the last piece of a choice."""
        return TextChoice(index, "", finish_reason=reason)

    def logprobs(self, told: list[ToldToken], offset: int) -> TextLogprobs:
        """Return what is told of tokens."""
        return _text_logprobs(told, offset)

    def whole(self, index: int, text: str, logprobs: Raw | None, reason: FinishReason) -> Choice:
        """Return a choice that is over."""
        return TextChoice(index, text, logprobs, reason)


def text_of(told: list[ToldToken]) -> str:
    """Return the text of these tokens together: one of them may be half a character."""
    return bytes_of(told).decode("utf-8", "replace")


def bytes_of(told: list[ToldToken]) -> bytes:
    """Return the same as it is, though it may end within a character."""
    return b"".join(bytes(_bytes(one)) for one in told)


def _bytes(told: Told) -> list[int]:
    return list(told.text.encode()) if told.bytes is None else told.bytes


def _logprob(told: Told) -> float:
    return NO_LOGPROB if told.logprob is None else told.logprob


def _chat_logprobs(told: list[ToldToken]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            TokenLogprob(
                one.text,
                _logprob(one),
                _bytes(one),
                [Alternative(top.text, _logprob(top), _bytes(top)) for top in one.top],
            )
            for one in told
        ]
    )


def _text_logprobs(told: list[ToldToken], offset: int) -> TextLogprobs:
    return TextLogprobs(
        tokens=[one.text for one in told],
        token_logprobs=[one.logprob for one in told],
        top_logprobs=[
            {top.text: _logprob(top) for top in one.top} if one.logprob is not None else None
            for one in told
        ],
        text_offset=list(accumulate((len(one.text) for one in told[:-1]), initial=offset))
        if told
        else [],
    )
