"""Moments in the life of requests and workers, as values: what may be counted and timed.

Actors hand each to one observer (`actors.ports.Observe`), and count nothing themselves; adapters
make metrics of them. A moment names its model and no request.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.messages import FinishReason
from protocol.types import ModelState, WorkerStats


class _Moment(msgspec.Struct, frozen=True):
    model: str


class Arrived(_Moment, frozen=True):
    """A request came; its model need not exist."""


class Taken(_Moment, frozen=True):
    """A worker has tokenized it."""

    prompt_tokens: int


class Begun(_Moment, frozen=True):
    """It has its memory and its place, for the first time."""

    waited_s: float
    """Since it arrived, for its model, for memory or for a place."""


class Spoke(_Moment, frozen=True):
    """New tokens of one completion went to its client."""

    tokens: int
    first_s: float | None = None
    """The request's first ones: so long after it arrived."""
    gap_s: float | None = None
    """So long after the completion's last ones."""


class Paused(_Moment, frozen=True):
    """It rests, and goes on by itself."""

    reason: Literal["restart", "memory"]


class Resumed(_Moment, frozen=True):
    """It goes on."""


class Finished(_Moment, frozen=True):
    """It is over, as its client wanted it."""

    reason: FinishReason
    took_s: float | None = None
    """Since it arrived; absent: that was at a daemon before this one."""


class Failed(_Moment, frozen=True):
    """It is over, with an error."""

    code: str


class Acted(_Moment, frozen=True):
    """Something was done to a model and written down (`actors.events`); empty: to none alone."""

    kind: str


class Counted(_Moment, frozen=True):
    """A worker told its counters; they begin anew with each life of its process."""

    life: int
    stats: WorkerStats


class Became(_Moment, frozen=True):
    """A model's worker is in another state."""

    state: ModelState
    cause: str = ""
    """Why it does not run (`actors.machines.lifecycle.cause_of`), if that was not ordered."""


Moment = (
    Arrived
    | Taken
    | Begun
    | Spoke
    | Paused
    | Resumed
    | Finished
    | Failed
    | Acted
    | Counted
    | Became
)
