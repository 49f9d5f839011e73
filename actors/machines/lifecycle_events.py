"""States, events and commands of a worker's lifecycle (`actors.machines.lifecycle`)."""

from __future__ import annotations

from typing import Literal

from actors.machines.machine import Record, RequestRecord
from protocol.errors import ErrorInfo
from protocol.worker import Phase

UNLOAD_WRITE_S = 5.0
"""Seconds that an unloaded worker may write prefixes before it exits."""
EVICT_WRITE_S = 1.5
"""Seconds for the same, if another model waits for the memory."""

# -- states -----------------------------------------------------------------------------------


class Stopped(Record, frozen=True):
    """There is no process, and none is wanted."""


class Spawning(Record, frozen=True):
    """The process is being started and has reported nothing yet."""

    deadline: float
    pid: int | None = None


class Loading(Record, frozen=True):
    """The process loads the model."""

    pid: int
    deadline: float


class Ready(Record, frozen=True):
    """The model takes requests."""

    pid: int
    deadline: float


class Draining(Record, frozen=True):
    """The process finishes its requests and takes no new ones."""

    pid: int
    deadline: float
    write_s: float = UNLOAD_WRITE_S
    """Seconds that it may then write prefixes."""


class Stopping(Record, frozen=True):
    """The process was asked to exit. Each missed deadline escalates to the next signal."""

    pid: int | None
    escalation: Literal["asked", "terminated", "killed"]
    deadline: float
    then: Literal["stopped", "restart", "failed"]
    error: ErrorInfo | None = None
    """Why the process is stopped; None if the stop was ordered."""
    reason: str = ""
    """Reason for an ordered stop, for the error of the requests that the stop ends."""


class Backoff(Record, frozen=True):
    """The process died, or lacked memory on a reload, and starts again at the deadline."""

    deadline: float
    error: ErrorInfo


class Failed(Record, frozen=True):
    """The model was given up."""

    error: ErrorInfo
    refused: bool = False
    """True if the model cannot be loaded; False if its processes kept dying."""


Running = Spawning | Loading | Ready | Draining
"""The states before the process is asked to exit."""
State = Stopped | Spawning | Loading | Ready | Draining | Stopping | Backoff | Failed

# -- events -----------------------------------------------------------------------------------


class Event(Record, frozen=True):
    """Base of the events."""


class Start(Event, frozen=True):
    """Order: run."""


class Drain(Event, frozen=True):
    """Order: finish the requests, write prefixes, then stop."""

    write_s: float = UNLOAD_WRITE_S
    """Maximum seconds for the prefixes."""


class Halt(Event, frozen=True):
    """Order: stop now."""

    reason: str = ""
    """Reason for the error of the requests that the stop ends; empty: the model is unloaded."""


class Spawned(Event, frozen=True):
    """The operating system created the process."""

    pid: int


class SpawnFailed(Event, frozen=True):
    """The operating system could not create the process."""

    reason: str


class Started(Event, frozen=True):
    """The process reported for the first time."""


class SignOfLife(Event, frozen=True):
    """The process sent a report that has no event of its own."""


class PhaseEntered(Event, frozen=True):
    """The process changed its phase, and with it the timeout that applies."""

    phase: Phase


class Loaded(Event, frozen=True):
    """The model is loaded."""


class LoadFailed(Event, frozen=True):
    """The model cannot be loaded. A retry helps only if memory was short."""

    error: ErrorInfo


class RequestAssigned(Event, frozen=True):
    """The router assigned a request to this worker."""

    rid: str


class TokenGenerated(Event, frozen=True):
    """The process generated a token, which resets the restart budget."""


class RequestFinished(Event, frozen=True):
    """A request is over."""

    rid: str


class RequestBlamed(Event, frozen=True):
    """The router found a request that kills the process. The restart budget counts it."""


class Exited(Event, frozen=True):
    """The process is gone, or all processes of a gang are."""

    returncode: int
    out_of_memory: bool = False
    """The kernel killed the process because memory ran out."""
    rank: int | None = None
    """See `actors.ports.Exit`."""


class Fault(Event, frozen=True):
    """The process broke the protocol, or handling its report failed, so its state is unknown."""

    reason: str


class MemoryExceeded(Event, frozen=True):
    """The process ``pid`` held more memory than it may when the daemon measured it."""

    pid: int
    used_bytes: int
    limit_bytes: int


class AlarmFired(Event, frozen=True):
    """`Lifecycle.deadline` may have passed."""


FREQUENT = (SignOfLife, PhaseEntered, TokenGenerated)
"""Events that `actors.runtime.history` merges if equal ones follow each other."""

# -- commands ---------------------------------------------------------------------------------


class Spawn(Record, frozen=True):
    """Start a process. `Spawned` or `SpawnFailed` follows."""


class SendLoad(Record, frozen=True):
    """Send the process the order to load the model."""


class SendRequest(RequestRecord, frozen=True):
    """Send the process a request."""


class ReturnRequest(RequestRecord, frozen=True):
    """Return a request to the router: the process never got it."""


class SendStop(Record, frozen=True):
    """Ask the process to exit."""

    write_s: float = 0.0
    """Seconds that it may first write prefixes."""


class Terminate(Record, frozen=True):
    """Send SIGTERM."""


class Kill(Record, frozen=True):
    """Send SIGKILL."""


class LoseRequests(Record, frozen=True):
    """Report the requests that the process had when it died."""

    rids: list[str]
    error: ErrorInfo
    attributable: bool = False
    """The requests or the process itself may have caused the death."""
    again: bool = False
    """Another process follows, in which the requests can continue."""


class ReleaseMemory(Record, frozen=True):
    """Report that the memory of the process is free."""


Command = (
    Spawn
    | SendLoad
    | SendRequest
    | ReturnRequest
    | SendStop
    | Terminate
    | Kill
    | LoseRequests
    | ReleaseMemory
)
