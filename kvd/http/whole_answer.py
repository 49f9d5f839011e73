"""An answer in one piece, from the daemon's events. Sans-io.

Logprobs are encoded as they arrive. The size is bounded, since nothing is sent before the end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvd.http.answer import Answer, Head, Wanted, text_length
from kvd.http.answer_parts import Content, PartCounter
from kvd.http.formats import bytes_of
from kvd.http.json_lists import JsonLists
from kvd.http.responses import Choice, FinishReason
from protocol import messages
from protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from protocol.messages import Event
    from protocol.types import TokenLogprob

MOST_BYTES = 32 * 1024 * 1024
_PIECE_BYTES = 512
"""Bytes that count for each part besides its text, since parts may be empty."""


@dataclass
class _Collected:
    """An echoed prompt, or one choice so far."""

    logprobs: JsonLists | None
    content: Content = field(default_factory=Content)
    parts: PartCounter = field(default_factory=PartCounter)
    length: int = 0
    """Characters so far, as `text_length` counts them."""
    reason: FinishReason | None = None


class WholeAnswer(Answer):
    """An answer in one piece: `handle` events until ``stats.over``, then return the `body`."""

    def __init__(self, head: Head, wanted: Wanted, now: float) -> None:
        super().__init__(head, wanted, now)
        self._prompts = [self._part(number) for number in range(len(wanted.calls))]
        self._choices = [self._part(at // wanted.n) for at in range(len(wanted.calls) * wanted.n)]
        self._size = 0
        if wanted.echo:
            for call, prompt in zip(wanted.calls, self._prompts, strict=True):
                self._add_text(prompt, (call.prompt or "").encode(), times=wanted.n)

    def _part(self, number: int) -> _Collected:
        has_logprobs = self.wanted.calls[number].logprobs is not None
        return _Collected(JsonLists(self.head.format.logprobs([], 0)) if has_logprobs else None)

    def handle(self, number: int, event: Event, now: float) -> None:
        """Take an event of this call; raises `InvalidRequest` above `MOST_BYTES`."""
        self.stats.handle(number, event, now)
        match event:
            case messages.Tokens() if not self.wanted.prompt_only:
                choice = self._choice(number, event.choice)
                before = self._prompts[number].length if self.wanted.echo else 0
                for piece, _ in choice.parts.split(event):
                    if not self.is_hidden(piece):
                        self._grow(choice.content.add(piece) + _PIECE_BYTES * piece.begins)
                self._add_logprobs(choice, event.logprobs or [], before)
            case messages.PromptLogprobs(logprobs=logprobs) if self.wanted.echo:
                prompt = self._prompts[number]
                if self.wanted.calls[number].prompt is None:
                    self._add_text(prompt, bytes_of(logprobs), times=self.wanted.n)
                self._add_logprobs(prompt, logprobs, 0, times=self.wanted.n)
            case messages.ChoiceFinished(choice=index, reason=reason):
                self._end(self._choice(number, index), reason)
            case messages.Done(reason=reason):
                for index in range(self.wanted.n):
                    self._end(self._choice(number, index), reason)
            case _:
                pass

    def body(self) -> bytes:
        choices = [self._encoded(index) for index in range(len(self._choices))]
        return self.head.whole(choices, self.usage, self.stats.extension)

    def _choice(self, number: int, choice: int) -> _Collected:
        return self._choices[number * self.wanted.n + choice]

    def _end(self, choice: _Collected, reason: messages.FinishReason) -> None:
        choice.reason = choice.reason or self.reason(reason, choice.parts.calls)

    def _add_text(self, part: _Collected, text: bytes, times: int = 1) -> None:
        part.content.text += text
        self._grow(len(text) * times)

    def _add_logprobs(
        self, part: _Collected, logprobs: list[TokenLogprob], before: int, times: int = 1
    ) -> None:
        if part.logprobs is None or not logprobs:
            return
        size = part.logprobs.add(self.head.format.logprobs(logprobs, before + part.length))
        part.length += text_length("", logprobs)
        self._grow(size * times)

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MOST_BYTES:
            raise InvalidRequest(
                f"the answer in one piece would exceed {MOST_BYTES} bytes; request a stream "
                "(stream: true), or less (max_tokens, n, logprobs, echo)",
                field="stream",
            )

    def _encoded(self, index: int) -> Choice:
        choice, prompt = self._choices[index], self._prompts[index // self.wanted.n]
        echo = self.wanted.echo
        if echo:
            choice.content.text[:0] = prompt.content.text
        before = prompt.logprobs if echo else None
        logprobs = None if choice.logprobs is None else choice.logprobs.encoded(before)
        assert choice.reason is not None, "a choice without a finish reason"
        return self.head.format.whole(index, choice.content, logprobs, choice.reason)
