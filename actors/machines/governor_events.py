"""Events and commands of the governor (`actors.machines.governor`)."""

from __future__ import annotations

import msgspec

from actors.machines.gauge import Pressure
from actors.machines.ledger import GrantDecision, MemoryRequest, WorkerExited
from actors.machines.machine import ModelRecord, Record
from protocol.policy import ModelPolicy
from protocol.types import Reclaimable
from protocol.worker import ReclaimMethod

# -- events -----------------------------------------------------------------------------------


class LoadRequested(Record, frozen=True):
    """A model is about to be loaded."""

    model: str
    policy: ModelPolicy = ModelPolicy()
    patient: bool = True
    """True: the load waits until models in use free memory. False: it is refused at once."""


class PolicyChanged(Record, frozen=True):
    """The user pinned a model or changed another part of its policy."""

    model: str
    policy: ModelPolicy
    by_request: bool = False
    """Whether a request has changed it: the model is idle from now on at the earliest."""


class ModelReady(ModelRecord, frozen=True):
    """The model takes requests."""


class ServingChanged(Record, frozen=True):
    """The daemon gave the process its first request, or its last request ended."""

    model: str
    busy: bool


class UnloadStarted(ModelRecord, frozen=True):
    """A user or the configuration unloads the model."""


class ModelRemoved(ModelRecord, frozen=True):
    """The registry no longer has the model."""


class ReclaimableReported(Record, frozen=True):
    """The worker reported what it could give back now."""

    model: str
    reclaimable: Reclaimable


class ReclaimFinished(Record, frozen=True):
    """The worker finished a `Reclaim`."""

    model: str
    seq: int
    freed_bytes: int
    exhausted: bool
    """The reclaim method has nothing more to give."""


class MemoryMeasured(Record, frozen=True):
    """Bytes that workers really use, by model, and the memory pressure of the system."""

    used: dict[str, int]
    pressure: Pressure = "normal"
    fresh: dict[str, int] = msgspec.field(default_factory=dict)
    """Ids of the processes that were measured now, by model. Other values may be older than the
    model's grant."""
    host: dict[str, int] = msgspec.field(default_factory=dict)
    """Bytes of the host's memory that workers use, by model, if devices have memory of their own.
    The pressure is about that memory then."""


class BudgetChanged(Record, frozen=True):
    """The user changed the budget."""

    total_bytes: int


class AlarmFired(Record, frozen=True):
    """`Governor.deadline` may have passed."""


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


class Reclaim(Record, frozen=True):
    """Tell the worker to give memory back. ``level`` applies to the method ``precision``."""

    model: str
    seq: int
    method: ReclaimMethod
    wanted_bytes: int
    level: int = 0


class StartLevel(Record, frozen=True):
    """Tell the worker the precision level of new rows."""

    model: str
    level: int


class Evict(Record, frozen=True):
    """Unload a model. A request loads it again."""

    model: str
    requeue: bool = False
    """True if the worker has only queued requests. They return to the daemon and load the model
    again."""


class EndWorker(Record, frozen=True):
    """End the process ``pid`` of a worker that holds more memory than it may."""

    model: str
    pid: int
    used_bytes: int
    limit_bytes: int


class HoldRequests(Record, frozen=True):
    """Keep new requests for a model in the daemon, or release them."""

    model: str
    held: bool


class RecordEvent(Record, frozen=True):
    """Record a decision or its result for `kvctl events`, the log and metrics."""

    kind: str
    model: str
    reason: str
    numbers: dict[str, int] = msgspec.field(default_factory=dict)
    requester: str | None = None


Command = GrantDecision | Reclaim | StartLevel | Evict | EndWorker | HoldRequests | RecordEvent
