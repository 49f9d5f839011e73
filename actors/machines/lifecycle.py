"""The lifecycle of one model's worker process. Pure: every change of its state is in this file.

Covers when the process is started, asked to stop, terminated, killed, restarted or given up, and
which requests it had when it died. Does not know what a request is or how a process is started:
`actors.worker` carries out the commands.

Memory counts as free (`ReleaseMemory`) only after the exit was observed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
from msgspec.structs import replace

from actors.machines.lifecycle_events import (
    AlarmFired,
    Backoff,
    Command,
    Drain,
    Draining,
    Event,
    Exited,
    Failed,
    Fault,
    Halt,
    Kill,
    Loaded,
    LoadFailed,
    Loading,
    LoseRequests,
    PhaseEntered,
    Ready,
    ReleaseMemory,
    RequestAssigned,
    RequestBlamed,
    RequestFinished,
    ReturnRequest,
    SendLoad,
    SendRequest,
    SendStop,
    SignOfLife,
    Spawn,
    Spawned,
    SpawnFailed,
    Spawning,
    Start,
    Started,
    State,
    Stopped,
    Stopping,
    Terminate,
    TokenGenerated,
)
from actors.machines.machine import InvalidTransition
from actors.machines.process_exit import describe, exit_cause, is_self_inflicted, lacks_memory
from actors.machines.restart import RestartBudget
from actors.machines.watchdog import WatchdogTimeouts, WatchedPhase
from protocol.errors import Draining as DrainingError
from protocol.errors import ErrorInfo, ModelFailed, WorkerDied
from protocol.worker import Phase


class Lifecycle(msgspec.Struct):
    """State machine of one worker."""

    name: str
    timeouts: WatchdogTimeouts = WatchdogTimeouts()
    restart_budget: RestartBudget = msgspec.field(default_factory=RestartBudget)
    state: State = Stopped()
    requests: set[str] = msgspec.field(default_factory=set)
    """Ids of the requests that the process has."""
    restarts: int = 0
    loaded: bool = False
    """The current or last process loaded the model."""
    loaded_once: bool = False
    """Some process loaded the model since the last `Start`."""
    phase: Phase = "idle"
    """Phase that the process reported, once the model is loaded."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Apply an event and return the commands; `InvalidTransition` changes nothing."""
        transition = TRANSITIONS[type(self.state)].get(type(event))
        if transition is None:
            raise InvalidTransition(self.state, event)
        return transition(self, event, now)

    @property
    def deadline(self) -> float | None:
        """When the next `AlarmFired` is due."""
        return getattr(self.state, "deadline", None)

    @property
    def pid(self) -> int | None:
        """Id of the process, None without one."""
        return getattr(self.state, "pid", None)

    @property
    def error(self) -> ErrorInfo | None:
        """Why the worker does not run; None if that was ordered."""
        return getattr(self.state, "error", None)

    def check(self) -> None:
        """Check the invariants."""
        self.restart_budget.check()
        match self.state:
            case Ready(deadline=deadline):
                assert (deadline is None) == (not self.requests), (
                    "a deadline if and only if requests"
                )
            case Draining():
                assert self.requests, "drains without requests"
            case Stopping(then=then, error=error):
                assert (then == "stopped") or error is not None, "stops without an error"
            case _:
                assert not self.requests, "requests in a process that cannot have any"


# -- transitions: (machine, event, now) -> commands -----------------------------------------------


def _ignore(_m: Lifecycle, _e: Event, _now: float) -> list[Command]:
    return []


