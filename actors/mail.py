"""Messages between actors, grouped by receiver. Each group ends with the union of its messages.

Messages stay inside the process.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from actors.machines import (
    admission_events,
    governor_events,
    lifecycle_events,
    prefix_store_events,
    time_slices,
)
from actors.ports import Exit, WorkerProcess
from actors.runtime.actor import Ask, Ref
from actors.status import KnownModel
from protocol.embedding import Embed
from protocol.errors import ErrorInfo
from protocol.kv import KVSpec
from protocol.messages import Attach, Event, Generate
from protocol.policy import PolicyChange
from protocol.types import ModelState, ModelStatus, Reclaimable
from protocol.worker import (
    Grant,
    Reclaim,
    Report,
    RowReport,
    SegmentCommand,
    SegmentReport,
    StartLevel,
    Submit,
    TimeSlice,
    TimeSliceOver,
    Tokenized,
)
from protocol.worker import Tokenize as TokenizeCommand


class _Message(msgspec.Struct, frozen=True):
    pass


class AlarmFired(_Message, frozen=True):
    """The actor's alarm fired: a deadline may have passed."""


class BytesReceived(_Message, frozen=True):
    """Bytes from the client's socket."""

    data: bytes


class ConnectionClosed(_Message, frozen=True):
    """The client's socket is closed."""


class Deliver(_Message, frozen=True):
    """An event for the client, with the client's own request id."""

    event: Event
    saved: bool = False
    """Whether an earlier daemon saved it: it is sent at once, and never makes a reader slow."""


ClientMail = BytesReceived | ConnectionClosed | Deliver


class SubmitRequest(_Message, frozen=True):
    """A client's request."""

    rid: str
    request: Generate | Embed
    client: Ref[ClientMail]
    journaled: bool = True


class AttachRequest(_Message, frozen=True):
    """A client continues a request that an earlier daemon accepted."""

    request: Attach
    client: Ref[ClientMail]


class ModelAdded(_Message, frozen=True):
    """A model is about to be loaded by this worker."""

    model: str
    worker: Ref[WorkerMail]


class AdmissionEvent(_Message, frozen=True):
    """An event for the router's state machine."""

    event: admission_events.Event


class RowReported(_Message, frozen=True):
    """A worker's report about one request."""

    report: RowReport


class FinishAll(Ask[None], frozen=True):
    """Accept no new requests; answered when all requests have ended."""


RouterMail = (
    SubmitRequest
    | AttachRequest
    | ModelAdded
    | AdmissionEvent
    | RowReported
    | FinishAll
    | AlarmFired
)


class LifecycleEvent(_Message, frozen=True):
    """An event for the worker's state machine."""

    event: (
        lifecycle_events.Start
        | lifecycle_events.Drain
        | lifecycle_events.Halt
        | lifecycle_events.RequestBlamed
        | lifecycle_events.Fault
        | lifecycle_events.MemoryExceeded
    )


class RunRow(_Message, frozen=True):
    """A request for the process."""

    submit: Submit


class CancelRow(_Message, frozen=True):
    """Cancel a request."""

    rid: str


class SendCommand(_Message, frozen=True):
    """A command for the process with the number `life`; dropped if another process runs."""

    command: Grant | Reclaim | StartLevel | TimeSlice | SegmentCommand
    life: int


class GrantPending(_Message, frozen=True):
    """The process `life` waits for the governor, so the silence of the process is no fault."""

    life: int


class SetWeight(_Message, frozen=True):
    """Set the model's share of the accelerator."""

    weight: float


class Tokenize(Ask[Tokenized], frozen=True):
    """Let the process tokenize a text."""

    command: TokenizeCommand


class ProcessSpawned(_Message, frozen=True):
    """The process has started."""

    process: WorkerProcess


class SpawnFailed(_Message, frozen=True):
    """The process could not be started."""

    error: Exception


class ProcessReported(_Message, frozen=True):
    """A report of the process with the number `life`."""

    report: Report
    life: int


class ProcessExited(_Message, frozen=True):
    """The process with the number `life` has ended."""

    exit: Exit
    life: int


WorkerMail = (
    LifecycleEvent
    | RunRow
    | CancelRow
    | SendCommand
    | GrantPending
    | SetWeight
    | Tokenize
    | ProcessSpawned
    | SpawnFailed
    | ProcessReported
    | ProcessExited
    | AlarmFired
)


class RequestMemory(_Message, frozen=True):
    """A worker's process asks to hold `total_bytes` in total."""

    model: str
    worker: Ref[WorkerMail]
    life: int
    seq: int
    total_bytes: int
    reclaimable: Reclaimable | None = None
    """Bytes that the worker could give back; absent while it loads."""
    resuming: bool = False


class GovernorEvent(_Message, frozen=True):
    """An event for the governor's state machine."""

    event: governor_events.Event


class BudgetRequest(Ask[tuple[int, int]], frozen=True):
    """Set the budget if `total_bytes` is given; answered with budget and granted bytes."""

    total_bytes: int | None = None


GovernorMail = RequestMemory | GovernorEvent | BudgetRequest | AlarmFired


class FootprintsRead(_Message, frozen=True):
    """Footprints in bytes by process id, and the seconds that reading them took."""

    footprints: dict[int, int]
    took_s: float


