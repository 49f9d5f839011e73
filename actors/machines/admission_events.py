"""Events and commands of the router's state machine (`actors.machines.admission`)."""

from __future__ import annotations

from typing import Literal

from actors.machines.machine import ModelRecord, Record, RequestRecord
from protocol.errors import ErrorInfo

Availability = Literal["waiting", "ready", "closing", "failed"]
"""What happens to a request for a model: it waits for the worker, goes to it, or is refused."""


# -- events -----------------------------------------------------------------------------------


class ModelChanged(Record, frozen=True):
    """The availability of a model changed. The first such event makes the model known."""

    model: str
    availability: Availability
    error: ErrorInfo | None = None
    """Set with ``failed``, and with ``waiting`` if the worker comes back later."""


class ModelRemoved(Record, frozen=True):
    """The model was unloaded, or the name is unknown."""

    model: str
    error: ErrorInfo | None = None
    """Error for its requests; None: it was unloaded."""


class ModelEvicting(ModelRecord, frozen=True):
    """A model is being unloaded to make room. Requests that it cannot finish wait for a reload."""


class ModelEvicted(ModelRecord, frozen=True):
    """The eviction is complete. The next request loads the model again."""


class ModelHeld(Record, frozen=True):
    """New requests for a model are held in the daemon from now on, or no longer."""

    model: str
    held: bool


class RequestArrived(Record, frozen=True):
    """A client sent a request."""

    rid: str
    model: str
    size: int = 0
    """Bytes that the daemon holds for the request until it is over."""
    deadline: float | None = None
    """Latest time to reach a worker, on the event loop's clock."""


class RequestReturned(RequestRecord, frozen=True):
    """The process never got the request."""


class RequestsLost(Record, frozen=True):
    """The process died with these requests. The fields are those of `LoseRequests`."""

    model: str
    rids: list[str]
    error: ErrorInfo
    attributable: bool = False
    again: bool = True


class RequestProgressed(RequestRecord, frozen=True):
    """The current process generated its first token for the request."""


class QueuedInWorker(RequestRecord, frozen=True):
    """The request waits in the worker's own queue."""


class RequestFinished(RequestRecord, frozen=True):
    """The worker ended the request."""


class RequestCancelled(RequestRecord, frozen=True):
    """The client cancelled the request or disconnected."""


class DrainStarted(Record, frozen=True):
    """Accept no new requests. `Drained` follows when none is left."""


class AlarmFired(Record, frozen=True):
    """`Admission.deadline` may have passed."""


Event = (
    ModelChanged
    | ModelRemoved
    | ModelEvicting
    | ModelEvicted
    | ModelHeld
    | RequestArrived
    | RequestReturned
    | RequestsLost
    | RequestProgressed
    | QueuedInWorker
    | RequestFinished
    | RequestCancelled
    | DrainStarted
    | AlarmFired
)

# -- commands ---------------------------------------------------------------------------------


class Forward(Record, frozen=True):
    """Send the request to the model's worker."""

    rid: str
    model: str


class CancelInWorker(Record, frozen=True):
    """Send the model's worker a cancel for the request."""

    rid: str
    model: str


class EnsureLoaded(ModelRecord, frozen=True):
    """Ask the model registry to load a model that a request names."""


class ReportPaused(RequestRecord, frozen=True):
    """Report to the client that the request is paused until another process runs."""


class ReportBlame(Record, frozen=True):
    """Report to the model's worker that one of its requests killed the process."""

    model: str
    reason: str


class FailRequest(Record, frozen=True):
    """End the request with an error."""

    rid: str
    error: ErrorInfo


class ConfirmCancel(RequestRecord, frozen=True):
    """End the request as cancelled. No worker has it."""


class Drained(Record, frozen=True):
    """Report that no request is left."""


Command = (
    Forward
    | CancelInWorker
    | EnsureLoaded
    | ReportPaused
    | ReportBlame
    | FailRequest
    | ConfirmCancel
    | Drained
)
