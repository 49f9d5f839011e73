"""The life of one model's worker process. Pure: everything that moves its state is in this file.

Covers when the process is started, asked to stop, terminated, killed, started again or given up,
and which requests were in it when it died. Does not know what a request is, nor how a process is
started: `actors.worker` does what the commands say.

Memory counts as released (`Release`) only when the exit was seen.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Annotated, Literal

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from actors.machines.machine import InvalidTransition
from actors.machines.restart import RestartBudget
from protocol.errors import Draining as DrainingError
from protocol.errors import ErrorInfo, InsufficientMemory, ModelFailed, WorkerDied
from protocol.worker import Phase


class _Tagged(msgspec.Struct, frozen=True, tag=True):
    pass


# -- states -----------------------------------------------------------------------------------


class Stopped(_Tagged, frozen=True):
    """No process, and none is wanted."""


class Spawning(_Tagged, frozen=True):
    """The process is being started; it has not spoken yet."""

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
    """None while it has no requests: an idle worker may be silent."""


class Draining(_Tagged, frozen=True):
    """It finishes its requests and takes no new ones."""

    pid: int
    deadline: float


class Stopping(_Tagged, frozen=True):
    """The exit is awaited, with growing pressure."""

    pid: int | None
    """None while the process is still being started."""
    pressure: Literal["asked", "terminated", "killed"]
    deadline: float
    then: Literal["stopped", "restart", "failed"]
    error: ErrorInfo | None = None
    """Why, if it was not ordered."""
    reason: str = ""
    """Of the order, for the requests that end with it."""


class Backoff(_Tagged, frozen=True):
    """It died, or lacked memory when it came back, and will be started again."""

    until: float
    error: ErrorInfo


class Failed(_Tagged, frozen=True):
    """It is given up."""

    error: ErrorInfo
    refused: bool = False
    """The model cannot be loaded, as against: its process kept dying."""


State = Stopped | Spawning | Loading | Ready | Draining | Stopping | Backoff | Failed

# -- events -----------------------------------------------------------------------------------


class Start(_Tagged, frozen=True):
    """Order: run."""


class Drain(_Tagged, frozen=True):
    """Order: finish the requests, then stop."""


class Halt(_Tagged, frozen=True):
    """Order: stop now."""

    reason: str = ""
    """For the requests that end with it; absent: the model was stopped."""


class Spawned(_Tagged, frozen=True):
    """There is a process."""

    pid: int


class SpawnFailed(_Tagged, frozen=True):
    """There will be no process."""

    reason: str


class Up(_Tagged, frozen=True):
    """The process runs our code."""


class Alive(_Tagged, frozen=True):
    """A report of any other kind: a sign of life."""


class Entered(_Tagged, frozen=True):
    """The process does something else from now on: a sign of life, with patience of its own."""

    phase: Phase


class Loaded(_Tagged, frozen=True):
    """The model is loaded."""


class CannotLoad(_Tagged, frozen=True):
    """The model cannot be loaded; trying again does not help, unless memory is what it lacks."""

    error: ErrorInfo


class Admit(_Tagged, frozen=True):
    """A request for it."""

    rid: str


class Gained(_Tagged, frozen=True):
    """A token was generated: progress."""


class RowOver(_Tagged, frozen=True):
    """A request is over."""

    rid: str


class Blamed(_Tagged, frozen=True):
    """A request was found that the process died of; others may be as deadly."""


class Exited(_Tagged, frozen=True):
    """The process is gone."""

    returncode: int
    starved: bool = False
    """It was the kernel that killed it, for want of memory."""


class Fault(_Tagged, frozen=True):
    """The process broke the rules, or we did with it: it cannot be trusted any more."""

    reason: str


class Tick(_Tagged, frozen=True):
    """Time has passed."""


Event = (
    Start
    | Drain
    | Halt
    | Spawned
    | SpawnFailed
    | Up
    | Alive
    | Entered
    | Loaded
    | CannotLoad
    | Admit
    | Gained
    | RowOver
    | Blamed
    | Exited
    | Fault
    | Tick
)

SIGNS = (Alive, Entered, Gained)
"""Of several in a row only the last one matters; see `actors.runtime.history`."""

# -- commands ---------------------------------------------------------------------------------


class Spawn(_Tagged, frozen=True):
    """Start a process; answer with `Spawned` or `SpawnFailed`."""


class SendLoad(_Tagged, frozen=True):
    """Tell it to load the model."""


class SendRow(_Tagged, frozen=True):
    """Give it the request."""

    rid: str


class Bounce(_Tagged, frozen=True):
    """Give the request back to the router: the process never got it."""

    rid: str


class SendStop(_Tagged, frozen=True):
    """Ask it to exit."""


class Terminate(_Tagged, frozen=True):
    """SIGTERM."""


class Kill(_Tagged, frozen=True):
    """SIGKILL."""


class LoseRows(_Tagged, frozen=True):
    """These requests died with the process."""

    rids: list[str]
    error: ErrorInfo
    attributable: bool = False
    """They, or the process itself, may have caused it."""
    again: bool = False
    """There will be another process, which they can go on in."""


class Release(_Tagged, frozen=True):
    """Its memory is free."""


Command = Spawn | SendLoad | SendRow | Bounce | SendStop | Terminate | Kill | LoseRows | Release


Seconds = Annotated[float, Meta(gt=0, le=86_400)]


class Patience(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long each phase may be silent, in seconds: ample for a slow machine.

    The phases of a model that is loaded count only while it has requests: an idle worker may be
    silent.
    """

    spawning_s: Seconds = 60.0
    """A cold start of Python and MLX from a slow disk."""
    loading_s: Seconds = 600.0
    """Since the last progress; one shard of a large model from a slow disk."""
    idle_s: Seconds = 120.0
    """It waits for a grant or for us; it tells its counters every few seconds."""
    tokenize_s: Seconds = 300.0
    """A prompt of the largest size that a frame can have."""
    prefill_s: Seconds = 600.0
    """One chunk: 80 s for 8B parameters without an accelerator, and kernels are compiled first."""
    decode_s: Seconds = 300.0
    """One step; some are traced or compiled first."""
    flush_s: Seconds = 300.0
    """All full pages of all rows, and what was launched before."""
    pools_s: Seconds = 300.0
    """One slice of pages, or one copy of pools."""
    asked_s: Seconds = 10.0
    """Until a worker that is asked to exit does."""
    halted_s: Seconds = 2.0
    """The same where it must not finish anything."""
    terminated_s: Seconds = 5.0
    """Between SIGTERM and SIGKILL, and between one SIGKILL and the next: a process in a driver's
    call dies late."""

    def of(self, phase: Phase) -> float:
        """Return how long a worker may be silent in this phase."""
        return getattr(self, f"{phase}_s")  # type: ignore[no-any-return]


