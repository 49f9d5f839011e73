"""Observations of requests and workers that metrics count and time.

Actors pass each observation to one observer (`actors.ports.Observe`) and count nothing themselves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from protocol import messages
from protocol.cache_outcome import CacheOutcome
from protocol.messages import Event, FinishReason
from protocol.types import ModelState, WorkerStats


class _Observation(msgspec.Struct, frozen=True):
    model: str


class RequestArrived(_Observation, frozen=True):
    """A request arrived; its model need not exist."""


class RequestAccepted(_Observation, frozen=True):
    """A worker has tokenized the request."""

    prompt_tokens: int


class RequestAdmitted(_Observation, frozen=True):
    """The request was admitted for the first time."""

    waited_s: float


class PromptCached(_Observation, frozen=True):
    """A prompt's prefill began."""

    outcome: CacheOutcome


class TokensSent(_Observation, frozen=True):
    """New tokens of one choice were sent to the client."""

    tokens: int
    first_s: float | None = None
    """Seconds since the request arrived, if these are its first tokens."""
    gap_s: float | None = None
    """Seconds since the previous tokens of the same choice."""


class RequestPaused(_Observation, frozen=True):
    """The request is paused; it resumes without the client's help."""

    reason: Literal["restart", "memory"]


class RequestResumed(_Observation, frozen=True):
    """The request continues."""


class RequestFinished(_Observation, frozen=True):
    """The request ended without an error."""

    reason: FinishReason
    took_s: float | None = None
    """Seconds since its arrival; absent if an earlier daemon accepted it."""


class RequestFailed(_Observation, frozen=True):
    """The request ended with an error."""

    code: str


class ActionRecorded(_Observation, frozen=True):
    """The event log has a new record (`actors.event_log`); an empty model means none."""

    kind: str


class StatsReported(_Observation, frozen=True):
    """A worker reported its counters, which start at zero in every process."""

    life: int
    stats: WorkerStats


class StateChanged(_Observation, frozen=True):
    """The state of a model's worker changed."""

    state: ModelState
    cause: str = ""
    """Why the worker does not run; empty if it runs or was ordered to stop
    (`actors.machines.process_exit.cause_of`)."""


class SegmentWritten(_Observation, frozen=True):
    """A worker wrote a segment of the prefix store."""

    nbytes: int


class SegmentRefused(_Observation, frozen=True):
    """A worker offered a segment that may not be written."""

    reason: str


class SegmentUsed(_Observation, frozen=True):
    """A prompt continued from the prefix store."""

    tokens: int
    saved_s: float
    """Seconds of prefill, less those of reading; negative if prefill would have been faster."""
    nbytes: int
    """Bytes that were read."""


Observation = (
    RequestArrived
    | RequestAccepted
    | RequestAdmitted
    | PromptCached
    | TokensSent
    | RequestPaused
    | RequestResumed
    | RequestFinished
    | RequestFailed
    | ActionRecorded
    | StatsReported
    | StateChanged
    | SegmentWritten
    | SegmentRefused
    | SegmentUsed
)


@dataclass
class Timing:
    """Timestamps of one request, on the event loop's clock."""

    model: str
    arrived_at: float | None = None
    """None if an earlier daemon accepted the request."""
    admitted: bool = False
    """Whether the request was admitted before; a later admission follows a restart."""
    tokens_at: dict[int, float] = field(default_factory=dict)
    """Time of the newest tokens, by choice."""
    first_token_s: float | None = None
    """Seconds from the arrival until the first tokens were sent."""

    def observe_admission(self, now: float) -> Observation | None:
        """Return an observation for the first admission only."""
        before, self.admitted = self.admitted, True
        if before or self.arrived_at is None:
            return None
        return RequestAdmitted(self.model, now - self.arrived_at)

    def observe_event(self, event: Event, now: float) -> Observation | None:  # noqa: PLR0911
        match event:
            case messages.Tokens(tokens=tokens) if tokens:
                return self._observe_tokens(event.choice, len(tokens), now)
            case messages.Accepted(prompt_tokens=tokens):
                return RequestAccepted(self.model, tokens)
            case messages.Paused(reason=reason):
                return RequestPaused(self.model, reason)
            case messages.Resumed():
                return RequestResumed(self.model)
            case messages.Done(reason=reason):
                took_s = None if self.arrived_at is None else now - self.arrived_at
                return RequestFinished(self.model, reason, took_s)
            case messages.Error(error=error):
                return RequestFailed(self.model, error.code)
            case _:
                return None

    def _observe_tokens(self, choice: int, count: int, now: float) -> Observation:
        before, first = self.tokens_at.get(choice), not self.tokens_at
        self.tokens_at[choice] = now
        if before is not None:
            return TokensSent(self.model, count, gap_s=now - before)
        if first and self.arrived_at is not None:
            self.first_token_s = now - self.arrived_at
            return TokensSent(self.model, count, first_s=self.first_token_s)
        return TokensSent(self.model, count)
