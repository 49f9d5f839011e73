"""A request as the router tracks it: what the worker gets and what the client has received.

`RequestState.apply_report` turns a worker's report into the client's event. After the death of a
worker, `RequestState.to_submit` includes everything sent, so that nothing is sent twice. A client
that attaches may have received more than the journal contains. The worker then computes that part
again, and its events are withheld.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal, assert_never

from msgspec.structs import replace

from actors import mail
from actors.runtime.actor import Ref
from actors.telemetry import Timing
from protocol import messages
from protocol import worker as wire
from protocol.cache_outcome import CacheOutcome, RowCached
from protocol.errors import InvalidRequest
from protocol.finish_reason import combined_reason
from protocol.messages import Event, FinishReason
from protocol.parts import PartStart
from protocol.resume import ChoiceProgress
from protocol.types import ReceivedChoice, TokenLogprob, Usage, record_level

Stage = Literal["waiting", "running", "paused"]

_MAX_NOTES = 8


@dataclass
class SentChoice:
    """What workers have reported of one choice; the client has received this or more."""

    tokens: array[int] = field(default_factory=lambda: array("i"))
    text_bytes: int = 0
    """Bytes of text in UTF-8."""
    parts: int = 0
    """Parts of the text whose beginning was reported."""
    reason: FinishReason | None = None
    received: ReceivedChoice = field(default_factory=ReceivedChoice)
    """What the client had when it attached."""

    split: bool = False
    """Whether what the client had ends inside a character."""

    def take_new(self, report: wire.RowTokens) -> tuple[list[int], str, list[PartStart]]:
        """Count a report; return tokens, text and parts that the client has not received."""
        text = report.text.encode()
        tokens = report.tokens[max(0, self.received.tokens - len(self.tokens)) :]
        new_text = text[max(0, self.received.text_bytes - self.text_bytes) :]
        parts = report.parts[max(0, self.received.parts - self.parts) :]
        self.tokens.extend(report.tokens)
        self.text_bytes += len(text)
        self.parts += len(report.parts)
        try:
            return tokens, new_text.decode(), parts
        except UnicodeDecodeError:
            self.split = True
            return tokens, "", parts

    def check_received(self, number: int) -> None:
        """Raise `InvalidRequest` if the client claims to have more than this choice has."""
        received = self.received
        if self.split:
            raise split_character(number, received)
        if received.tokens > len(self.tokens) or received.text_bytes > self.text_bytes:
            raise InvalidRequest(
                f"choice {number} has {len(self.tokens)} tokens and {self.text_bytes} bytes of "
                f"text, but received says {received.tokens} and {received.text_bytes}; send what "
                "you have",
                field="received",
            )
        if received.parts > self.parts:
            raise InvalidRequest(
                f"choice {number} has {self.parts} parts, but received says {received.parts}; send "
                "what you have",
                field="received",
            )


def split_character(number: int, received: ReceivedChoice) -> InvalidRequest:
    return InvalidRequest(
        f"text_bytes {received.text_bytes} ends inside a character of choice {number}; count "
        "whole characters in UTF-8",
        field="received",
    )


@dataclass
class RequestState:
    """One request: its client, the worker's command, and what was sent."""

    id: str
    """The client's own id."""
    client: Ref[mail.ClientMail]
    submit: wire.Submit
    timing: Timing
    deadline: float | None = None
    """Time of the deadline on the event loop's clock."""
    keep_alive_s: float | None = None
    """Idle limit that the request sets for its model; None: it sets none."""
    attach_name: str = ""
    """Name to attach by; empty if the request is not journaled."""
    prompt_tokens: int | None = None
    """None until a worker accepts the request."""
    outcome: CacheOutcome | None = None
    """What the prefix cache did for the prompt; None until a worker has looked it up."""
    prompt_reported: int = 0
    """Tokens of the prompt whose logprobs were sent."""
    awaits_tokens: bool = True
    """Whether the current worker has reported no tokens yet."""
    queued_in_worker: bool = False
    running: bool = False
    paused: bool = False
    """Whether the client has received `Paused`, and no `Resumed` since."""
    received_prompt_logprobs: int = 0
    """Tokens of the prompt whose logprobs the client had when it attached."""
    replayed: bool = False
    """Whether an earlier worker had the request, so that the next one replays what was sent."""
    choices: list[SentChoice] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    """Precision levels at which the tokens were generated, in order."""
    notes: list[str] = field(default_factory=list)
    """What workers noted about the answer's calls and grammars; each text once."""

    def __post_init__(self) -> None:
        self.choices = self.choices or [SentChoice() for _ in range(self.submit.n)]

    @property
    def stage(self) -> Stage:
        if self.paused:
            return "paused"
        return "running" if self.running else "waiting"

    def to_submit(self) -> wire.Submit:
        """Return the worker's command: the whole request, or what remains of it."""
        if not self.replayed:
            return self.submit
        resume = [
            ChoiceProgress(choice.tokens.tolist(), choice.text_bytes, choice.reason, choice.parts)
            for choice in self.choices
        ]
        return replace(
            self.submit,
            resume=resume,
            prompt_reported=self.prompt_reported,
            levels_reported=list(self.levels),
        )

    def worker_died(self) -> Event | None:
        """Prepare for another worker; return the client's event, if there is one."""
        self.replayed, self.running = True, False
        if self.prompt_tokens is None:  # the client has not received `Accepted` yet
            return None
        return self._pause("restart")

    def unknown_choice(self, report: wire.RowReport) -> int | None:
        """Return the choice of a report if the request does not have it."""
        if not isinstance(report, wire.RowTokens | wire.ChoiceFinished):
            return None
        return report.choice if report.choice >= len(self.choices) else None

    def apply_report(self, report: wire.RowReport) -> Event | None:  # noqa: C901, PLR0911, PLR0912 - one match
        """Return the client's event, if there is one."""
        match report:
            case wire.RowTokens():
                return self._apply_tokens(report)
            case wire.RowAccepted(prompt_tokens=tokens):
                return self._apply_accepted(tokens)
            case wire.RowQueued(position=position):
                return None if self.replayed else messages.Queued(id=self.id, position=position)
            case wire.RowNote(reason=reason):
                self._note(reason)
                return None
            case RowCached(outcome=outcome):
                return self._apply_cached(outcome)
            case wire.RowAdmitted():
                self.running = True
                return None
            case wire.RowPreempted():
                self.running = False
                return self._pause("memory")
            case wire.RowResumed():
                self.running = True
                return self._resume()
            case wire.RowPrompt(index=index, logprobs=logprobs):
                return self._apply_prompt(index, logprobs)
            case wire.ChoiceFinished(choice=choice, reason=reason):
                self.choices[choice].reason = reason
                return messages.ChoiceFinished(id=self.id, choice=choice, reason=reason)
            case wire.RowFinished():
                return self._finish(report)
            case wire.RowFailed(error=error):
                return messages.Error(id=self.id, error=error)
            case _:
                assert_never(report)

    def cancelled_reports(self) -> list[wire.RowReport]:
        """Return the last reports if the request is cancelled while no worker has it."""
        rid = self.submit.rid
        reports: list[wire.RowReport] = []
        if len(self.choices) > 1 and self.prompt_tokens is not None:
            reports += [
                wire.ChoiceFinished(rid=rid, choice=number, reason="cancelled")
                for number, choice in enumerate(self.choices)
                if choice.reason is None
            ]
        usage = Usage(
            prompt_tokens=self.prompt_tokens or 0,
            completion_tokens=sum(len(choice.tokens) for choice in self.choices),
            levels=list(self.levels),
        )
        # A worker may have reported the end of every choice, and died before that of the request.
        reason = combined_reason([choice.reason or "cancelled" for choice in self.choices])
        return [*reports, wire.RowFinished(rid=rid, reason=reason, usage=usage)]

    def _apply_prompt(self, index: int, logprobs: list[TokenLogprob]) -> Event | None:
        self.prompt_reported = index + len(logprobs)
        first = max(index, self.received_prompt_logprobs)
        new = logprobs[first - index :]
        return messages.PromptLogprobs(id=self.id, index=first, logprobs=new) if new else None

    def _apply_tokens(self, report: wire.RowTokens) -> Event | None:
        if report.tokens:  # a report of text alone has no level
            record_level(self.levels, report.level)
        tokens, text, parts = self.choices[report.choice].take_new(report)
        if not (tokens or text or parts):
            return None
        known = len(report.tokens) - len(tokens)
        return messages.Tokens(
            id=self.id,
            index=report.index + known,
            tokens=tokens,
            text=text,
            choice=report.choice,
            parts=parts,
            logprobs=None if report.logprobs is None else report.logprobs[known:],
        )

    def _note(self, reason: str) -> None:
        """Keep a note for the end. A replay reports the same ones again."""
        if reason not in self.notes and len(self.notes) < _MAX_NOTES:
            self.notes.append(reason)

    def _finish(self, report: wire.RowFinished) -> Event:
        if report.reason != "cancelled":
            try:
                for number, choice in enumerate(self.choices):
                    choice.check_received(number)
            except InvalidRequest as error:
                return messages.Error(id=self.id, error=error.info())
        return messages.Done(
            id=self.id,
            reason=report.reason,
            usage=report.usage,
            stop_text=report.stop_text,
            embedding=report.embedding,
            notes=self.notes,
        )

    def _apply_accepted(self, prompt_tokens: int) -> Event | None:
        if self.prompt_tokens is not None:
            return self._resume()
        self.prompt_tokens, seed = prompt_tokens, self.submit.sampling.seed
        assert seed is not None, "the router gives every request a seed"
        return messages.Accepted(
            id=self.id, prompt_tokens=prompt_tokens, seed=seed, request=self.attach_name
        )

    def _apply_cached(self, outcome: CacheOutcome) -> Event | None:
        """Take what the prefix cache did; a second worker reports it again."""
        known, self.outcome = self.outcome, outcome
        if known is not None:
            return None
        return messages.PrefillStarted(id=self.id, cached_tokens=outcome.reused_tokens)

    def _pause(self, reason: Literal["restart", "memory"]) -> Event | None:
        if self.paused:
            return None
        self.paused = True
        return messages.Paused(id=self.id, reason=reason)

    def _resume(self) -> Event | None:
        if not self.paused:
            return None
        self.paused = False
        return messages.Resumed(id=self.id)
