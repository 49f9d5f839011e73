"""The two response formats: chat completions and text completions, whole and in chunks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import accumulate

from msgspec import Raw

from kvd.http import responses
from kvd.http.responses import Choice, FinishReason
from protocol import types
from protocol.fields import NO_LOGPROB

Logprobs = list[types.TokenLogprob]
"""Logprobs from the daemon's events, one per token."""


class Format(ABC):
    """Base of both response formats."""

    prefix: str
    whole_object: str
    chunk_object: str

    @abstractmethod
    def opening(self, index: int) -> Choice | None:
        """Return the first chunk of a choice, if the format has one."""

    @abstractmethod
    def piece(self, index: int, text: str, logprobs: Logprobs | None, offset: int) -> Choice:
        """Return the next piece of a choice; its text begins at ``offset``."""

    @abstractmethod
    def ending(self, index: int, reason: FinishReason) -> Choice: ...

    @abstractmethod
    def logprobs(
        self, logprobs: Logprobs, offset: int
    ) -> responses.ChatLogprobs | responses.TextLogprobs:
        """Return the logprobs of tokens whose text begins at ``offset``."""

    @abstractmethod
    def whole(
        self, index: int, text: str, logprobs: Raw | None, reason: FinishReason
    ) -> Choice: ...


class ChatFormat(Format):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, index: int) -> Choice | None:
        return responses.ChatDelta(index, responses.Delta(role="assistant", content=""))

    def piece(self, index: int, text: str, logprobs: Logprobs | None, offset: int) -> Choice:
        encoded = None if logprobs is None else self.logprobs(logprobs, offset)
        return responses.ChatDelta(index, responses.Delta(content=text), encoded)

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

    def whole(self, index: int, text: str, logprobs: Raw | None, reason: FinishReason) -> Choice:
        return responses.ChatChoice(index, responses.Message(text), logprobs, reason)


class TextFormat(Format):
    """``/v1/completions``."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def opening(self, index: int) -> Choice | None:  # noqa: ARG002 - the first chunk has text
        return None

    def piece(self, index: int, text: str, logprobs: Logprobs | None, offset: int) -> Choice:
        encoded = None if logprobs is None else self.logprobs(logprobs, offset)
        return responses.TextChoice(index, text, encoded)

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

    def whole(self, index: int, text: str, logprobs: Raw | None, reason: FinishReason) -> Choice:
        return responses.TextChoice(index, text, logprobs, reason)


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
