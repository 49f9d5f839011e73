"""What is written down of requests, so that they outlive the daemon, and what that adds up to.

`Records` is where it goes (`kvd.daemon.journal` writes it to a disk): who asked for what, each word of a
worker before the client has it, and that a request need not be remembered any more. `Saved` is a
request that was read back; its client may come for it (`Saved.attach`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from actors.request_state import Job
from actors.timing import Timing
from protocol import messages
from protocol import worker as wire
from protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from actors.mail import ClientMail
    from actors.runtime.actor import Ref
    from protocol.messages import Event, FinishReason, ReceivedChoice
    from protocol.types import TokenLogprob


class _Record(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    rid: str


class RequestReceived(_Record, tag="asked", frozen=True):
    """A request came; its seed is in it."""

    model: str
    submit: wire.Submit
    at: float = 0.0
    """On the wall's clock; set by who writes it."""


class ReportReceived(_Record, tag="heard", frozen=True):
    """A worker's word about it, which its client is about to get."""

    report: wire.Report
    at: float = 0.0
    """Of its end, on the wall's clock; set by who writes it."""


class RequestDropped(_Record, tag="forgotten", frozen=True):
    """Nobody will come for it."""


Record = RequestReceived | ReportReceived | RequestDropped


class RequestJournal(Protocol):
    """Keeps records beyond the daemon's life. Nothing here raises, or blocks for long."""

    def write(self, record: Record) -> None:
        """Write a record down before this returns, as far as that is possible."""
        ...


@dataclass
class Answer:
    """One completion of a saved request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None


@dataclass
class SavedRequest:
    """A request of a daemon before this one."""

    model: str
    submit: wire.Submit
    deadline_s: float | None = None
    """What is left of it when it is read back."""
    prompt_tokens: int | None = None
    prompt: list[TokenLogprob] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    end: wire.RowFinished | wire.RowFailed | None = None

    def __post_init__(self) -> None:
        self.answers = self.answers or [Answer() for _ in range(self.submit.n)]

    def hear(self, report: wire.Report) -> None:
        """Add a worker's word."""
        match report:
            case wire.RowAccepted(prompt_tokens=tokens):
                self.prompt_tokens = tokens
            case wire.RowPrompt(index=index, logprobs=told):
                self.prompt[index:] = told
            case wire.RowTokens(choice=choice):
                answer = self.answers[choice]
                answer.tokens[report.index :] = report.tokens
                answer.text += report.text
                answer.logprobs += report.logprobs or ()
            case wire.ChoiceFinished(choice=choice, reason=reason):
                self.answers[choice].reason = reason
            case wire.RowFinished() | wire.RowFailed():
                self.end = report
            case _:
                pass

    def job(self, request: messages.Attach, client: Ref[ClientMail], deadline: float | None) -> Job:
        """Return it as a request that runs again, for the client that came for it."""
        job = Job(request.id, client, self.submit, Timing(self.model), deadline)
        job.prompt_tokens, job.prompt_reported = self.prompt_tokens, len(self.prompt)
        job.replayed = True
        for sent, answer in zip(job.choices, self.answers, strict=True):
            sent.tokens.extend(answer.tokens)
            sent.text_bytes, sent.reason = len(answer.text.encode()), answer.reason
        return job

    def rest(self, request: messages.Attach) -> list[Event]:
        """Return what its client lacks of what was sent; raises `InvalidRequest`."""
        haves = request.received or [messages.ReceivedChoice()] * len(self.answers)
        if len(haves) != len(self.answers):
            raise InvalidRequest(
                f"have must tell of {len(self.answers)} completions, not {len(haves)}",
                field="received",
            )
        found: list[Event] = []
        if self.prompt_tokens is not None:
            seed = self.submit.sampling.seed or 0
            found.append(
                messages.Accepted(
                    id=request.id,
                    prompt_tokens=self.prompt_tokens,
                    seed=seed,
                    request=self.submit.rid,
                )
            )
        if told := self.prompt[request.received_prompt_logprobs :]:
            found.append(
                messages.PromptLogprobs(
                    id=request.id, index=request.received_prompt_logprobs, logprobs=told
                )
            )
        for choice, (answer, have) in enumerate(zip(self.answers, haves, strict=True)):
            found += _rest(request.id, choice, answer, have)
            if len(self.answers) > 1 and answer.reason is not None:
                reason = answer.reason
                found.append(messages.ChoiceFinished(id=request.id, choice=choice, reason=reason))
        match self.end:
            case wire.RowFinished(reason=reason, usage=usage):
                found.append(messages.Done(id=request.id, reason=reason, usage=usage))
            case wire.RowFailed(error=error):
                found.append(messages.Error(id=request.id, error=error))
            case None:
                pass
        return found


def _rest(key: str, choice: int, answer: Answer, have: ReceivedChoice) -> Sequence[Event]:
    text = answer.text.encode()
    if have.tokens > len(answer.tokens) or have.text_bytes > len(text):
        raise InvalidRequest(
            f"of completion {choice} {len(answer.tokens)} tokens and {len(text)} bytes of text"
            f" were sent, not {have.tokens} and {have.text_bytes}",
            field="received",
        )
    try:
        new = text[have.text_bytes :].decode()
    except UnicodeDecodeError:
        raise InvalidRequest(
            f"{have.text_bytes} bytes end inside a character of completion {choice}",
            field="received",
        ) from None
    tokens = answer.tokens[have.tokens :]
    if not (tokens or new):
        return []
    told = answer.logprobs[have.tokens :] if answer.logprobs else None
    return [
        messages.Tokens(
            id=key, index=have.tokens, tokens=tokens, text=new, choice=choice, logprobs=told
        )
    ]