class Lifecycle(msgspec.Struct):
    """One worker's state machine: `handle` events, do what the commands say."""

    name: str
    patience: Patience = Patience()
    budget: RestartBudget = msgspec.field(default_factory=RestartBudget)
    state: State = Stopped()
    rows: set[str] = msgspec.field(default_factory=set)
    """Requests that the process has."""
    restarts: int = 0
    worked: bool = False
    """The process of now, or the last one, has loaded its model."""
    served: bool = False
    """One of its processes has, since the last order to start."""
    phase: Phase = "idle"
    """What the process says that it does, once it has loaded its model."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event and return what is to be done; `InvalidTransition` changes nothing."""
        move = TABLE[type(self.state)].get(type(event))
        if move is None:
            raise InvalidTransition(self.state, event)
        return move(self, event, now)

    @property
    def deadline(self) -> float | None:
        """When the next `Tick` is due."""
        match self.state:
            case Stopped() | Failed():
                return None
            case Backoff(until=until):
                return until
            case state:
                return state.deadline

    @property
    def pid(self) -> int | None:
        """The process's id."""
        return getattr(self.state, "pid", None)

    @property
    def error(self) -> ErrorInfo | None:
        """Why it does not run, unless that was ordered."""
        return getattr(self.state, "error", None)

    def check(self) -> None:
        """Check the invariants."""
        self.budget.check()
        match self.state:
            case Ready(deadline=deadline):
                assert (deadline is None) == (not self.rows), "watched without requests, or not"
            case Draining():
                assert self.rows, "drains nothing"
            case Stopping(then=then, error=error):
                assert (then == "stopped") or error is not None, "stops without a reason"
            case _:
                assert not self.rows, "requests in a process that cannot have any"


# -- moves: (machine, event, now) -> commands ---------------------------------------------------


def _stay(_m: Lifecycle, _e: Event, _now: float) -> list[Command]:
    return []


