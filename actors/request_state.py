"""A request as the router remembers it: what the worker gets, and what its client has had.

`Job.hear` takes a worker's word and returns what the client is told, `Job.again` is what a worker
gets: after a death of the worker before, with all that was sent, so that nothing is sent twice.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from actors.timing import Timing
from protocol import messages
from protocol import worker as wire
from protocol.types import Usage

if TYPE_CHECKING:
    from actors.mail import ClientMail
    from actors.runtime.actor import Ref
    from protocol.messages import Event, FinishReason


Stage = Literal["waiting", "running", "paused"]


@dataclass
class Sent:
    """What a client has had of one completion."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    text_bytes: int = 0
    """In UTF-8."""
    reason: FinishReason | None = None
    """Why it ended, once that was told."""

    def resumed(self) -> wire.ChoiceProgress:
        """Return it in the words of the worker."""
        return wire.ChoiceProgress(self.tokens.tolist(), self.text_bytes, self.reason)


@dataclass
class Job:
    """One request: who asked, what the worker gets, and what was sent."""

    id: str
    """The client's own."""
    client: Ref[ClientMail]
    submit: wire.Submit
    timing: Timing
    deadline: float | None = None
    """On the event loop's clock."""
    name: str = ""
    """What the client can come back for it by, if it is kept."""
    kept: bool = True
    """Beyond the daemon's life, where anything is."""
    prompt_tokens: int | None = None
    """Once a worker has taken it."""
    prompt_reported: int = 0
    """Tokens of the prompt whose logprobs were sent."""
    fresh: bool = True
    """Nothing new was heard since a worker got it."""
    lined_up: bool = False
    """The worker said that it waits in its queue."""
    running: bool = False
    """Its worker has given it memory and a place."""
    resting: bool = False
    """The client was told that it is parked."""
    replayed: bool = False
    """A worker died with it."""
    choices: list[Sent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.choices = self.choices or [Sent() for _ in range(self.submit.n)]

    @property
    def stage(self) -> Stage:
        """Where it is, as its client may know it."""
        if self.resting:
            return "paused"
        return "running" if self.running else "waiting"

    @property
    def seed(self) -> int:
        """What it is drawn with."""
        seed = self.submit.sampling.seed
        assert seed is not None, "the router gives every request a seed"
        return seed

    def again(self) -> wire.Submit:
        """Return what a worker is to do: all of it, or what is left."""
        if not self.replayed:
            return self.submit
        resume = [sent.resumed() for sent in self.choices]
        return replace(self.submit, resume=resume, prompt_reported=self.prompt_reported)

    def lost(self) -> Event | None:
        """Note that its worker died; return what its client is told."""
        self.replayed, self.running = True, False
        if self.resting or self.prompt_tokens is None:  # it knows of no worker
            return None
        self.resting = True
        return messages.Paused(id=self.id, reason="restart")

    def hear(self, report: wire.Report) -> Event | None:  # noqa: C901, PLR0911 - one match
        """Take a worker's word; return what the client is told, if anything."""
        match report:
            case wire.RowTokens(choice=choice):
                return self._tokens(report, self.choices[choice])
            case wire.RowAccepted(prompt_tokens=tokens):
                return self._accepted(tokens)
            case wire.RowQueued(position=position):
                return None if self.replayed else messages.Queued(id=self.id, position=position)
            case wire.RowAdmitted():
                self.running = True
                return None
            case wire.RowPreempted():
                self.running = False
                return self._rest()
            case wire.RowResumed():
                self.running = True
                return self._resume()
            case wire.RowPrompt(index=index, logprobs=told):
                self.prompt_reported = index + len(told)
                return messages.PromptLogprobs(id=self.id, index=index, logprobs=told)
            case wire.ChoiceFinished(choice=choice, reason=reason):
                self.choices[choice].reason = reason
                return messages.ChoiceFinished(id=self.id, choice=choice, reason=reason)
            case wire.RowFinished(reason=reason, usage=usage):
                return messages.Done(id=self.id, reason=reason, usage=usage)
            case wire.RowFailed(error=error):
                return messages.Error(id=self.id, error=error)
            case _:
                return None

    def cancelled(self) -> list[Event]:
        """Return what the client is told when no worker is there to say that it is cancelled."""
        told: list[Event] = []
        if len(self.choices) > 1 and self.prompt_tokens is not None:
            told += [
                messages.ChoiceFinished(id=self.id, choice=choice, reason="cancelled")
                for choice, sent in enumerate(self.choices)
                if sent.reason is None
            ]
        usage = Usage(
            prompt_tokens=self.prompt_tokens or 0,
            completion_tokens=sum(len(sent.tokens) for sent in self.choices),
        )
        return [*told, messages.Done(id=self.id, reason="cancelled", usage=usage)]

    def _tokens(self, report: wire.RowTokens, sent: Sent) -> Event:
        sent.tokens.extend(report.tokens)
        sent.text_bytes += len(report.text.encode())
        return messages.Tokens(
            id=self.id,
            index=report.index,
            tokens=report.tokens,
            text=report.text,
            choice=report.choice,
            logprobs=report.logprobs,
        )

    def _accepted(self, prompt_tokens: int) -> Event | None:
        if self.prompt_tokens is not None:
            return self._resume()
        self.prompt_tokens = prompt_tokens
        return messages.Accepted(
            id=self.id, prompt_tokens=prompt_tokens, seed=self.seed, request=self.name
        )

    def _rest(self) -> Event | None:
        if self.resting:
            return None
        self.resting = True
        return messages.Paused(id=self.id, reason="memory")

    def _resume(self) -> Event | None:
        if not self.resting:
            return None
        self.resting = False
        return messages.Resumed(id=self.id)
