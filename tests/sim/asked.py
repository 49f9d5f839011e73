"""Requests of simulated clients, and everything that their answers must be.

The fake engine's tokens are a function of prompt, seed, choice and position, so the whole answer is
known when a request is sent. Each event is compared with it when it arrives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from msgspec.structs import replace

from kvd.worker.fake.row import prompt_of
from kvd.worker.fake.script import script_of
from kvd.worker.fake.tokens import FakeTokens, word
from protocol import messages
from protocol import worker as wire
from protocol.messages import Event
from protocol.parts import PartStart
from protocol.tools import ChatOptions, Tool
from protocol.types import ChatMessage, ReceivedChoice, Sampling, Usage

TOOL = Tool("look_up", parameters={"type": "object", "properties": {"word": {"type": "string"}}})


@dataclass
class Received:
    """What a client has of one choice."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    parts: list[PartStart] = field(default_factory=list)
    reason: str = ""


@dataclass(frozen=True)
class Expected:
    """The whole answer of one choice."""

    tokens: list[int]
    text: str
    reason: str
    parts: list[PartStart]
    """Without the ids of calls, which depend on the daemon's id of the request."""


@dataclass(eq=False)
class Asked:
    """One request, and what has arrived of its answer."""

    number: int
    model: str
    prompt: str
    seed: int
    max_tokens: int
    n: int = 1
    stop: str = ""
    logprobs: int | None = None
    priority: int = 0
    deadline_s: float | None = None
    tools: bool = False
    """Whether it is a conversation with tools, whose prompt is ``user: TEXT``."""
    cancelled: bool = False
    disconnected: bool = False
    """Whether the daemon ended the connection of a slow reader, which cancels its requests."""
    cancelled_at: float = 0.0
    """When the client sent the cancel, on the event loop's clock without its jumps."""
    cancel_took_s: float = 0.0
    """Seconds until the client had the end, if it always read."""
    ended: str = ""
    """How it ended: a finish reason, or the code of an error."""
    abandoned: str = ""
    """Why no end is expected, such as a connection that the client cut."""
    name: str = ""
    """Name to attach by."""
    accepted: bool = False
    paused: bool = False
    choices: list[Received] = field(init=False)

    def __post_init__(self) -> None:
        self.choices = [Received() for _ in range(self.n)]

    def __repr__(self) -> str:
        counts = "+".join(str(len(it.tokens)) for it in self.choices)
        return f"request {self.number} ({self.model}, {counts} of {self.max_tokens} tokens)"

    def generate(self, key: str) -> messages.Generate:
        return messages.Generate(
            id=key,
            model=self.model,
            prompt=None if self.tools else self.prompt,
            messages=[self.message] if self.tools else None,
            chat=self.chat,
            sampling=Sampling(temperature=1.0, seed=self.seed),
            max_tokens=self.max_tokens,
            n=self.n,
            stop=[self.stop] if self.stop else [],
            logprobs=self.logprobs,
            priority=self.priority,
            deadline_s=self.deadline_s,
        )

    @property
    def received(self) -> list[ReceivedChoice]:
        return [
            ReceivedChoice(len(it.tokens), len(it.text.encode()), len(it.parts))
            for it in self.choices
        ]

    @property
    def message(self) -> ChatMessage:
        return ChatMessage("user", self.prompt.removeprefix("user: ").removesuffix("\n"))

    @property
    def chat(self) -> ChatOptions:
        return ChatOptions(tools=[TOOL]) if self.tools else ChatOptions()

    @cached_property
    def _submit(self) -> wire.Submit:
        """The worker's request, without the fields that do not affect the answer."""
        sampling = Sampling(temperature=1.0, seed=self.seed)
        if self.tools:
            return wire.Submit(rid="", messages=[self.message], chat=self.chat, sampling=sampling)
        return wire.Submit(rid="", prompt=self.prompt, sampling=sampling)

    @cached_property
    def prompt_bytes(self) -> bytes:
        return prompt_of(self._submit)

    @cached_property
    def _source(self) -> FakeTokens:
        return FakeTokens(self.prompt_bytes, 1 + self.seed)

    @cached_property
    def expected(self) -> list[Expected]:
        return [self._expected(choice) for choice in range(self.n)]

    def _expected(self, choice: int) -> Expected:
        tokens: list[int] = []
        text = ""
        parts: list[PartStart] = []
        script = script_of(self._submit, self.prompt_bytes, 1 + self.seed, choice)
        for position in range(self.max_tokens):
            tokens.append(self._source.token(choice, position))
            if script is None:
                text += " " + word(tokens[-1])
            else:
                if (begins := script[position].begins) is not None:
                    parts.append(PartStart(len(text.encode()), begins.kind, begins.name))
                text += script[position].text
            at = text.find(self.stop) if self.stop else -1
            if at >= 0:
                return Expected(tokens, text[:at], "stop", parts)
            if script is not None and position + 1 == len(script):
                return Expected(tokens, text, "stop", parts)
        return Expected(tokens, text, "length", parts)

    def begin_again(self) -> None:
        """Expect the rest of the answer from another daemon, with the ends of all choices."""
        self.abandoned = self.ended = ""
        self.paused = False
        for choice in self.choices:
            choice.reason = ""

    # The answer.

    def handle(self, event: Event) -> None:
        """Check an event of this request."""
        assert not self.ended, f"{self}: {event} after its end"
        match event:
            case messages.Accepted():
                assert event.prompt_tokens == len(self.prompt_bytes), f"{self}: {event}"
                assert event.seed == self.seed, f"{self}: {event}"
                self.name, self.accepted = event.request, True
            case messages.Tokens():
                self._add(event)
            case messages.ChoiceFinished(choice=number, reason=reason):
                self._finish_choice(number, reason)
            case messages.Paused():
                assert not self.paused, f"{self}: paused twice"
                self.paused = True
            case messages.Resumed():
                assert self.paused, f"{self}: resumed and not paused"
                self.paused = False
            case messages.Done(reason=reason, usage=usage):
                self._done(reason, usage)
            case messages.Error(error=error):
                self.ended = error.code
            case messages.PrefillStarted(cached_tokens=cached):
                assert cached < len(self.prompt_bytes), f"{self}: {event}"
            case _:
                assert isinstance(event, messages.Queued), f"{self}: {event}"

    def _add(self, event: messages.Tokens) -> None:
        choice, expected = self.choices[event.choice], self.expected[event.choice]
        assert not choice.reason, f"{self}: tokens after the end of choice {event.choice}"
        start = len(choice.tokens)
        assert event.index == start, f"{self}: tokens from {event.index} follow {start}"
        choice.tokens += event.tokens
        assert choice.tokens == expected.tokens[: len(choice.tokens)], f"{self}: wrong tokens"
        for part in event.parts:
            assert len(part.call) == (9 if part.kind == "call" else 0), f"{self}: {part}"
            choice.parts.append(replace(part, call=""))
        assert choice.parts == expected.parts[: len(choice.parts)], f"{self}: wrong parts"
        self.add_text(event.choice, event.text)
        if self.logprobs is not None:
            of = [
                self._source.token_logprob(token, position, self.logprobs)
                for position, token in enumerate(event.tokens, start + 1)
            ]
            assert (event.logprobs or []) == of, f"{self}: wrong logprobs"

    def add_text(self, number: int, text: str) -> None:
        choice, expected = self.choices[number], self.expected[number]
        choice.text += text
        assert expected.text.startswith(choice.text), f"{self}: wrong text {choice.text!r}"

    def _finish_choice(self, number: int, reason: str) -> None:
        choice = self.choices[number]
        assert not choice.reason, f"{self}: choice {number} ended twice"
        choice.reason = reason
        self.check_whole(number, reason, tokens=True)

    def check_whole(self, number: int, reason: str, *, tokens: bool) -> None:
        """Check a choice that ended; ``tokens``: the client has tokens, not only text."""
        choice, expected = self.choices[number], self.expected[number]
        if reason == "cancelled":
            known = self.cancelled or self.disconnected
            assert known, f"{self}: choice {number} was cancelled by nobody"
            return
        assert reason == expected.reason, f"{self}: choice {number} ended with {reason}"
        assert choice.text == expected.text, f"{self}: choice {number} lacks text"
        assert not tokens or choice.tokens == expected.tokens, f"{self}: lacks tokens"
        assert not tokens or choice.parts == expected.parts, f"{self}: lacks parts"

    def _done(self, reason: str, usage: Usage) -> None:
        if self.n == 1:
            self._finish_choice(0, reason)
        if not self.accepted and reason == "cancelled":
            self.ended = reason  # no choice had begun
            return
        reasons = {choice.reason for choice in self.choices}
        combined = next(it for it in ("cancelled", "length", "stop") if it in reasons)
        assert "" not in reasons, f"{self}: done before all choices ended"
        assert reason == combined, f"{self}: {reason} for {reasons}"
        self.check_usage(usage.prompt_tokens, usage.completion_tokens)
        self.ended = reason

    def check_usage(self, prompt_tokens: int, completion_tokens: int) -> None:
        count = sum(len(choice.tokens) for choice in self.choices)
        assert completion_tokens == count, f"{self}: {completion_tokens} tokens counted"
        known = {len(self.prompt_bytes)} | ({0} if self.cancelled else set())
        assert prompt_tokens in known, f"{self}: {prompt_tokens} tokens of prompt counted"
