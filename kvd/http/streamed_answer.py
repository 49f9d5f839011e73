"""An answer as a stream of chunks, from the daemon's events. Sans-io."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec import UNSET, UnsetType

from kvd.http.answer import Answer, Head, Wanted, text_length
from kvd.http.answer_parts import PartCounter
from kvd.http.formats import Position, text_of
from protocol import messages
from protocol.parts import TEXT, Piece
from protocol.types import TokenLogprob

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.http.errors import Refusal
    from kvd.http.responses import Choice, Extension, FinishReason
    from protocol.messages import Event
    from protocol.parts import PartKind

DONE = b"data: [DONE]\n\n"


@dataclass
class _Prompt:
    """The parts of a prompt that an echo needs."""

    text: str | None
    logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def echo(self) -> str:
        return text_of(self.logprobs) if self.text is None else self.text


@dataclass
class _Progress:
    """What the stream has sent of one choice."""

    index: int
    begun: bool = False
    parts: PartCounter = field(default_factory=PartCounter)
    length: int = 0
    """Characters sent, as `text_length` counts them."""
    reason: FinishReason | None = None
    ended: bool = False
    """The chunk with the finish reason is sent."""


class StreamedAnswer(Answer):
    """An answer in chunks: send the bytes that `handle` returns."""

    def __init__(self, head: Head, wanted: Wanted, now: float) -> None:
        super().__init__(head, wanted, now)
        self._prompts = [_Prompt(call.prompt) for call in wanted.calls]
        self._choices = [_Progress(index) for index in range(len(wanted.calls) * wanted.n)]

    def handle(self, number: int, event: Event, now: float) -> bytes:  # noqa: PLR0911 - one match
        """Take an event of the call with this number; return the bytes to send for it."""
        self.stats.handle(number, event, now)
        match event:
            case messages.Tokens():
                return self._tokens(number, event)
            case messages.PromptLogprobs(logprobs=logprobs):
                self._prompts[number].logprobs += logprobs
                return b""
            case messages.ChoiceFinished(choice=choice, reason=reason):
                return self._choice_finished(number, choice, reason)
            case messages.Done(reason=reason):
                return self._done(number, reason)
            case messages.Accepted():
                return comment("accepted")
            case messages.Queued(position=position):
                return comment(f"queued, position {position}")
            case messages.Paused(reason=reason):
                return comment(f"paused, {reason}")
            case messages.Resumed():
                return comment("resumed")
            case _:
                return b""

    def waiting(self) -> bytes:
        return comment("waiting")

    def failed(self, refusal: Refusal) -> bytes:
        """Return the last event of a stream that an error ends, without ``[DONE]``."""
        return b"data: " + refusal.encoded() + b"\n\n"

    def _choice(self, number: int, choice: int) -> _Progress:
        return self._choices[number * self.wanted.n + choice]

    def _tokens(self, number: int, event: messages.Tokens) -> bytes:
        choice = self._choice(number, event.choice)
        pieces = [it for it in choice.parts.split(event) if not self.is_hidden(it[0])]
        if not pieces and event.logprobs is not None:
            pieces = [(self._empty(choice), choice.parts.calls - 1)]
        opening = self._open(number, choice, pieces[0][0].part.kind if pieces else "text")
        if self.wanted.prompt_only:
            return opening
        # Without pieces, the token may begin a stop text, or end within a character.
        return opening + b"".join(self._pieces(choice, pieces, event))

    def _empty(self, choice: _Progress) -> Piece:
        empty = Piece(choice.parts.part, "", begins=False)
        return Piece(TEXT, "", begins=False) if self.is_hidden(empty) else empty

    def _pieces(
        self, choice: _Progress, pieces: list[tuple[Piece, int]], event: messages.Tokens
    ) -> Iterator[bytes]:
        """Yield the chunks of an event, the first one with the logprobs of all its tokens."""
        logprobs = event.logprobs
        for piece, call in pieces:
            at = Position(choice.length, call)
            yield self._chunk([self.head.format.piece(choice.index, piece, logprobs, at)])
            logprobs = None
        choice.length += text_length(event.text, event.logprobs)

    def _open(self, number: int, choice: _Progress, kind: PartKind = "text") -> bytes:
        """Return the chunks before the first token: the role, or the echoed prompt.

        ``kind``: of the part that follows.
        """
        if choice.begun:
            return b""
        choice.begun = True
        opening = self.head.format.opening(choice.index, kind)
        pieces = [] if opening is None else [opening]
        if self.wanted.echo:
            prompt = self._prompts[number]
            has_logprobs = self.wanted.calls[number].logprobs is not None
            logprobs = prompt.logprobs if has_logprobs else None
            echo = Piece(TEXT, prompt.echo, begins=True)
            pieces.append(self.head.format.piece(choice.index, echo, logprobs, Position()))
            choice.length = text_length(prompt.echo, logprobs)
        return b"".join(self._chunk([piece]) for piece in pieces)

    def _choice_finished(self, number: int, index: int, reason: messages.FinishReason) -> bytes:
        """Return the ending of a choice; nothing for a call's last choice, which `_done` ends."""
        choice = self._choice(number, index)
        choice.reason = self.reason(reason, choice.parts.calls)
        if len(self._running(number)) == 1:
            return b""
        return self._end(choice, number, UNSET)

    def _done(self, number: int, reason: messages.FinishReason) -> bytes:
        over = self.stats.over
        data = b""
        for choice in (running := self._running(number)):
            choice.reason = choice.reason or self.reason(reason, choice.parts.calls)
            last = over and choice is running[-1]
            data += self._end(choice, number, self.stats.extension if last else UNSET)
        if not over:
            return data
        if self.wanted.include_usage:
            data += self.head.chunk([], self.usage, self.stats.extension)
        return data + DONE

    def _running(self, number: int) -> list[_Progress]:
        choices = [self._choice(number, choice) for choice in range(self.wanted.n)]
        return [choice for choice in choices if not choice.ended]

    def _end(self, choice: _Progress, number: int, extension: Extension | UnsetType) -> bytes:
        assert choice.reason is not None, "an end without a reason"
        choice.ended = True
        ending = self.head.format.ending(choice.index, choice.reason)
        return self._open(number, choice) + self._chunk([ending], extension)

    def _chunk(self, choices: list[Choice], extension: Extension | UnsetType = UNSET) -> bytes:
        return self.head.chunk(choices, None if self.wanted.include_usage else UNSET, extension)


def comment(text: str) -> bytes:
    """Return a comment line, which clients of server-sent events ignore."""
    return f": {text}\n\n".encode()
