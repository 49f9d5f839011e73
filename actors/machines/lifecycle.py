"""The lifecycle of one model's worker process. Pure: every change of its state is in this file.

`actors.worker` carries out the commands. Memory counts as free only after an observed exit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from actors.machines import lifecycle_events as ev
from actors.machines.machine import InvalidTransition
from actors.machines.process_exit import describe, exit_cause, is_self_inflicted, lacks_memory
from actors.machines.restart import RestartBudget
from actors.machines.watchdog import WatchdogTimeouts, WatchedPhase
from protocol.errors import Draining as DrainingError
from protocol.errors import ErrorInfo, InvalidModel, ModelFailed, WorkerDied
from protocol.worker import OVER_MEMORY_LIMIT, Phase

Commands = list[ev.Command]


class Lifecycle(msgspec.Struct):
    """State machine of one worker."""

    name: str
    timeouts: WatchdogTimeouts = WatchdogTimeouts()
    restart_budget: RestartBudget = msgspec.field(default_factory=RestartBudget)
    state: ev.State = ev.Stopped()
    requests: set[str] = msgspec.field(default_factory=set)
    restarts: int = 0
    loaded: bool = False
    """The current or last process loaded the model."""
    loaded_once: bool = False
    """Some process loaded the model since the last `Start`."""
    phase: Phase = "idle"
    """Phase that the process reported, once the model is loaded."""

    def handle(self, event: ev.Event, now: float) -> Commands:
        """Apply an event and return the commands; `InvalidTransition` changes nothing."""
        transition = TRANSITIONS[type(self.state)].get(type(event))
        if transition is None:
            raise InvalidTransition(self.state, event)
        return transition(self, self.state, event, now)

    @property
    def deadline(self) -> float | None:
        return getattr(self.state, "deadline", None)

    @property
    def pid(self) -> int | None:
        return getattr(self.state, "pid", None)

    @property
    def error(self) -> ErrorInfo | None:
        """Why the worker does not run; None if that was ordered."""
        return getattr(self.state, "error", None)

    def check(self) -> None:
        self.restart_budget.check()
        match self.state:
            case ev.Ready():
                pass
            case ev.Draining():
                assert self.requests, "drains without requests"
            case ev.Stopping(then=then, error=error):
                assert (then == "stopped") or error is not None, "stops without an error"
            case _:
                assert not self.requests, "requests in a process that cannot have any"


# -- transitions: (machine, its state, event, now) -> commands ------------------------------------


def _ignore(*_: object) -> Commands:
    return []


def _start(m: Lifecycle, _state: object, _e: ev.Start, now: float) -> Commands:
    m.restart_budget.reset()
    m.loaded_once = False
    return _spawn(m, now)


def _spawn(m: Lifecycle, now: float) -> Commands:
    m.loaded = False
    m.state = ev.Spawning(now + m.timeouts.spawning_s)
    return [ev.Spawn()]


def _spawned(m: Lifecycle, state: ev.Spawning, e: ev.Spawned, _now: float) -> Commands:
    m.state = replace(state, pid=e.pid)
    return []


def _kill_late(m: Lifecycle, state: ev.Stopping, e: ev.Spawned, _now: float) -> Commands:
    m.state = replace(state, pid=e.pid, escalation="killed")
    return [ev.Kill()]


def _spawn_failed(
    m: Lifecycle, state: ev.Spawning | ev.Stopping, e: ev.SpawnFailed, now: float
) -> Commands:
    if isinstance(state, ev.Stopping) and state.then == "stopped":
        m.state = ev.Stopped()
        return [ev.ReleaseMemory()]
    message = f"the process of {m.name} could not be started: {e.reason}"
    error = WorkerDied(message, cause="not_started").info()
    return _restart_or_give_up(m, error, now, attributable=True)


def _started(m: Lifecycle, state: ev.Spawning, e: ev.Started, now: float) -> Commands:
    if state.pid is None:
        raise InvalidTransition(state, e)
    m.state = ev.Loading(state.pid, now + m.timeouts.loading_s)
    return [ev.SendLoad()]


def _loaded(m: Lifecycle, state: ev.Loading, _e: ev.Loaded, now: float) -> Commands:
    m.loaded = m.loaded_once = True
    m.phase = "idle"
    m.state = ev.Ready(state.pid, now + m.timeouts.of(m.phase))
    return []


def _load_failed(m: Lifecycle, state: ev.Loading, e: ev.LoadFailed, now: float) -> Commands:
    # A model that was loaded before fits: other models hold its memory only for now.
    then: Literal["restart", "failed"]
    then = "restart" if m.loaded_once and lacks_memory(e.error) else "failed"
    m.state = ev.Stopping(state.pid, "asked", now + m.timeouts.asked_s, then, e.error)
    return []


def _assign(m: Lifecycle, _: ev.Ready, e: ev.RequestAssigned, _now: float) -> Commands:
    m.requests.add(e.rid)
    return [ev.SendRequest(e.rid)]


def _return_request(_m: Lifecycle, _: object, e: ev.RequestAssigned, _now: float) -> Commands:
    return [ev.ReturnRequest(e.rid)]


def _sign_of_life(m: Lifecycle, state: ev.Running, _e: ev.Event, now: float) -> Commands:
    m.state = replace(state, deadline=now + m.timeouts.of(_phase(m)))
    return []


def _phase_entered(m: Lifecycle, state: ev.Running, e: ev.PhaseEntered, now: float) -> Commands:
    m.phase = e.phase
    return _sign_of_life(m, state, e, now)


def _token_generated(m: Lifecycle, state: ev.Running, e: ev.TokenGenerated, now: float) -> Commands:
    m.restart_budget.reset()
    return _sign_of_life(m, state, e, now)


def _request_finished(
    m: Lifecycle, state: ev.Ready | ev.Draining | ev.Stopping, e: ev.RequestFinished, now: float
) -> Commands:
    m.requests.discard(e.rid)
    match state:
        case ev.Draining() if not m.requests:
            return _ask_to_exit(m, state.pid, now, state.write_s)
        case ev.Stopping():
            return []
        case _:
            return _sign_of_life(m, state, e, now)


def _drain(m: Lifecycle, state: ev.Ready, e: ev.Drain, now: float) -> Commands:
    if not m.requests:
        return _ask_to_exit(m, state.pid, now, e.write_s)
    m.state = ev.Draining(state.pid, state.deadline, e.write_s)
    return []


def _ask_to_exit(m: Lifecycle, pid: int, now: float, write_s: float) -> Commands:
    m.state = ev.Stopping(pid, "asked", now + m.timeouts.asked_s, "stopped")
    # Half of the time remains for the exit itself.
    return [ev.SendStop(min(write_s, m.timeouts.asked_s / 2))]


def _halt(m: Lifecycle, state: ev.Running, e: ev.Drain | ev.Halt, now: float) -> Commands:
    deadline = now + m.timeouts.halted_s
    m.state = ev.Stopping(state.pid, "asked", deadline, "stopped", reason=_reason(e))
    return [ev.SendStop()] if state.pid is not None else []


def _reason(e: ev.Drain | ev.Halt) -> str:
    return e.reason if isinstance(e, ev.Halt) else ""


def _cancel_restart(
    m: Lifecycle, state: ev.Stopping, e: ev.Drain | ev.Halt, _now: float
) -> Commands:
    m.state = replace(state, then="stopped", error=None, reason=_reason(e) or state.reason)
    return []


def _halt_stopping(m: Lifecycle, state: ev.Stopping, e: ev.Halt, now: float) -> Commands:
    sooner = min(state.deadline, now + m.timeouts.halted_s)
    _cancel_restart(m, replace(state, deadline=sooner), e, now)
    writes = state.escalation == "asked" and state.pid is not None
    return [ev.SendStop()] if writes else []  # ends the writes of prefixes


def _stop_at_once(m: Lifecycle, *_: object) -> Commands:
    m.state = ev.Stopped()
    return []


def _exited(m: Lifecycle, state: ev.Running | ev.Stopping, e: ev.Exited, now: float) -> Commands:
    killer = " by the kernel, because memory ran out" if e.out_of_memory else ""
    part = "" if e.rank is None else f"rank {e.rank} of "
    died = WorkerDied(
        f"{part}the worker of {m.name} {describe(e.returncode)}{killer}",
        exit=e.returncode,
        cause=exit_cause(e.returncode, out_of_memory=e.out_of_memory),
    )
    match state:
        case ev.Stopping(then="stopped", reason=reason):
            m.state = ev.Stopped()
            lost = DrainingError(reason or f"{m.name} was stopped to be unloaded").info()
            return [*_lose_requests(m, lost), ev.ReleaseMemory()]
        case ev.Stopping(then="failed", error=ErrorInfo() as error):
            m.state = ev.Failed(error, refused=True)
            return [ev.ReleaseMemory()]
        case ev.Stopping(then="restart", error=ErrorInfo() as error):
            m.loaded = False  # a hang counts like a failed load
            return _restart_or_give_up(m, error, now, attributable=not lacks_memory(error))
        case ev.Draining():
            m.state = ev.Stopped()
            lost = DrainingError(f"{m.name} was being unloaded, and {died.message}").info()
            return [*_lose_requests(m, lost), ev.ReleaseMemory()]
        case ev.Spawning() | ev.Loading() if e.returncode == OVER_MEMORY_LIMIT:
            error = _too_large(
                m, "its worker ended itself at its memory limit (see the log)"
            ).info()
            m.state = ev.Failed(error, refused=True)
            return [ev.ReleaseMemory()]
        case _:
            # The next process may run out of memory again, so such a death counts.
            attributable = e.out_of_memory or is_self_inflicted(e.returncode)
            return _restart_or_give_up(m, died.info(), now, attributable=attributable)


def _restart_or_give_up(
    m: Lifecycle, error: ErrorInfo, now: float, *, attributable: bool
) -> Commands:
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
        m.state = ev.Backoff(now + delay, error)
    return [*lost, ev.ReleaseMemory()]


def _given_up(m: Lifecycle, error: ErrorInfo) -> ev.Failed:
    reason = ModelFailed(
        f"{m.name} was given up after {m.restart_budget.crashes} crashes without progress; "
        f"the last one: {error.message}",
        last=error.message,
    )
    return ev.Failed(reason.info())


def _blamed(m: Lifecycle, state: ev.Backoff, _e: ev.RequestBlamed, _now: float) -> Commands:
    if m.restart_budget.count_blame():
        m.state = _given_up(m, state.error)
    return []


def _lose_requests(
    m: Lifecycle, error: ErrorInfo, *, attributable: bool = False, again: bool = False
) -> Commands:
    if not m.requests:
        return []
    rids, m.requests = sorted(m.requests), set()
    return [ev.LoseRequests(rids, error, attributable, again)]


def _fault(m: Lifecycle, state: ev.Running | ev.Stopping, e: ev.Fault, now: float) -> Commands:
    if not isinstance(state, ev.Stopping):
        message = f"the worker of {m.name} was killed: {e.reason}"
        state = _terminating(m, state, WorkerDied(message, cause="broke_rules"), now)
    m.state = replace(state, escalation="killed", deadline=now + m.timeouts.terminated_s)
    return [ev.Kill()] if state.pid is not None else []


def _memory_exceeded(m: Lifecycle, state: ev.Running, e: ev.MemoryExceeded, now: float) -> Commands:
    if e.pid != state.pid:  # the measured process has ended, and this is the next one
        return []
    used = f"it held {e.used_bytes / 2**20:.0f} MiB, above its limit of {e.limit_bytes / 2**20:.0f}"
    if isinstance(state, ev.Spawning | ev.Loading):
        error = _too_large(m, f"its worker was ended when {used} MiB")
        stopping = ev.Stopping(state.pid, "killed", now, "failed", error.info())
    else:
        message = f"the worker of {m.name} was ended when {used} MiB"
        stopping = _terminating(m, state, WorkerDied(message, cause="memory_limit"), now)
    deadline = now + m.timeouts.terminated_s
    m.state = replace(stopping, escalation="killed", deadline=deadline)
    return [ev.Kill()]


def _too_large(m: Lifecycle, how: str) -> InvalidModel:
    return InvalidModel(
        f"loading {m.name} takes more memory than its files need: {how}; check its config.json and"
        " its tokenizer's files"
    )


def _check_silence(m: Lifecycle, state: ev.Running, _e: ev.AlarmFired, now: float) -> Commands:
    if now < state.deadline:
        return []
    phase = _phase(m)
    timeout_s = m.timeouts.of(phase)
    error = WorkerDied(
        f"the worker of {m.name} was ended: it gave no sign of life for {timeout_s:g} s ({phase})",
        phase=phase,
        patience_s=timeout_s,
        cause="hung",
    )
    m.state = _terminating(m, state, error, now)
    return [ev.Terminate()] if state.pid is not None else []


def _terminating(m: Lifecycle, state: ev.Running, error: WorkerDied, now: float) -> ev.Stopping:
    then: Literal["stopped", "restart"]
    then = "stopped" if isinstance(state, ev.Draining) else "restart"
    deadline = now + m.timeouts.terminated_s
    return ev.Stopping(state.pid, "terminated", deadline, then, error.info())


def _phase(m: Lifecycle) -> WatchedPhase:
    match m.state:
        case ev.Spawning():
            return "spawning"
        case ev.Loading():
            return "loading"
        case _:
            return m.phase


def _escalate(m: Lifecycle, state: ev.Stopping, _e: ev.AlarmFired, now: float) -> Commands:
    if now < state.deadline:
        return []
    deadline = now + m.timeouts.terminated_s
    if state.pid is None:  # the spawn still runs: there is no process to signal yet
        m.state = replace(state, deadline=deadline)
        return []
    if state.escalation == "asked":
        m.state = replace(state, escalation="terminated", deadline=deadline)
        return [ev.Terminate()]
    m.state = replace(state, escalation="killed", deadline=deadline)
    return [ev.Kill()]


def _restart_when_due(m: Lifecycle, state: ev.Backoff, _e: ev.AlarmFired, now: float) -> Commands:
    return _spawn(m, now) if now >= state.deadline else []


Transition = Callable[[Lifecycle, Any, Any, float], Commands]

_NO_PROCESS: dict[type[ev.Event], Transition] = {
    ev.RequestAssigned: _return_request,
    ev.RequestBlamed: _ignore,
    ev.Fault: _ignore,
    ev.MemoryExceeded: _ignore,
    ev.AlarmFired: _ignore,
}
_PROCESS: dict[type[ev.Event], Transition] = {
    ev.Halt: _halt,
    ev.RequestAssigned: _return_request,
    ev.RequestBlamed: _ignore,
    ev.Fault: _fault,
    ev.MemoryExceeded: _memory_exceeded,
    ev.Exited: _exited,
    ev.AlarmFired: _check_silence,
}
_LOADED: dict[type[ev.Event], Transition] = {
    **_PROCESS,
    ev.SignOfLife: _sign_of_life,
    ev.PhaseEntered: _phase_entered,
    ev.TokenGenerated: _token_generated,
    ev.RequestFinished: _request_finished,
}
TRANSITIONS: dict[type[ev.State], dict[type[ev.Event], Transition]] = {
    ev.Stopped: {**_NO_PROCESS, ev.Start: _start, ev.Drain: _ignore, ev.Halt: _ignore},
    ev.Spawning: {
        **_PROCESS,
        ev.Start: _ignore,
        ev.Drain: _halt,
        ev.Spawned: _spawned,
        ev.SpawnFailed: _spawn_failed,
        ev.Started: _started,
    },
    ev.Loading: {
        **_PROCESS,
        ev.Start: _ignore,
        ev.Drain: _halt,
        ev.SignOfLife: _sign_of_life,
        ev.Loaded: _loaded,
        ev.LoadFailed: _load_failed,
    },
    ev.Ready: {**_LOADED, ev.Start: _ignore, ev.Drain: _drain, ev.RequestAssigned: _assign},
    ev.Draining: {**_LOADED, ev.Drain: _ignore},
    ev.Stopping: {
        **_PROCESS,
        ev.Drain: _cancel_restart,
        ev.Halt: _halt_stopping,
        ev.Spawned: _kill_late,
        ev.SpawnFailed: _spawn_failed,
        ev.MemoryExceeded: _ignore,
        # The process still reports, which changes nothing any more.
        ev.Started: _ignore,
        ev.SignOfLife: _ignore,
        ev.PhaseEntered: _ignore,
        ev.Loaded: _ignore,
        ev.LoadFailed: _ignore,
        ev.TokenGenerated: _ignore,
        ev.RequestFinished: _request_finished,
        ev.AlarmFired: _escalate,
    },
    ev.Backoff: {
        **_NO_PROCESS,
        ev.Start: _ignore,
        ev.Drain: _stop_at_once,
        ev.Halt: _stop_at_once,
        ev.RequestBlamed: _blamed,
        ev.AlarmFired: _restart_when_due,
    },
    ev.Failed: {**_NO_PROCESS, ev.Start: _start, ev.Drain: _stop_at_once, ev.Halt: _stop_at_once},
}