def _start(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    m.restart_budget.reset()
    m.loaded_once = False
    return _spawn(m, now)


def _spawn(m: Lifecycle, now: float) -> list[Command]:
    m.loaded = False
    m.state = Spawning(now + m.timeouts.spawning_s)
    return [Spawn()]


def _spawned(m: Lifecycle, e: Event, _now: float) -> list[Command]:
    assert isinstance(m.state, Spawning)
    assert isinstance(e, Spawned)
    m.state = replace(m.state, pid=e.pid)
    return []


def _kill_late_process(m: Lifecycle, e: Event, _now: float) -> list[Command]:
    assert isinstance(m.state, Stopping)
    assert isinstance(e, Spawned)
    m.state = replace(m.state, pid=e.pid, escalation="killed")
    return [Kill()]


def _spawn_failed(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(e, SpawnFailed)
    error = WorkerDied(
        f"the process of {m.name} could not be started: {e.reason}", cause="not_started"
    ).info()
    if isinstance(m.state, Stopping) and m.state.then == "stopped":
        m.state = Stopped()
        return [ReleaseMemory()]
    return _restart_or_give_up(m, error, now, attributable=True)


def _started(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Spawning)
    if m.state.pid is None:
        raise InvalidTransition(m.state, e)
    m.state = Loading(m.state.pid, now + m.timeouts.loading_s)
    return [SendLoad()]


def _loaded(m: Lifecycle, _e: Event, _now: float) -> list[Command]:
    assert isinstance(m.state, Loading)
    m.loaded = m.loaded_once = True
    m.phase = "idle"
    m.state = Ready(m.state.pid)
    return []


def _load_failed(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Loading)
    assert isinstance(e, LoadFailed)
    # If the model was loaded before, other models hold its memory for now only.
    retry = m.loaded_once and lacks_memory(e.error)
    then: Literal["restart", "failed"] = "restart" if retry else "failed"
    m.state = Stopping(m.state.pid, "asked", now + m.timeouts.asked_s, then, e.error)
    return []


def _assign(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Ready)
    assert isinstance(e, RequestAssigned)
    m.requests.add(e.rid)
    m.state = replace(m.state, deadline=m.state.deadline or now + m.timeouts.of(m.phase))
    return [SendRequest(e.rid)]


def _return_request(_m: Lifecycle, e: Event, _now: float) -> list[Command]:
    assert isinstance(e, RequestAssigned)
    return [ReturnRequest(e.rid)]


def _sign_of_life(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Loading | Ready | Draining)
    if m.requests or isinstance(m.state, Loading):
        m.state = replace(m.state, deadline=now + m.timeouts.of(_phase(m)))
    return []


def _phase_entered(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(e, PhaseEntered)
    m.phase = e.phase
    return _sign_of_life(m, e, now)


def _token_generated(m: Lifecycle, e: Event, now: float) -> list[Command]:
    m.restart_budget.reset()
    return _sign_of_life(m, e, now)


def _request_finished(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(e, RequestFinished)
    m.requests.discard(e.rid)
    match m.state:
        case Ready() if not m.requests:
            m.state = replace(m.state, deadline=None)
            return []
        case Draining(pid=pid) if not m.requests:
            return _ask_to_exit(m, pid, now + m.timeouts.asked_s)
        case Stopping():
            return []
        case _:
            return _sign_of_life(m, e, now)


def _drain(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Ready)
    if not m.requests:
        return _ask_to_exit(m, m.state.pid, now + m.timeouts.asked_s)
    m.state = Draining(m.state.pid, m.state.deadline or now + m.timeouts.of(m.phase))
    return []


def _ask_to_exit(m: Lifecycle, pid: int, deadline: float) -> list[Command]:
    m.state = Stopping(pid, "asked", deadline, "stopped")
    return [SendStop()]


def _halt(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Spawning | Loading | Ready | Draining)
    deadline = now + m.timeouts.halted_s
    m.state = Stopping(m.state.pid, "asked", deadline, "stopped", reason=_reason(e))
    return [SendStop()] if m.state.pid is not None else []


def _reason(e: Event) -> str:
    return e.reason if isinstance(e, Halt) else ""


def _cancel_restart(m: Lifecycle, e: Event, _now: float) -> list[Command]:
    assert isinstance(m.state, Stopping)
    reason = _reason(e) or m.state.reason
    m.state = replace(m.state, then="stopped", error=None, reason=reason)
    return []


def _halt_stopping(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Stopping)
    sooner = min(m.state.deadline, now + m.timeouts.halted_s)
    m.state = replace(m.state, deadline=sooner)
    return _cancel_restart(m, e, now)


def _stop_at_once(m: Lifecycle, _e: Event, _now: float) -> list[Command]:
    m.state = Stopped()
    return []


def _exited(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(e, Exited)
    killer = " by the kernel, because memory ran out" if e.out_of_memory else ""
    died = WorkerDied(
        f"the worker of {m.name} {describe(e.returncode)}{killer}",
        exit=e.returncode,
        cause=exit_cause(e.returncode, out_of_memory=e.out_of_memory),
    )
    match m.state:
        case Stopping(then="stopped", reason=reason):
            lost = DrainingError(reason or f"{m.name} was stopped to be unloaded").info()
            m.state = Stopped()
            return [*_lose_requests(m, lost), ReleaseMemory()]
        case Stopping(then="failed", error=ErrorInfo() as error):
            m.state = Failed(error, refused=True)
            return [ReleaseMemory()]
        case Stopping(then="restart", error=ErrorInfo() as error):
            m.loaded = False  # a hang counts like a failed load
            return _restart_or_give_up(m, error, now, attributable=not lacks_memory(error))
        case Draining():
            m.state = Stopped()
            lost = DrainingError(f"{m.name} was being unloaded, and {died.message}").info()
            return [*_lose_requests(m, lost), ReleaseMemory()]
        case _:
            # A process that ran out of memory would do so again.
            attributable = e.out_of_memory or is_self_inflicted(e.returncode)
            return _restart_or_give_up(m, died.info(), now, attributable=attributable)


def _restart_or_give_up(
    m: Lifecycle, error: ErrorInfo, now: float, *, attributable: bool
) -> list[Command]:
    lost = _lose_requests(m, error, attributable=attributable, again=True)
    delay: float | None
    if lost and attributable:
        # The requests are suspected first. Each such death leaves fewer of them, so the delay
        # does not grow.
        delay = m.restart_budget.delay_s
    else:
        delay = m.restart_budget.count_death(now, attributable=attributable, fruitless=not m.loaded)
    if delay is None:
        m.state = _given_up(m, error)
    else:
        m.restarts += 1
        m.state = Backoff(now + delay, error)
    return [*lost, ReleaseMemory()]


def _given_up(m: Lifecycle, error: ErrorInfo) -> Failed:
    reason = ModelFailed(
        f"{m.name} was given up after {m.restart_budget.crashes} crashes without progress; "
        f"the last one: {error.message}",
        last=error.message,
    )
    return Failed(reason.info())


def _request_blamed(m: Lifecycle, _e: Event, _now: float) -> list[Command]:
    assert isinstance(m.state, Backoff)
    if m.restart_budget.count_blame():
        m.state = _given_up(m, m.state.error)
    return []


def _lose_requests(
    m: Lifecycle, error: ErrorInfo, *, attributable: bool = False, again: bool = False
) -> list[Command]:
    if not m.requests:
        return []
    rids, m.requests = sorted(m.requests), set()
    return [LoseRequests(rids, error, attributable, again)]


def _kill_faulty(m: Lifecycle, e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Spawning | Loading | Ready | Draining | Stopping)
    assert isinstance(e, Fault)
    error = WorkerDied(f"the worker of {m.name} was killed: {e.reason}", cause="broke_rules").info()
    deadline = now + m.timeouts.terminated_s
    if isinstance(m.state, Stopping):
        m.state = replace(m.state, escalation="killed", deadline=deadline)
    else:
        then: Literal["stopped", "restart"]
        then = "stopped" if isinstance(m.state, Draining) else "restart"
        m.state = Stopping(m.state.pid, "killed", deadline, then, error)
    return [Kill()] if m.state.pid is not None else []


def _check_silence(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Spawning | Loading | Ready | Draining)
    if m.state.deadline is None or now < m.state.deadline:
        return []
    phase = _phase(m)
    timeout_s = m.timeouts.of(phase)
    error = WorkerDied(
        f"the worker of {m.name} was ended: it gave no sign of life for {timeout_s:g} s ({phase})",
        phase=phase,
        patience_s=timeout_s,
        cause="hung",
    ).info()
    then: Literal["stopped", "restart"]
    then = "stopped" if isinstance(m.state, Draining) else "restart"
    deadline = now + m.timeouts.terminated_s
    m.state = Stopping(m.state.pid, "terminated", deadline, then, error)
    return [Terminate()] if m.state.pid is not None else []


def _phase(m: Lifecycle) -> WatchedPhase:
    match m.state:
        case Spawning():
            return "spawning"
        case Loading():
            return "loading"
        case _:
            return m.phase


def _escalate(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Stopping)
    if now < m.state.deadline:
        return []
    deadline = now + m.timeouts.terminated_s
    if m.state.pid is None:  # the spawn still runs: there is no process to signal yet
        m.state = replace(m.state, deadline=deadline)
        return []
    if m.state.escalation == "asked":
        m.state = replace(m.state, escalation="terminated", deadline=deadline)
        return [Terminate()]
    m.state = replace(m.state, escalation="killed", deadline=deadline)
    return [Kill()]


def _restart_when_due(m: Lifecycle, _e: Event, now: float) -> list[Command]:
    assert isinstance(m.state, Backoff)
    return _spawn(m, now) if now >= m.state.deadline else []


Transition = Callable[[Lifecycle, Event, float], list[Command]]

_NO_PROCESS: dict[type[Event], Transition] = {
    RequestAssigned: _return_request,
    RequestBlamed: _ignore,
    Fault: _ignore,
}
_PROCESS: dict[type[Event], Transition] = {
    RequestAssigned: _return_request,
    RequestBlamed: _ignore,
    Fault: _kill_faulty,
    Exited: _exited,
}
_LOADED: dict[type[Event], Transition] = {
    **_PROCESS,
    Halt: _halt,
    SignOfLife: _sign_of_life,
    PhaseEntered: _phase_entered,
    TokenGenerated: _token_generated,
    RequestFinished: _request_finished,
    AlarmFired: _check_silence,
}
TRANSITIONS: dict[type[State], dict[type[Event], Transition]] = {
    Stopped: {
        **_NO_PROCESS,
        Start: _start,
        Drain: _ignore,
        Halt: _ignore,
        AlarmFired: _ignore,
    },
    Spawning: {
        **_PROCESS,
        Start: _ignore,
        Drain: _halt,
        Halt: _halt,
        Spawned: _spawned,
        SpawnFailed: _spawn_failed,
        Started: _started,
        AlarmFired: _check_silence,
    },
    Loading: {
        **_PROCESS,
        Start: _ignore,
        Drain: _halt,
        Halt: _halt,
        SignOfLife: _sign_of_life,
        Loaded: _loaded,
        LoadFailed: _load_failed,
        AlarmFired: _check_silence,
    },
    Ready: {**_LOADED, Start: _ignore, Drain: _drain, RequestAssigned: _assign},
    Draining: {**_LOADED, Drain: _ignore},
    Stopping: {
        **_PROCESS,
        Drain: _cancel_restart,
        Halt: _halt_stopping,
        Spawned: _kill_late_process,
        SpawnFailed: _spawn_failed,
        # The process still reports, which changes nothing any more.
        Started: _ignore,
        SignOfLife: _ignore,
        PhaseEntered: _ignore,
        Loaded: _ignore,
        LoadFailed: _ignore,
        TokenGenerated: _ignore,
        RequestFinished: _request_finished,
        AlarmFired: _escalate,
    },
    Backoff: {
        **_NO_PROCESS,
        Start: _ignore,
        Drain: _stop_at_once,
        Halt: _stop_at_once,
        RequestBlamed: _request_blamed,
        AlarmFired: _restart_when_due,
    },
    Failed: {
        **_NO_PROCESS,
        Start: _start,
        Drain: _stop_at_once,
        Halt: _stop_at_once,
        AlarmFired: _ignore,
    },
}
