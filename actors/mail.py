"""What the actors say to each other; the words of the machines are in `actors.machines`.

One union for each actor. Messages stay inside the process, so they may carry addresses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from actors.runtime.actor import Ask
from protocol.types import ModelStatus
from protocol.worker import Tokenized

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from actors.known_models import KnownModel
    from actors.machines import lifecycle_events
    from actors.machines.admission_events import Availability
    from actors.machines.gauge import Pressure
    from actors.machines.governor_events import Event as GovernorEvent
    from actors.ports import Exit, WorkerProcess
    from actors.runtime.actor import Ref
    from protocol.errors import ErrorInfo
    from protocol.messages import Attach, Event, Generate
    from protocol.policy import ModelPolicy
    from protocol.types import KVSpec, ModelState, Reclaimable
    from protocol.worker import (
        Grant,
        Reclaim,
        Report,
        StartLevel,
        Submit,
        TimeSlice,
        TimeSliceOver,
        Tokenize,
    )


class _Message(msgspec.Struct, frozen=True):
    pass


class AlarmFired(_Message, frozen=True):
    """The actor's alarm fired: a deadline may have passed."""


# -- to a client ----------------------------------------------------------------------------------


class Received(_Message, frozen=True):
    """Bytes from its socket."""

    data: bytes


class Closed(_Message, frozen=True):
    """Its socket is gone."""


class Deliver(_Message, frozen=True):
    """An event for it, with the id of its own request."""

    event: Event


ClientMail = Received | Closed | Deliver

# -- to the router --------------------------------------------------------------------------------


class Wanted(_Message, frozen=True):
    """A request from a client."""

    rid: str
    request: Generate
    client: Ref[ClientMail]
    kept: bool = True
    """Its client can come back for it when the daemon has died."""


class AttachWanted(_Message, frozen=True):
    """A client comes for a request of a daemon before this one."""

    request: Attach
    client: Ref[ClientMail]


class Unwanted(_Message, frozen=True):
    """The client does not want it any more."""

    rid: str


class ModelAdded(_Message, frozen=True):
    """A model is about to be loaded."""

    model: str
    worker: Ref[WorkerMail]


class ModelChanged(_Message, frozen=True):
    """A model takes requests, or does not."""

    model: str
    availability: Availability
    error: ErrorInfo | None = None


class ModelForgotten(_Message, frozen=True):
    """There is no such model any more, or there never was; also answers `EnsureLoaded`."""

    model: str
    error: ErrorInfo | None = None
    """Why requests for it end; absent: it was unloaded."""


class RowReported(_Message, frozen=True):
    """A worker's word about one request."""

    report: Report


class RowBounced(_Message, frozen=True):
    """A worker did not take the request."""

    rid: str


class RowsDied(_Message, frozen=True):
    """A worker's process took these with it."""

    model: str
    rids: list[str]
    error: ErrorInfo
    attributable: bool
    """They, or the process itself, may have caused it."""
    again: bool
    """Another process follows, for them to go on in."""


class ModelRests(_Message, frozen=True):
    """A model is being unloaded to make room: its requests wait, and will bring it back."""

    model: str


class ModelAsleep(_Message, frozen=True):
    """It is gone now; answered by `EnsureLoaded` as soon as a request waits for it."""

    model: str


class ModelHeld(_Message, frozen=True):
    """New requests for a model wait, so that others get their turn; or no longer."""

    model: str
    held: bool


class FinishAll(Ask[None], frozen=True):
    """Take no new requests; answered when none is left."""


RouterMail = (
    Wanted
    | AttachWanted
    | Unwanted
    | ModelAdded
    | ModelChanged
    | ModelForgotten
    | RowReported
    | RowBounced
    | RowsDied
    | ModelRests
    | ModelAsleep
    | ModelHeld
    | FinishAll
    | AlarmFired
)

# -- to a worker ----------------------------------------------------------------------------------


class Order(_Message, frozen=True):
    """Start, drain or halt; or count a request that was blamed for deaths."""

    event: (
        lifecycle_events.Start
        | lifecycle_events.Drain
        | lifecycle_events.Halt
        | lifecycle_events.RequestBlamed
    )


class RunRow(_Message, frozen=True):
    """A request for the process."""

    submit: Submit


class CancelRow(_Message, frozen=True):
    """End a request."""

    rid: str


class Granted(_Message, frozen=True):
    """The governor's answer to the process with the number `life`."""

    grant: Grant
    life: int


class TimeSliceGiven(_Message, frozen=True):
    """When the process with the number `life` may compute."""

    turn: TimeSlice
    life: int


class WeightIs(_Message, frozen=True):
    """The model's share of the accelerator from now on."""

    weight: float


class TokensAsked(Ask[Tokenized], frozen=True):
    """Have the process tell a text's tokens."""

    command: Tokenize


class HasProcess(_Message, frozen=True):
    """The spawn has succeeded."""

    process: WorkerProcess


class HasNoProcess(_Message, frozen=True):
    """The spawn has failed."""

    error: Exception


class Reported(_Message, frozen=True):
    """The process with the number `life` said something."""

    report: Report
    life: int


class HasExited(_Message, frozen=True):
    """The process with the number `life` is gone."""

    exit: Exit
    life: int


class Commanded(_Message, frozen=True):
    """The governor's word to the process with the number `life`."""

    command: Reclaim | StartLevel
    life: int


class StillWaits(_Message, frozen=True):
    """The governor has not answered the process `life` yet: its silence is ours."""

    life: int


