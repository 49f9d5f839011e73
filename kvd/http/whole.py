"""An answer in one piece, from the daemon's events. Sans-io.

What is told of tokens becomes bytes as it comes, and all of it is bounded: nobody reads along.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from kvd.http.answers import Asked, Head, Hearing, length_of
from kvd.http.joined import Joined
from kvd.http.responses import Choice, FinishReason
from kvd.http.shapes import bytes_of
from protocol import messages
from protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from protocol.messages import Event
    from protocol.types import TokenLogprob

MOST_BYTES = 32 * 1024 * 1024


@dataclass
class _Part:
    """A prompt that is echoed, or what came of one choice."""

    told: Joined | None
    """Where logprobs are answered."""
    text: bytearray = field(default_factory=bytearray)
    length: int = 0
    """By which the offsets of what follows are larger."""
    reason: FinishReason | None = None


class Whole(Hearing):
    """`hear` until `over`, then take `body`; raises `InvalidRequest` when it gets too large."""

    def __init__(self, head: Head, asked: Asked, now: float) -> None:
        super().__init__(head, asked, now)
        self._prompts = [self._part(number) for number in range(len(asked.calls))]
        self._texts = [self._part(at // asked.n) for at in range(len(asked.calls) * asked.n)]
        self._size = 0
        if asked.echo:
            for call, prompt in zip(asked.calls, self._prompts, strict=True):
                self._write(prompt, (call.prompt or "").encode(), times=asked.n)

    def _part(self, number: int) -> _Part:
        tells = self.asked.calls[number].logprobs is not None
        return _Part(Joined(self.head.shape.logprobs([], 0)) if tells else None)

    def hear(self, number: int, event: Event, now: float) -> None:
        """Take an event of the call of this number."""
        self.tally.hear(number, event, now)
        match event:
            case messages.Tokens() if not self.asked.prompt_only:
                text = self._text(number, event.choice)
                before = self._prompts[number].length if self.asked.echo else 0
                self._write(text, event.text.encode())
                self._tell(text, event.logprobs or [], before)
            case messages.PromptLogprobs(logprobs=told) if self.asked.echo:
                prompt = self._prompts[number]
                if self.asked.calls[number].prompt is None:
                    self._write(prompt, bytes_of(told), times=self.asked.n)
                self._tell(prompt, told, 0, times=self.asked.n)
            case messages.ChoiceFinished(choice=choice, reason=reason):
                self._text(number, choice).reason = self.reason(reason)
            case messages.Done(reason=reason):
                for choice in range(self.asked.n):
                    text = self._text(number, choice)
                    text.reason = text.reason or self.reason(reason)
            case _:
                pass

    @property
    def over(self) -> bool:
        """Whether all has come."""
        return self.tally.over

    def body(self) -> bytes:
        """Return the answer."""
        choices = [self._choice(index) for index in range(len(self._texts))]
        return self.head.whole(choices, self.usage, self.tally.extension)

    def _text(self, number: int, choice: int) -> _Part:
        return self._texts[number * self.asked.n + choice]

    def _write(self, part: _Part, text: bytes, times: int = 1) -> None:
        part.text += text
        self._grow(len(text) * times)

    def _tell(self, part: _Part, told: list[TokenLogprob], before: int, times: int = 1) -> None:
        if part.told is None or not told:
            return
        size = part.told.add(self.head.shape.logprobs(told, before + part.length))
        part.length += length_of("", told)
        self._grow(size * times)

    def _grow(self, size: int) -> None:
        self._size += size
        if self._size > MOST_BYTES:
            raise InvalidRequest(
                f"the answer in one piece would have more than {MOST_BYTES} bytes; ask for a "
                "stream (stream: true), or for less (max_tokens, n, logprobs, echo)",
                field="stream",
            )

    def _choice(self, index: int) -> Choice:
        text, prompt = self._texts[index], self._prompts[index // self.asked.n]
        said = (prompt.text + text.text if self.asked.echo else text.text).decode(
            "utf-8", "replace"
        )
        told: msgspec.Raw | None = None
        if text.told is not None:
            told = text.told.after(prompt.told if self.asked.echo else None)
        assert text.reason is not None, "a choice without its end"
        return self.head.shape.whole(index, said, told, text.reason)
