"""Moments in the life of requests and workers, as values: what may be counted and timed.

Actors hand each to one observer (`actors.ports.Observe`), and count nothing themselves; adapters
make metrics of them. A moment names its model and no request.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.messages import FinishReason
from protocol.types import ModelState, WorkerStats


class _Observation(msgspec.Struct, frozen=True):
    model: str


class RequestArrived(_Observation, frozen=True):
    """A request came; its model need not exist."""


class RequestAccepted(_Observation, frozen=True):
    """A worker has tokenized it."""

    prompt_tokens: int


class RequestAdmitted(_Observation, frozen=True):
    """It has its memory and its place, for the first time."""

    waited_s: float
    """Since it arrived, for its model, for memory or for a place."""


class TokensSent(_Observation, frozen=True):
    """New tokens of one completion went to its client."""

    tokens: int
    first_s: float | None = None
    """The request's first ones: so long after it arrived."""
    gap_s: float | None = None
    """So long after the completion's last ones."""


class RequestPaused(_Observation, frozen=True):
    """It rests, and goes on by itself."""

    reason: Literal["restart", "memory"]


class RequestResumed(_Observation, frozen=True):
    """It goes on."""


class RequestFinished(_Observation, frozen=True):
    """It is over, as its client wanted it."""

    reason: FinishReason
    took_s: float | None = None
    """Since it arrived; absent: that was at a daemon before this one."""


class RequestFailed(_Observation, frozen=True):
    """It is over, with an error."""

    code: str


class ActionRecorded(_Observation, frozen=True):
    """Something was done to a model and written down (`actors.event_log`); empty: to none alone."""

    kind: str


class StatsReported(_Observation, frozen=True):
    """A worker told its counters; they begin anew with each life of its process."""

    life: int
    stats: WorkerStats


class StateChanged(_Observation, frozen=True):
    """A model's worker is in another state."""

    state: ModelState
    cause: str = ""
    """Why it does not run (`actors.machines.process_exit.cause_of`), if that was not ordered."""


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