def _start(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    m.budget.progress()
    m.served = False
    return _spawn(m, now)


def _spawn(m: Lifecycle, now: float) -> list[Command]:
    m.worked = False
    m.state = Spawning(now + m.patience.spawning_s)
    return [Spawn()]


def _spawned(m: Lifecycle, e: Event, _now: float) -> list[Command]:
    assert isinstance(m.state, Spawning)
    assert isinstance(e, Spawned)
    m.state = replace(m.state, pid=e.pid)
    return []


def _spawned_too_late(m: Lifecycle, e: Event, _now: float) -> list[Command]:
    assert isinstance(m.state, Stopping)
    assert isinstance(e, Spawned)
    m.state = replace(m.state, pid=e.pid, pressure="killed")
    return [Kill()]


def _spawn_failed(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(e, SpawnFailed)
    error = WorkerDied(
        f"the process of {m.name} could not be started: {e.reason}", cause="not_started"
    ).info()
    if isinstance(m.state, Stopping) and m.state.then == "stopped":
        m.state = Stopped()
        return [Release()]
    return _died(m, error, now, attributable=True)


def _up(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Spawning)
    if m.state.pid is None:
        raise InvalidTransition(m.state, e)
    m.state = Loading(m.state.pid, now + m.patience.loading_s)
    return [SendLoad()]


def _alive_loading(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Loading)
    m.state = replace(m.state, deadline=now + m.patience.loading_s)
    return []


def _loaded(m: Lifecycle, _e: Event, _now: float) -> list[Command]:
    assert isinstance(m.state, Loading)
    m.worked = m.served = True
    m.phase = "idle"
    m.state = Ready(m.state.pid)
    return []


def _cannot_load(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Loading)
    assert isinstance(e, CannotLoad)
    # Where it ran before, memory is missing for a while only: others hold it now.
    then: Literal["restart", "failed"] = "restart" if m.served and _lacks(e.error) else "failed"
    m.state = Stopping(m.state.pid, "asked", now + m.patience.asked_s, then, e.error)
    return []


def _lacks(error: ErrorInfo) -> bool:
    return error.code == InsufficientMemory.code


def _admit(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Ready)
    assert isinstance(e, Admit)
    m.rows.add(e.rid)
    m.state = replace(m.state, deadline=m.state.deadline or now + m.patience.of(m.phase))
    return [SendRow(e.rid)]


def _bounce(_m: Lifecycle, e: Event, _now: float) -> list[Command]:
    assert isinstance(e, Admit)
    return [Bounce(e.rid)]


def _alive(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Ready | Draining)
    if m.rows:
        m.state = replace(m.state, deadline=now + m.patience.of(m.phase))
    return []


def _entered(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(e, Entered)
    m.phase = e.phase
    return _alive(m, e, now)


def _gained(m: Lifecycle, e: Event, now: float) -> list[Command]:
    m.budget.progress()
    return _alive(m, e, now)


def _row_over(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(e, RowOver)
    m.rows.discard(e.rid)
    match m.state:
        case Ready() if not m.rows:
            m.state = replace(m.state, deadline=None)
            return []
        case Draining(pid=pid) if not m.rows:
            return _ask(m, pid, now + m.patience.asked_s)
        case Stopping():
            return []
        case _:
            return _alive(m, e, now)


def _drain(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Ready)
    if not m.rows:
        return _ask(m, m.state.pid, now + m.patience.asked_s)
    m.state = Draining(m.state.pid, m.state.deadline or now + m.patience.of(m.phase))
    return []


def _ask(m: Lifecycle, pid: int, deadline: float) -> list[Command]:
    m.state = Stopping(pid, "asked", deadline, "stopped")
    return [SendStop()]


def _halt(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Spawning | Loading | Ready | Draining)
    deadline = now + m.patience.halted_s
    m.state = Stopping(m.state.pid, "asked", deadline, "stopped", reason=_reason(e))
    return [SendStop()] if m.state.pid is not None else []


def _reason(e: Event) -> str:
    return e.reason if isinstance(e, Halt) else ""


def _do_not_restart(m: Lifecycle, e: Event, _now: float) -> list[Command]:
    assert isinstance(m.state, Stopping)
    reason = _reason(e) or m.state.reason
    m.state = replace(m.state, then="stopped", error=None, reason=reason)
    return []


def _halt_stopping(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Stopping)
    sooner = min(m.state.deadline, now + m.patience.halted_s)
    m.state = replace(m.state, deadline=sooner)
    return _do_not_restart(m, e, now)


def _forget(m: Lifecycle, _e: Event, _now: float) -> list[Command]:
    m.state = Stopped()
    return []


def _exited(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(e, Exited)
    why = ", by the kernel, for want of memory" if e.starved else ""
    died = WorkerDied(
        f"the worker of {m.name} {describe(e.returncode)}{why}", exit=e.returncode, cause=_cause(e)
    )
    match m.state:
        case Stopping(then="stopped", reason=reason):
            lost = DrainingError(reason or f"{m.name} was stopped to be unloaded").info()
            m.state = Stopped()
            return [*_lose_rows(m, lost), Release()]
        case Stopping(then="failed", error=ErrorInfo() as error):
            m.state = Failed(error, refused=True)
            return [Release()]
        case Stopping(then="restart", error=ErrorInfo() as error):
            m.worked = False  # it did not end by itself: a hang is as fruitless as a failed load
            return _died(m, error, now, attributable=not _lacks(error))
        case Draining():
            m.state = Stopped()
            lost = DrainingError(f"{m.name} was being unloaded, and {died.message}").info()
            return [*_lose_rows(m, lost), Release()]
        case _:
            # What took too much memory would take it again.
            own = e.starved or is_own_doing(e.returncode)
            return _died(m, died.info(), now, attributable=own)


def _died(m: Lifecycle, error: ErrorInfo, now: float, *, attributable: bool) -> list[Command]:
    lost = _lose_rows(m, error, attributable=attributable, again=True)
    delay: float | None
    if lost and attributable:  # its requests are suspected first
        delay = m.budget.narrowed()
    else:
        delay = m.budget.death(now, attributable=attributable, fruitless=not m.worked)
    if delay is None:
        m.state = _given_up(m, error)
    else:
        m.restarts += 1
        m.state = Backoff(now + delay, error)
    return [*lost, Release()]


def _given_up(m: Lifecycle, error: ErrorInfo) -> Failed:
    reason = ModelFailed(
        f"{m.name} was given up after {m.budget.crashes} crashes without progress; "
        f"the last one: {error.message}",
        last=error.message,
    )
    return Failed(reason.info())


def _blamed(m: Lifecycle, _e: Event, _now: float) -> list[Command]:
    assert isinstance(m.state, Backoff)
    if m.budget.blame():
        m.state = _given_up(m, m.state.error)
    return []


def _lose_rows(
    m: Lifecycle, error: ErrorInfo, *, attributable: bool = False, again: bool = False
) -> list[Command]:
    if not m.rows:
        return []
    rids, m.rows = sorted(m.rows), set()
    return [LoseRows(rids, error, attributable, again)]


def _fault(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Spawning | Loading | Ready | Draining | Stopping)
    assert isinstance(e, Fault)
    error = WorkerDied(f"the worker of {m.name} was killed: {e.reason}", cause="broke_rules").info()
    deadline = now + m.patience.terminated_s
    if isinstance(m.state, Stopping):
        m.state = replace(m.state, pressure="killed", deadline=deadline)
    else:
        then: Literal["stopped", "restart"]
        then = "stopped" if isinstance(m.state, Draining) else "restart"
        m.state = Stopping(m.state.pid, "killed", deadline, then, error)
    return [Kill()] if m.state.pid is not None else []


def _hung(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Spawning | Loading | Ready | Draining)
    if m.state.deadline is None or now < m.state.deadline:
        return []
    phase, patience = _doing(m)
    error = WorkerDied(
        f"the worker of {m.name} was ended: it gave no sign of life for {patience:g} s ({phase})",
        phase=phase,
        patience_s=patience,
        cause="hung",
    ).info()
    then: Literal["stopped", "restart"]
    then = "stopped" if isinstance(m.state, Draining) else "restart"
    deadline = now + m.patience.terminated_s
    m.state = Stopping(m.state.pid, "terminated", deadline, then, error)
    return [Terminate()] if m.state.pid is not None else []


def _doing(m: Lifecycle) -> tuple[str, float]:
    """Return what the process does, and how long it may be silent in that."""
    match m.state:
        case Spawning():
            return "spawning", m.patience.spawning_s
        case Loading():
            return "loading", m.patience.loading_s
        case _:
            return m.phase, m.patience.of(m.phase)


def _press(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Stopping)
    if now < m.state.deadline:
        return []
    deadline = now + m.patience.terminated_s
    if m.state.pid is None:  # nothing to press on yet: the spawn still runs
        m.state = replace(m.state, deadline=deadline)
        return []
    if m.state.pressure == "asked":
        m.state = replace(m.state, pressure="terminated", deadline=deadline)
        return [Terminate()]
    m.state = replace(m.state, pressure="killed", deadline=deadline)
    return [Kill()]


def _again(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Backoff)
    return _spawn(m, now) if now >= m.state.until else []


Move = Callable[[Lifecycle, Event, float], list[Command]]

TABLE: dict[type[State], dict[type[Event], Move]] = {
    Stopped: {
        Start: _start,
        Drain: _stay,
        Halt: _stay,
        Admit: _bounce,
        Blamed: _stay,
        Fault: _stay,
        Tick: _stay,
    },
    Spawning: {
        Start: _stay,
        Drain: _halt,
        Halt: _halt,
        Spawned: _spawned,
        SpawnFailed: _spawn_failed,
        Up: _up,
        Admit: _bounce,
        Exited: _exited,
        Blamed: _stay,
        Fault: _fault,
        Tick: _hung,
    },
    Loading: {
        Start: _stay,
        Drain: _halt,
        Halt: _halt,
        Alive: _alive_loading,
        Loaded: _loaded,
        CannotLoad: _cannot_load,
        Admit: _bounce,
        Exited: _exited,
        Blamed: _stay,
        Fault: _fault,
        Tick: _hung,
    },
    Ready: {
        Start: _stay,
        Drain: _drain,
        Halt: _halt,
        Alive: _alive,
        Entered: _entered,
        Admit: _admit,
        Gained: _gained,
        RowOver: _row_over,
        Exited: _exited,
        Blamed: _stay,
        Fault: _fault,
        Tick: _hung,
    },
    Draining: {
        Drain: _stay,
        Halt: _halt,
        Alive: _alive,
        Entered: _entered,
        Admit: _bounce,
        Gained: _gained,
        RowOver: _row_over,
        Exited: _exited,
        Blamed: _stay,
        Fault: _fault,
        Tick: _hung,
    },
    # What the process still says is true, and does not matter any more.
    Stopping: {
        Drain: _do_not_restart,
        Halt: _halt_stopping,
        Spawned: _spawned_too_late,
        SpawnFailed: _spawn_failed,
        Up: _stay,
        Alive: _stay,
        Entered: _stay,
        Loaded: _stay,
        CannotLoad: _stay,
        Admit: _bounce,
        Gained: _stay,
        RowOver: _row_over,
        Exited: _exited,
        Blamed: _stay,
        Fault: _fault,
        Tick: _press,
    },
    Backoff: {
        Start: _stay,
        Drain: _forget,
        Halt: _forget,
        Admit: _bounce,
        Blamed: _blamed,
        Fault: _stay,
        Tick: _again,
    },
    Failed: {
        Start: _start,
        Drain: _forget,
        Halt: _forget,
        Admit: _bounce,
        Blamed: _stay,
        Fault: _stay,
        Tick: _stay,
    },
}


OWN_SIGNALS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGABRT,
        signal.SIGILL,
        signal.SIGFPE,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)
"""What a process brings upon itself; every other signal is sent by somebody: the user, a service
manager."""


def _cause(e: Exited) -> str:
    if e.starved:
        return "out_of_memory"
    return "crashed" if is_own_doing(e.returncode) else "killed"


CAUSES = ("crashed", "killed", "out_of_memory", "hung", "not_started", "broke_rules", "no_memory")


def cause_of(error: ErrorInfo | None) -> str:
    """Return in a word why a worker does not run: one of `CAUSES`, or the code of its error."""
    if error is None:
        return ""
    return str(error.detail.get("cause", "no_memory" if _lacks(error) else error.code))


def is_own_doing(returncode: int) -> bool:
    """Return whether a process may have caused this end of its own, as no order of ours did."""
    return returncode >= 0 or -returncode in OWN_SIGNALS


def describe(returncode: int) -> str:
    """Say in words how a process ended."""
    if returncode >= 0:
        return f"exited with status {returncode}"
    try:
        return f"was ended by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was ended by signal {-returncode}"
