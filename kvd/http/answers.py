"""From the daemon's events to OpenAI's answers as a stream of chunks. Sans-io.

An answer hears the events of all calls of one HTTP request; choice c of prompt p is number
p * n + c. Those in one piece are `kvd.http.whole`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

import kvd
from kvd.http.responses import Answer, Choice, Extension, FinishReason, Usage
from kvd.http.shapes import Shape, text_of
from kvd.http.tally import Tally
from protocol import messages
from protocol.types import TokenLogprob

if TYPE_CHECKING:
    from protocol.messages import Event, Generate

DONE = b"data: [DONE]\n\n"
_FINGERPRINT = f"kvd-{kvd.__version__}"
_json = msgspec.json.Encoder()


@dataclass(frozen=True)
class Head:
    """What all chunks of an answer have in common."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    shape: Shape

    def whole(self, choices: list[Choice], usage: Usage, extension: Extension) -> bytes:
        """Return the body of an answer in one piece."""
        return _json.encode(self._answer(self.shape.whole_object, choices, usage, extension))

    def chunk(
        self,
        choices: list[Choice],
        usage: Usage | UnsetType | None = UNSET,
        extension: Extension | UnsetType = UNSET,
    ) -> bytes:
        """Return a chunk as the event of a stream."""
        answer = self._answer(self.shape.chunk_object, choices, usage, extension)
        return b"data: " + _json.encode(answer) + b"\n\n"

    def _answer(
        self,
        kind: str,
        choices: list[Choice],
        usage: Usage | UnsetType | None,
        extension: Extension | UnsetType,
    ) -> Answer:
        return Answer(
            id=f"{self.shape.prefix}{self.id}",
            object=kind,
            created=self.created,
            model=self.model,
            system_fingerprint=_FINGERPRINT,
            choices=choices,
            usage=usage,
            kvd=extension,
        )


@dataclass(frozen=True)
class Asked:
    """What was asked for, as far as answers depend on it."""

    calls: list[Generate]
    n: int
    echo: bool = False
    include_usage: bool = False
    stream: bool = False
    prompt_only: bool = False
    """What is written is not told."""


@dataclass
class _Prompt:
    """What an echo of it needs."""

    text: str | None
    told: list[TokenLogprob] = field(default_factory=list)

    @property
    def echo(self) -> str:
        return text_of(self.told) if self.text is None else self.text


@dataclass
class _Text:
    """How much came of one choice."""

    index: int
    begun: bool = False
    length: int = 0
    reason: FinishReason | None = None
    ended: bool = False
    """That was said."""


class Hearing:
    """What both kinds of answers do with events."""

    def __init__(self, head: Head, asked: Asked, now: float) -> None:
        self.head = head
        self.asked = asked
        self.tally = Tally(len(asked.calls), now)

    @property
    def usage(self) -> Usage:
        """What all took that is told."""
        took = self.tally.usage
        if not self.asked.prompt_only:
            return took
        return replace(took, completion_tokens=0, total_tokens=took.prompt_tokens)

    def reason(self, reason: messages.FinishReason) -> FinishReason:
        """Return what OpenAI calls it."""
        return "length" if reason == "length" or self.asked.prompt_only else "stop"


class Streamed(Hearing):
    """An answer in chunks: write what `hear` returns; after the last event nothing follows."""

    def __init__(self, head: Head, asked: Asked, now: float) -> None:
        super().__init__(head, asked, now)
        self._prompts = [_Prompt(call.prompt) for call in asked.calls]
        self._texts = [_Text(index) for index in range(len(asked.calls) * asked.n)]

    def _text(self, number: int, choice: int) -> _Text:
        return self._texts[number * self.asked.n + choice]

    def _echo(self, number: int) -> tuple[str, list[TokenLogprob]]:
        prompt, call = self._prompts[number], self.asked.calls[number]
        return prompt.echo, prompt.told if call.logprobs is not None else []

    def hear(self, number: int, event: Event, now: float) -> bytes:  # noqa: PLR0911 - one match
        """Take an event of the call of this number; return what is to be written for it."""
        self.tally.hear(number, event, now)
        match event:
            case messages.Tokens():
                return self._tokens(number, event)
            case messages.PromptLogprobs(logprobs=told):
                self._prompts[number].told += told
                return b""
            case messages.ChoiceFinished(choice=choice, reason=reason):
                return self._finished(number, choice, self.reason(reason))
            case messages.Done(reason=reason):
                return self._done(number, self.reason(reason))
            case messages.Queued(position=position):
                return comment(f"queued, position {position}")
            case messages.Paused(reason=reason):
                return comment(f"parked, {reason}")
            case messages.Resumed():
                return comment("resumed")
            case _:
                return b""

    def _tokens(self, number: int, event: messages.Tokens) -> bytes:
        text = self._text(number, event.choice)
        opening = self._begin(number, text)
        if self.asked.prompt_only or (not event.text and event.logprobs is None):
            return opening  # it may become a stop text, or is half a character
        piece = self.head.shape.piece(text.index, event.text, event.logprobs, text.length)
        text.length += length_of(event.text, event.logprobs)
        return opening + self._chunk([piece])

    def _begin(self, number: int, text: _Text) -> bytes:
        """Return what comes before the first token: who speaks, or the prompt."""
        if text.begun:
            return b""
        text.begun = True
        choices: list[Choice] = []
        if (opening := self.head.shape.opening(text.index)) is not None:
            choices.append(opening)
        if self.asked.echo:
            before, told = self._echo(number)
            has_told = self.asked.calls[number].logprobs is not None
            choices.append(self.head.shape.piece(text.index, before, told if has_told else None, 0))
            text.length = length_of(before, told if has_told else None)
        return b"".join(self._chunk([choice]) for choice in choices)

    def _finished(self, number: int, choice: int, reason: FinishReason) -> bytes:
        """Take the end of one of several choices; that of the last comes with what all took."""
        self._text(number, choice).reason = reason
        if len(self._running(number)) == 1:
            return b""
        return self._end(self._text(number, choice), number, UNSET)

    def _done(self, number: int, reason: FinishReason) -> bytes:
        over = self.tally.over
        said = b""
        for text in (running := self._running(number)):
            text.reason = text.reason or reason
            last = over and text is running[-1]
            said += self._end(text, number, self.tally.extension if last else UNSET)
        if not over:
            return said
        if self.asked.include_usage:
            said += self.head.chunk([], self.usage, self.tally.extension)
        return said + DONE

    def _running(self, number: int) -> list[_Text]:
        texts = [self._text(number, choice) for choice in range(self.asked.n)]
        return [text for text in texts if not text.ended]

    def _end(self, text: _Text, number: int, extension: Extension | UnsetType) -> bytes:
        assert text.reason is not None, "an end without a reason"
        text.ended = True
        ending = self.head.shape.ending(text.index, text.reason)
        return self._begin(number, text) + self._chunk([ending], extension)

    def _chunk(self, choices: list[Choice], extension: Extension | UnsetType = UNSET) -> bytes:
        return self.head.chunk(choices, None if self.asked.include_usage else UNSET, extension)


def comment(text: str) -> bytes:
    """Return a line that clients of event streams skip and people see."""
    return f": {text}\n\n".encode()


def length_of(text: str, told: list[TokenLogprob] | None) -> int:
    """Return how much further the offsets of texts are after this one."""
    return len(text) if told is None else sum(len(one.text) for one in told)
