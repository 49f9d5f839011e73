"""Observations of requests and workers that metrics count and time.

Actors pass each observation to one observer (`actors.ports.Observe`) and count nothing themselves.
An observation names its model but no request.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.messages import FinishReason
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
    """Seconds since its arrival."""


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
    """Why it does not run, if that was not ordered (`actors.machines.process_exit.cause_of`)."""


Observation = (
    RequestArrived
    | RequestAccepted
    | RequestAdmitted
    | TokensSent
    | RequestPaused
    | RequestResumed
    | RequestFinished
    | RequestFailed
    | ActionRecorded
    | StatsReported
    | StateChanged
)
