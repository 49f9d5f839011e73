"""The actor of the governors: carries messages between workers, users and the state machine.

The machine's invariants are checked after every event, in production as in tests. A violation is
counted and recorded as an error in the log and in the events. The daemon continues.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from actors import mail
from actors.machines import governor_events, lifecycle_events
from actors.machines.ledger import GrantDecision, MemoryRequest, WorkerExited
from actors.runtime.actor import Actor
from actors.runtime.history import EventHistory
from actors.runtime.timers import Alarm
from protocol import worker as wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.event_log import EventLog
    from actors.machines.governors import Governors
    from actors.mail import GovernorMail, WorkerMail
    from actors.runtime.actor import Ref

ROUTINE = frozenset({"reclaimed", "start_level", "first"})
"""Events that are too frequent for the log at its default level."""


@dataclass
class GovernorActorState:
    """What survives a restart of the actor, and what it needs."""

    machine: Governors
    events: EventLog
    evict: Callable[[str, bool], None] = lambda _model, _requeue: None
    """Tell the registry to unload a model. The next request loads it again."""
    end: Callable[[str, lifecycle_events.MemoryExceeded], None] = lambda _model, _order: None
    """Tell the registry to end a model's process."""
    hold: Callable[[str, bool], None] = lambda _model, _held: None
    """Tell the router to hold new requests for a model, or to release them."""
    workers: dict[str, tuple[Ref[WorkerMail], int]] = field(default_factory=dict)
    """By model, the worker that last requested memory, and the number of its process."""
    limits: dict[str, int] = field(default_factory=dict)
    """By model, the most bytes that it can have, as last sent to its worker."""
    violations: int = 0

    def __post_init__(self) -> None:
        self.history = EventHistory(self.machine)


class GovernorActor(Actor["GovernorMail"]):
    """Answers memory requests, and carries out the governor's commands."""

    def __init__(self, state: GovernorActorState) -> None:
        state.machine.check()
        self._state = state
        self._alarm = Alarm(lambda: self.ref.tell(mail.AlarmFired(), beyond_limit=True))

    def on_start(self) -> None:
        self._alarm.set(self._state.machine.deadline)

    def on_stop(self) -> None:
        self._alarm.cancel()

    def receive(self, message: GovernorMail) -> tuple[int, int] | None:
        match message:
            case mail.RequestMemory():
                self._request(message)
            case mail.GovernorEvent(event=event):
                if isinstance(event, WorkerExited):
                    self._state.workers.pop(event.model, None)
                    self._state.limits.pop(event.model, None)
                self._apply(event)
            case mail.BudgetRequest(total_bytes=total):
                if total is not None:
                    self._apply(governor_events.BudgetChanged(total))
                machine = self._state.machine
                return machine.budget_bytes, machine.most_granted_bytes
            case mail.AlarmFired():
                self._apply(governor_events.AlarmFired())
                self._report_waiting_loads()
            case _:
                assert_never(message)
        return None

    def check(self) -> None:
        self._state.machine.check()
        assert not self._state.violations, "invariants were violated before"

    def _request(self, asked: mail.RequestMemory) -> None:
        self._state.workers[asked.model] = (asked.worker, asked.life)
        if asked.reclaimable is not None:
            self._apply(governor_events.ReclaimableReported(asked.model, asked.reclaimable))
        self._apply(MemoryRequest(asked.model, asked.seq, asked.total_bytes, asked.resuming))

    def _apply(self, event: governor_events.Event) -> None:
        for command in self._state.history.handle(event, asyncio.get_running_loop().time()):
            self._perform(command)
        self._check_invariants()
        self._send_limits()
        self._alarm.set(self._state.machine.deadline)

    def _send_limits(self) -> None:
        """Tell workers how much they can have at most, so that they refuse what never fits."""
        state = self._state
        for model in state.workers:
            limit = state.machine.limit_of(model)
            if state.limits.get(model, limit) != limit:
                state.limits[model] = limit
                held = state.machine.granted_to(model)
                grant = wire.Grant(seq=0, total_bytes=held, granted=True, limit_bytes=limit)
                self._send(model, grant)

    def _perform(self, command: governor_events.Command) -> None:
        state = self._state
        match command:
            case GrantDecision():
                self._send_decision(command)
            case governor_events.Reclaim(model=model):
                reclaim = wire.Reclaim(
                    seq=command.seq,
                    method=command.method,
                    wanted_bytes=command.wanted_bytes,
                    level=command.level,
                )
                self._send(model, reclaim)
            case governor_events.StartLevel(model=model, level=level):
                self._send(model, wire.StartLevel(level=level))
            case governor_events.Evict(model=model, requeue=requeue):
                state.evict(model, requeue)
            case governor_events.EndWorker():
                used, limit = command.used_bytes, command.limit_bytes
                state.end(command.model, lifecycle_events.MemoryExceeded(command.pid, used, limit))
            case governor_events.HoldRequests(model=model, held=held):
                state.hold(model, held)
            case governor_events.RecordEvent(kind=kind):
                state.events.record(
                    kind,
                    command.model,
                    command.reason,
                    requester=command.requester,
                    level="debug" if kind in ROUTINE else "info",
                    numbers=command.numbers,
                )
            case _:
                assert_never(command)

    def _send_decision(self, decision: GrantDecision) -> None:
        state, model = self._state, decision.model
        if model not in state.workers:
            return
        limit = state.limits[model] = state.machine.limit_of(model)
        grant = wire.Grant(
            seq=decision.seq,
            total_bytes=decision.total_bytes,
            granted=decision.granted,
            available_bytes=decision.available_bytes,
            limit_bytes=limit,
            budget_bytes=state.machine.budget_of(model),
            reason=decision.reason,
            host_bytes=decision.host_bytes,
        )
        self._send(model, grant)

    def _send(self, model: str, command: wire.Grant | wire.Reclaim | wire.StartLevel) -> None:
        if (known := self._state.workers.get(model)) is not None:
            worker, life = known
            worker.tell(mail.SendCommand(command, life))

    def _report_waiting_loads(self) -> None:
        """Tell workers that wait for a grant to load, so that their silence is not a hang."""
        for model in self._state.machine.waiting_loads():
            if (known := self._state.workers.get(model)) is not None:
                worker, life = known
                worker.tell(mail.GrantPending(life))

    def _check_invariants(self) -> None:
        state = self._state
        try:
            state.machine.check()
        except AssertionError as error:
            state.violations += 1
            numbers = {
                "granted_bytes": state.machine.granted_bytes,
                "budget_bytes": state.machine.budget_bytes,
                "violations": state.violations,
            }
            state.events.record("violation", None, str(error), level="error", numbers=numbers)
