"""States, events and commands of a worker's lifecycle (`actors.machines.lifecycle`)."""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.errors import ErrorInfo
from protocol.worker import Phase


class _Tagged(msgspec.Struct, frozen=True, tag=True):
    pass


# -- states -----------------------------------------------------------------------------------


class Stopped(_Tagged, frozen=True):
    """There is no process, and none is wanted."""


class Spawning(_Tagged, frozen=True):
    """The process is being started and has reported nothing yet."""

    deadline: float
    pid: int | None = None


class Loading(_Tagged, frozen=True):
    """The process loads the model."""

    pid: int
    deadline: float


class Ready(_Tagged, frozen=True):
    """The model takes requests."""

    pid: int
    deadline: float | None = None
    """None without requests: an idle worker may be silent."""


class Draining(_Tagged, frozen=True):
    """The process finishes its requests and takes no new ones."""

    pid: int
    deadline: float


class Stopping(_Tagged, frozen=True):
    """The process was asked to exit. Each missed deadline escalates to the next signal."""

    pid: int | None
    """None while the process is still being started."""
    escalation: Literal["asked", "terminated", "killed"]
    deadline: float
    then: Literal["stopped", "restart", "failed"]
    error: ErrorInfo | None = None
    """Why the process is stopped; None if the stop was ordered."""
    reason: str = ""
    """Reason of the order, for the error of the requests that it ends."""


class Backoff(_Tagged, frozen=True):
    """The process died, or lacked memory on a reload, and starts again later."""

    deadline: float
    """When the next process starts."""
    error: ErrorInfo


class Failed(_Tagged, frozen=True):
    """The model was given up."""

    error: ErrorInfo
    refused: bool = False
    """True if the model cannot be loaded; False if its processes kept dying."""


State = Stopped | Spawning | Loading | Ready | Draining | Stopping | Backoff | Failed

# -- events -----------------------------------------------------------------------------------


class Start(_Tagged, frozen=True):
    """Order: run."""


class Drain(_Tagged, frozen=True):
    """Order: finish the requests, then stop."""


class Halt(_Tagged, frozen=True):
    """Order: stop now."""

    reason: str = ""
    """Reason for the error of the requests that this ends; empty: the model is unloaded."""


class Spawned(_Tagged, frozen=True):
    """The operating system created the process."""

    pid: int


class SpawnFailed(_Tagged, frozen=True):
    """The operating system could not create the process."""

    reason: str


class Started(_Tagged, frozen=True):
    """The process reported for the first time."""


class SignOfLife(_Tagged, frozen=True):
    """The process sent a report that has no event of its own."""


class PhaseEntered(_Tagged, frozen=True):
    """The process changed its phase, and with it the timeout that applies."""

    phase: Phase


class Loaded(_Tagged, frozen=True):
    """The model is loaded."""


class LoadFailed(_Tagged, frozen=True):
    """The model cannot be loaded. A retry helps only if memory was short."""

    error: ErrorInfo


class RequestAssigned(_Tagged, frozen=True):
    """The router assigned a request to this worker."""

    rid: str


class TokenGenerated(_Tagged, frozen=True):
    """The process generated a token, which resets the restart budget."""


class RequestFinished(_Tagged, frozen=True):
    """A request is over."""

    rid: str


class RequestBlamed(_Tagged, frozen=True):
    """The router found a request that kills the process. Other requests may do the same."""


class Exited(_Tagged, frozen=True):
    """The process is gone."""

    returncode: int
    out_of_memory: bool = False
    """The kernel killed the process because memory ran out."""


class Fault(_Tagged, frozen=True):
    """The process broke the protocol, or handling its reports failed: its state is unknown."""

    reason: str


class AlarmFired(_Tagged, frozen=True):
    """`Lifecycle.deadline` may have passed."""


Event = (
    Start
    | Drain
    | Halt
    | Spawned
    | SpawnFailed
    | Started
    | SignOfLife
    | PhaseEntered
    | Loaded
    | LoadFailed
    | RequestAssigned
    | TokenGenerated
    | RequestFinished
    | RequestBlamed
    | Exited
    | Fault
    | AlarmFired
)

FREQUENT = (SignOfLife, PhaseEntered, TokenGenerated)
"""Events of which a journal keeps only the last in a row (`actors.runtime.history`)."""

# -- commands ---------------------------------------------------------------------------------


class Spawn(_Tagged, frozen=True):
    """Start a process. `Spawned` or `SpawnFailed` follows."""


class SendLoad(_Tagged, frozen=True):
    """Send the process the order to load the model."""


class SendRequest(_Tagged, frozen=True):
    """Send the process a request."""

    rid: str


class ReturnRequest(_Tagged, frozen=True):
    """Return a request to the router: the process never got it."""

    rid: str


class SendStop(_Tagged, frozen=True):
    """Ask the process to exit."""


class Terminate(_Tagged, frozen=True):
    """Send SIGTERM."""


class Kill(_Tagged, frozen=True):
    """Send SIGKILL."""


class LoseRequests(_Tagged, frozen=True):
    """Report the requests that the process had when it died."""

    rids: list[str]
    error: ErrorInfo
    attributable: bool = False
    """The requests or the process itself may have caused the death."""
    again: bool = False
    """Another process follows, in which the requests can continue."""


class ReleaseMemory(_Tagged, frozen=True):
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