WorkerMail = (
    Order
    | RunRow
    | CancelRow
    | Granted
    | Commanded
    | StillWaits
    | TimeSliceGiven
    | WeightIs
    | TokensAsked
    | HasProcess
    | HasNoProcess
    | Reported
    | HasExited
    | AlarmFired
)

# -- to the governor ------------------------------------------------------------------------------


class GrantAsked(_Message, frozen=True):
    """A worker's process wants to hold so much in all."""

    model: str
    worker: Ref[WorkerMail]
    life: int
    seq: int
    total_bytes: int
    reclaimable: Reclaimable | None = None
    """What it could give back; absent while it loads."""
    resuming: bool = False


class MemoryFree(_Message, frozen=True):
    """A worker's process is gone, and its memory with it."""

    model: str


class Governed(_Message, frozen=True):
    """What a worker or the supervisor has to say to the machine, as it is."""

    event: GovernorEvent


class Measured(_Message, frozen=True):
    """What each worker really takes, in bytes, and what the system says of its memory."""

    used: dict[str, int]
    pressure: Pressure = "normal"


class BudgetWanted(Ask[tuple[int, int]], frozen=True):
    """Change the budget, or only tell it; answered with it and with what is granted of it."""

    total_bytes: int | None = None


GovernorMail = GrantAsked | MemoryFree | Governed | Measured | BudgetWanted | AlarmFired

# -- to the readings ------------------------------------------------------------------------------


class HaveRead(_Message, frozen=True):
    """What these processes take, and how long reading it took."""

    footprints: dict[int, int]
    took_s: float


ReadingsMail = AlarmFired | HaveRead

# -- to the turns ---------------------------------------------------------------------------------


class TimeSliceAsked(_Message, frozen=True):
    """A worker's process has work from now on."""

    model: str
    worker: Ref[WorkerMail]
    life: int
    weight: float
    step_s: float | None


class TimeSliceEnded(_Message, frozen=True):
    """A worker's process passes its turn on."""

    model: str
    over: TimeSliceOver


class TimeSlicesWeighed(_Message, frozen=True):
    """A model's weight is another."""

    model: str
    weight: float


class TimeSlicesLost(_Message, frozen=True):
    """A worker's process is gone."""

    model: str


TimeSlicesMail = TimeSliceAsked | TimeSliceEnded | TimeSlicesWeighed | TimeSlicesLost | AlarmFired

# -- to the supervisor ----------------------------------------------------------------------------


class Watcher(_Message, frozen=True):
    """Who wants to see how far a load is, under which request id."""

    client: Ref[ClientMail]
    id: str


class LoadWanted(Ask[ModelStatus], frozen=True):
    """Load a model; answered when it takes requests."""

    source: str
    alias: str | None
    kv: KVSpec
    policy: ModelPolicy | None = None
    watcher: Watcher | None = None


class EnsureLoaded(_Message, frozen=True):
    """A request names a model that is not loaded; the router waits for word of it.

    Answered by `ModelAdded`, or by `ModelForgotten` with the error that its requests end with.
    """

    model: str


class EvictRequest(_Message, frozen=True):
    """The governor wants a model's memory; requests that it has wait in the daemon meanwhile."""

    name: str
    requeue: bool
    """It runs none of them."""


class PinWanted(Ask[None], frozen=True):
    """Pin a model, or no longer."""

    name: str
    pinned: bool


class ListWanted(Ask[bool], frozen=True):
    """A model is in the configuration from now on, and these fields of its policy are new.

    Answered with whether `known` is how it is loaded: not while it is loaded otherwise.
    """

    name: str
    known: KnownModel
    policy: Mapping[str, Any]


class UnlistWanted(Ask[None], frozen=True):
    """A model is not in the configuration any more; if it is loaded it stays so."""

    name: str


class UnloadRequest(Ask[int], frozen=True):
    """Unload a model; answered with the bytes that became free."""

    name: str
    force: bool


class TokensWanted(Ask[Tokenized], frozen=True):
    """Tell a text's tokens; a model that is known and not loaded comes for it."""

    name: str
    command: Tokenize
    client: Ref[ClientMail]


class TokensUnwanted(_Message, frozen=True):
    """A client is gone: its texts need not wait for their models any more."""

    client: Ref[ClientMail]


class DrainWanted(Ask[None], frozen=True):
    """Take no new work; answered when nothing runs any more."""


class ShutdownWanted(_Message, frozen=True):
    """Drain and stop everything; `watcher` gets ``bye``."""

    force: bool
    watcher: Watcher | None = None


class NothingRuns(_Message, frozen=True):
    """The router is done."""


class WorkerChanged(_Message, frozen=True):
    """A worker's lifecycle moved."""

    name: str
    state: ModelState
    error: ErrorInfo | None = None
    refused: bool = False
    """Failed, since the model cannot be loaded."""
    freed_bytes: int = 0
    """Granted to the process that has just ended."""


class LoadProgressed(_Message, frozen=True):
    """How far a load is."""

    name: str
    stage: str
    fraction: float


RegistryMail = (
    LoadWanted
    | EnsureLoaded
    | EvictRequest
    | PinWanted
    | ListWanted
    | UnlistWanted
    | UnloadRequest
    | TokensWanted
    | TokensUnwanted
    | DrainWanted
    | ShutdownWanted
    | NothingRuns
    | WorkerChanged
    | LoadProgressed
)
