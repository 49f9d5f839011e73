"""What the governor's machine hears and says (`actors.machines.governor`)."""

from __future__ import annotations

import msgspec

from actors.machines.gauge import Pressure
from actors.machines.ledger import GrantDecision, MemoryRequest, WorkerExited
from protocol.policy import ModelPolicy
from protocol.types import Reclaimable
from protocol.worker import ReclaimMethod


class _Tagged(msgspec.Struct, frozen=True, tag=True):
    pass


# -- events -----------------------------------------------------------------------------------


class LoadRequested(_Tagged, frozen=True):
    """A model is about to be loaded."""

    model: str
    policy: ModelPolicy = ModelPolicy()
    patient: bool = True


class PolicyChanged(_Tagged, frozen=True):
    """The user pinned a model, or changed what else is said of it."""

    model: str
    policy: ModelPolicy


class ModelReady(_Tagged, frozen=True):
    """It takes requests."""

    model: str


class ServingChanged(_Tagged, frozen=True):
    """Its process has requests from now on, or none any more: sooner than it can say so itself."""

    model: str
    busy: bool


class UnloadStarted(_Tagged, frozen=True):
    """It is being unloaded, whoever wants it."""

    model: str


class ModelRemoved(_Tagged, frozen=True):
    """Its seat was given up."""

    model: str


class ReclaimableReported(_Tagged, frozen=True):
    """What its worker could give back now."""

    model: str
    reclaimable: Reclaimable


class ReclaimFinished(_Tagged, frozen=True):
    """A `Reclaim` is over."""

    model: str
    seq: int
    freed_bytes: int
    exhausted: bool


class MemoryMeasured(_Tagged, frozen=True):
    """What workers really take, and what the system says."""

    used: dict[str, int]
    pressure: Pressure = "normal"


class BudgetChanged(_Tagged, frozen=True):
    """The user changed the budget."""

    total_bytes: int


class AlarmFired(_Tagged, frozen=True):
    """The time may have come that `Ladder.deadline` said."""


Event = (
    LoadRequested
    | PolicyChanged
    | ModelReady
    | ServingChanged
    | UnloadStarted
    | ModelRemoved
    | MemoryRequest
    | WorkerExited
    | ReclaimableReported
    | ReclaimFinished
    | MemoryMeasured
    | BudgetChanged
    | AlarmFired
)

# -- commands ---------------------------------------------------------------------------------


class Reclaim(_Tagged, frozen=True):
    """Tell the worker to give back."""

    model: str
    seq: int
    method: ReclaimMethod
    wanted_bytes: int
    level: int = 0


class StartLevel(_Tagged, frozen=True):
    """Tell the worker where new rows start."""

    model: str
    level: int


class Evict(_Tagged, frozen=True):
    """Unload a model; a request would bring it back."""

    model: str
    requeue: bool = False
    """It has requests, and runs none of them: they wait in the daemon, and bring it back."""


class HoldRequests(_Tagged, frozen=True):
    """Let new requests for a model wait, or no longer."""

    model: str
    held: bool


class RecordEvent(_Tagged, frozen=True):
    """What was done, or came of it, and why: for `kvctl events`, the log and metrics."""

    kind: str
    model: str
    reason: str
    numbers: dict[str, int] = {}
    requester: str | None = None
    """The model for which it was done."""


Command = GrantDecision | Reclaim | StartLevel | Evict | HoldRequests | RecordEvent