ReadingsMail = FootprintsRead | AlarmFired


class RequestTimeSlice(_Message, frozen=True):
    """A worker's process has work."""

    model: str
    worker: Ref[WorkerMail]
    life: int
    weight: float
    step_s: float | None
    device: int = 0


class TimeSliceEnded(_Message, frozen=True):
    """A worker's process has ended its time slice."""

    model: str
    over: TimeSliceOver


class TimeSlicesEvent(_Message, frozen=True):
    """An event for the state machine of the time slices."""

    event: time_slices.WeightChanged | time_slices.WorkerExited


TimeSlicesMail = RequestTimeSlice | TimeSliceEnded | TimeSlicesEvent | AlarmFired


class SegmentsReported(_Message, frozen=True):
    """A worker's process reported on segments."""

    worker: Ref[WorkerMail]
    model: str
    life: int
    report: SegmentReport
    draining: bool
    """Whether the process finishes its requests and then ends."""


class PrefixStoreEvent(_Message, frozen=True):
    """An event for the state machine of the prefix store."""

    event: (
        prefix_store_events.WorkerExited
        | prefix_store_events.Continued
        | prefix_store_events.LimitsChanged
        | prefix_store_events.DiskEvent
    )


class DropSegments(Ask[tuple[int, int]], frozen=True):
    """Delete segments that match all conditions; answered with their number and bytes."""

    model: str | None = None
    unused_s: float | None = None
    """Seconds since the last use."""


PrefixStoreMail = SegmentsReported | PrefixStoreEvent | DropSegments | AlarmFired


class Watcher(_Message, frozen=True):
    """The client that receives progress events, and its request id."""

    client: Ref[ClientMail]
    id: str


class LoadModel(Ask[ModelStatus], frozen=True):
    """Load a model; answered when it accepts requests."""

    source: str
    alias: str | None
    kv: KVSpec | None
    """Absent: the settings of the known model."""
    policy: PolicyChange = PolicyChange()
    watcher: Watcher | None = None


class EnsureLoaded(_Message, frozen=True):
    """A request names a model without a worker.

    The registry answers the router with `ModelAdded`, or with `admission_events.ModelRemoved` and
    the error for the model's requests.
    """

    model: str


class EvictModel(_Message, frozen=True):
    """Unload a model to free its memory; meanwhile new requests for it wait in the daemon."""

    name: str
    requeue: bool
    """Whether the model runs none of its requests; all of them then return to the daemon."""


class EndWorker(_Message, frozen=True):
    """End a model's process, because it holds more memory than it may."""

    name: str
    order: lifecycle_events.MemoryExceeded


class SetPolicy(Ask[None], frozen=True):
    """Change fields of a model's policy."""

    name: str
    fields: Mapping[str, Any]
    """New values of fields of `ModelPolicy`; all others stay."""


class KeepLoaded(_Message, frozen=True):
    """Set how long a model stays loaded without requests, until it is unloaded."""

    name: str
    seconds: float
    """Idle limit; negative: none."""


class AddConfiguredModel(Ask[bool], frozen=True):
    """Register a model of the configuration, and set the fields that `policy` contains.

    Answered with whether `known` is in force; it is not while the model is loaded with different
    settings.
    """

    name: str
    known: KnownModel
    policy: Mapping[str, Any]


class SetFoundModels(Ask[None], frozen=True):
    """Set the models of the models folder."""

    sources: Mapping[str, str]
    """Folders by name."""


class RemoveConfiguredModel(Ask[None], frozen=True):
    """Note that the configuration no longer lists a model; a loaded model stays loaded."""

    name: str


class UnloadModel(Ask[int], frozen=True):
    """Unload a model; answered with the bytes freed."""

    name: str
    force: bool


class TokenizeText(Ask[Tokenized], frozen=True):
    """Tokenize a text; loads the model if it is registered and not loaded."""

    name: str
    command: TokenizeCommand
    client: Ref[ClientMail] | None


class CancelTokenize(_Message, frozen=True):
    """Drop the waiting `TokenizeText` messages of a client that disconnected."""

    client: Ref[ClientMail]


class Drain(Ask[None], frozen=True):
    """Accept no new work; answered when all requests have ended."""


class Shutdown(_Message, frozen=True):
    """Drain and stop everything; `watcher` receives `ShutdownReply`."""

    force: bool
    watcher: Watcher | None = None


class RequestsDrained(_Message, frozen=True):
    """The router has no requests left."""


class WorkerChanged(_Message, frozen=True):
    """The state of a worker's lifecycle changed."""

    name: str
    state: ModelState
    error: ErrorInfo | None = None
    refused: bool = False
    """Whether the state is failed because the model cannot be loaded."""
    freed_bytes: int = 0
    """Bytes granted to the process that has just ended."""


class LoadProgressed(_Message, frozen=True):
    """Progress of a load."""

    name: str
    stage: str
    fraction: float


RegistryMail = (
    LoadModel
    | EnsureLoaded
    | EvictModel
    | EndWorker
    | KeepLoaded
    | SetPolicy
    | AddConfiguredModel
    | SetFoundModels
    | RemoveConfiguredModel
    | UnloadModel
    | TokenizeText
    | CancelTokenize
    | Drain
    | Shutdown
    | RequestsDrained
    | WorkerChanged
    | LoadProgressed
)
