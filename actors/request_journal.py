"""Records of requests that survive a restart of the daemon, and the requests read from them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from actors import mail
from actors.request_state import RequestState, SentChoice, split_character
from actors.runtime.actor import Ref
from actors.telemetry import Timing
from protocol import messages
from protocol import worker as wire
from protocol.errors import InvalidRequest
from protocol.finish_reason import combined_reason
from protocol.messages import Event, FinishReason
from protocol.parts import PartStart
from protocol.types import ReceivedChoice, TokenLogprob, record_level

EVENT_TOKENS = 512
"""Maximum tokens of a saved event: about 0.5 MB with 20 logprobs each."""


class _Record(msgspec.Struct, frozen=True, tag_field="t", omit_defaults=True):
    rid: str


class RequestReceived(_Record, tag="request", frozen=True):
    """A request arrived; `submit` includes its seed."""

    model: str
    submit: wire.Submit
    at: float = 0.0
    """Wall-clock time, set by the journal."""


class ReportReceived(_Record, tag="report", frozen=True):
    """A worker's report that the client is about to get."""

    report: wire.RowReport
    at: float = 0.0
    """Wall-clock time of a report that ends its request, set by the journal."""
    previous: int = 0
    """Checksum of the request's previous record, set by the journal."""


class RequestDropped(_Record, tag="dropped", frozen=True):
    """No client will attach to the request."""


Record = RequestReceived | ReportReceived | RequestDropped


class RequestJournal(Protocol):
    """Stores records durably. Never raises, and never blocks for long."""

    def write(self, record: Record) -> bool:
        """Store a record before this returns; return whether that succeeded.

        Without its `RequestReceived` a request cannot be continued; without its last reports it
        can.
        """


def ends_request(report: wire.RowReport) -> bool:
    """Return whether a request needs no worker after this report."""
    if isinstance(report, wire.ChoiceFinished):
        return report.usage is not None
    return isinstance(report, wire.RowFinished | wire.RowFailed)


@dataclass
class SavedChoice:
    """One choice of a saved request."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    reason: FinishReason | None = None
    parts: list[PartStart] = field(default_factory=list)


@dataclass
class SavedRequest:
    """A request that an earlier daemon accepted."""

    model: str
    submit: wire.Submit
    deadline_s: float | None = None
    """Seconds that were left until the request's deadline when it was read from the journal."""
    prompt_tokens: int | None = None
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    choices: list[SavedChoice] = field(default_factory=list)
    levels: list[int] = field(default_factory=list)
    """Precision levels at which the tokens were generated, in order."""
    end: wire.RowFinished | wire.RowFailed | None = None

    def __post_init__(self) -> None:
        self.choices = self.choices or [SavedChoice() for _ in range(self.submit.n)]

    def apply_report(self, report: wire.RowReport) -> None:
        match report:
            case wire.RowAccepted(prompt_tokens=tokens):
                self.prompt_tokens = tokens
            case wire.RowPrompt(index=index, logprobs=logprobs):
                self.prompt_logprobs[index:] = logprobs
            case wire.RowTokens(choice=number):
                choice = self.choices[number]
                choice.tokens[report.index :] = report.tokens
                choice.text += report.text
                choice.parts += report.parts
                choice.logprobs += report.logprobs or ()
                if report.tokens:
                    record_level(self.levels, report.level)
            case wire.ChoiceFinished(choice=number, reason=reason):
                self.choices[number].reason = reason
                if report.usage is not None:  # the daemon may have ended before the last report
                    reason = combined_reason([it.reason or reason for it in self.choices])
                    self.end = wire.RowFinished(rid=report.rid, reason=reason, usage=report.usage)
            case wire.RowFinished() | wire.RowFailed():
                self.end = report
            case _:
                pass

    def to_state(
        self, request: messages.Attach, client: Ref[mail.ClientMail], deadline: float | None
    ) -> RequestState:
        """Return the request as the router tracks it; raises `InvalidRequest` for `received`."""
        state = RequestState(
            request.id,
            client,
            self.submit,
            Timing(self.model),
            deadline,
            attach_name=self.submit.rid,
            prompt_tokens=self.prompt_tokens,
            prompt_reported=len(self.prompt_logprobs),
            received_prompt_logprobs=request.received_prompt_logprobs,
            replayed=True,
            levels=list(self.levels),
            choices=[
                SentChoice(
                    array("i", saved.tokens),
                    len(saved.text.encode()),
                    len(saved.parts),
                    saved.reason,
                    known,
                )
                for saved, known in zip(self.choices, self.received(request), strict=True)
            ],
        )
        for number, choice in enumerate(state.choices):
            if self.end is not None or choice.reason is not None:
                choice.check_received(number)
        return state

    def received(self, request: messages.Attach) -> Sequence[ReceivedChoice]:
        """Return what the client has of each choice; raises `InvalidRequest`."""
        received = request.received or [ReceivedChoice()] * len(self.choices)
        if len(received) != len(self.choices):
            raise InvalidRequest(
                f"received has {len(received)} entries, but the request has {len(self.choices)} "
                "choices; send one entry for each choice, or none",
                field="received",
            )
        return received

    def missing_events(self, request: messages.Attach) -> list[Event]:
        """Return the events that the client has not received; raises `InvalidRequest`."""
        events: list[Event] = []
        if self.prompt_tokens is not None:
            accepted = messages.Accepted(
                id=request.id,
                prompt_tokens=self.prompt_tokens,
                seed=self.submit.sampling.seed or 0,
                request=self.submit.rid,
            )
            events.append(accepted)
        known_logprobs = request.received_prompt_logprobs
        for start in range(known_logprobs, len(self.prompt_logprobs), EVENT_TOKENS):
            logprobs = self.prompt_logprobs[start : start + EVENT_TOKENS]
            events.append(messages.PromptLogprobs(id=request.id, index=start, logprobs=logprobs))
        for number, (choice, known) in enumerate(
            zip(self.choices, self.received(request), strict=True)
        ):
            events += _missing_tokens(request.id, number, choice, known)
            if len(self.choices) > 1 and (reason := choice.reason) is not None:
                events.append(messages.ChoiceFinished(id=request.id, choice=number, reason=reason))
        match self.end:
            case wire.RowFinished(reason=reason, usage=usage, stop_text=stop):
                done = messages.Done(id=request.id, reason=reason, usage=usage, stop_text=stop)
                events.append(done)
            case wire.RowFailed(error=error):
                events.append(messages.Error(id=request.id, error=error))
            case None:
                pass
        return events


def _missing_tokens(
    request_id: str, number: int, choice: SavedChoice, received: ReceivedChoice
) -> Sequence[Event]:
    try:
        new_text = choice.text.encode()[received.text_bytes :].decode()
    except UnicodeDecodeError:
        raise split_character(number, received) from None
    new_parts = choice.parts[received.parts :]
    if not (choice.tokens[received.tokens :] or new_text or new_parts):
        return []
    last = max(received.tokens, len(choice.tokens) - 1)
    starts = range(received.tokens, last + 1, EVENT_TOKENS)
    return [
        messages.Tokens(
            id=request_id,
            index=start,
            tokens=choice.tokens[start : start + EVENT_TOKENS],
            text=new_text if start == starts[-1] else "",
            choice=number,
            parts=new_parts if start == starts[-1] else [],
            logprobs=choice.logprobs[start : start + EVENT_TOKENS] if choice.logprobs else None,
        )
        for start in starts
    ]
