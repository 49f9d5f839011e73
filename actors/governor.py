"""The governor's shell: what workers and users say to the machine, and what it says to whom.

The machine's invariants are checked after every event, here as in tests: a violation is an error
in the log and in the events, and it is counted; it never goes by unseen.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from actors import mail
from actors.machines import governor_events
from actors.machines.ledger import GrantDecision, MemoryRequest, WorkerExited
from actors.runtime.actor import Actor
from actors.runtime.history import EventHistory
from actors.runtime.timers import Alarm
from protocol import worker as wire

if TYPE_CHECKING:
    from collections.abc import Callable

    from actors.event_log import EventLog
    from actors.machines.governor import Governor
    from actors.mail import GovernorMail, WorkerMail
    from actors.runtime.actor import Ref

ROUTINE = frozenset({"reclaimed", "start_level", "first"})
"""Of interest to who looks for it, and too much for the log."""


@dataclass
class GovernorContext:
    """What outlives a restart of the governor, and whom it speaks to."""

    machine: Governor
    events: EventLog
    evict: Callable[[str, bool], None] = lambda _model, _requeue: None
    """Have the supervisor unload a model; it comes back when a request names it."""
    hold: Callable[[str, bool], None] = lambda _model, _held: None
    """Have the router keep new requests for a model, or send them again."""
    workers: dict[str, tuple[Ref[WorkerMail], int]] = field(default_factory=dict)
    """Who asked last for each model, and in which life of its process."""
    told: dict[str, int] = field(default_factory=dict)
    """The most that each of them can have, as it was told last."""
    violations: int = 0

    def __post_init__(self) -> None:
        self.history: EventHistory[governor_events.Event, governor_events.Command] = EventHistory(
            self.machine
        )

    @property
    def granted_bytes(self) -> int:
        """The sum of all grants."""
        return self.machine.ledger.granted_bytes

    @property
    def budget_bytes(self) -> int:
        """The budget as it is now."""
        return self.machine.ledger.budget_bytes


class GovernorActor(Actor["GovernorMail"]):
    """Grants memory before it is taken, and makes room where there is none."""

    def __init__(self, context: GovernorContext) -> None:
        context.machine.check()
        self._context = context
        self._alarm = Alarm(lambda: self.ref.tell(mail.AlarmFired(), beyond_limit=True))

    def on_start(self) -> None:
        """Go on with what the governor before was about."""
        self._alarm.set(self._context.machine.deadline)

    def on_stop(self) -> None:
        """Set no alarm that outlives this governor."""
        self._alarm.cancel()

    def receive(self, message: GovernorMail) -> tuple[int, int] | None:
        """Handle a message."""
        match message:
            case mail.GrantAsked():
                self._asked(message)
            case mail.MemoryFree(model=model):
                self._context.workers.pop(model, None)
                self._context.told.pop(model, None)
                self._do(WorkerExited(model))
            case mail.Governed(event=event):
                self._do(event)
            case mail.Measured(used=used, pressure=pressure):
                self._do(governor_events.MemoryMeasured(used, pressure))
            case mail.BudgetWanted(total_bytes=total):
                if total is not None:
                    self._do(governor_events.BudgetChanged(total))
                return self._context.budget_bytes, self._context.granted_bytes
            case mail.AlarmFired():
                self._do(governor_events.AlarmFired())
                self._reassure()
            case _:
                assert_never(message)
        return None

    def check(self) -> None:
        """Check the invariants."""
        self._context.machine.check()
        assert not self._context.violations, "the budget was exceeded before"

    def _asked(self, asked: mail.GrantAsked) -> None:
        self._context.workers[asked.model] = (asked.worker, asked.life)
        if asked.reclaimable is not None:
            self._do(governor_events.ReclaimableReported(asked.model, asked.reclaimable))
        self._do(MemoryRequest(asked.model, asked.seq, asked.total_bytes, asked.resuming))

    def _do(self, event: governor_events.Event) -> None:
        machine = self._context.machine
        now = asyncio.get_running_loop().time()
        for command in self._context.history.handle(event, now):
            self._perform(command)
        self._verify()
        self._tell_most()
        self._alarm.set(machine.deadline)

    def _tell_most(self) -> None:
        """Let workers know when there is more or less to be had: they refuse what never fits."""
        context = self._context
        for model, (worker, life) in context.workers.items():
            most = context.machine.most_of(model)
            if context.told.get(model, most) != most:
                context.told[model] = most
                held = context.machine.ledger.grants.get(model, 0)
                grant = wire.Grant(seq=0, total_bytes=held, granted=True, budget_bytes=most)
                worker.tell(mail.Granted(grant, life))

    def _perform(self, command: governor_events.Command) -> None:
        context = self._context
        match command:
            case GrantDecision():
                self._answer(command)
            case governor_events.Reclaim(model=model):
                order = wire.Reclaim(
                    seq=command.seq,
                    method=command.method,
                    wanted_bytes=command.wanted_bytes,
                    level=command.level,
                )
                self._command(model, order)
            case governor_events.StartLevel(model=model, level=level):
                self._command(model, wire.StartLevel(level=level))
            case governor_events.Evict(model=model, requeue=requeue):
                context.evict(model, requeue)
            case governor_events.HoldRequests(model=model, held=held):
                context.hold(model, held)
            case governor_events.RecordEvent(kind=kind):
                context.events.record(
                    kind,
                    command.model,
                    command.reason,
                    requester=command.requester,
                    level="debug" if kind in ROUTINE else "info",
                    numbers=command.numbers,
                )
            case _:
                assert_never(command)

    def _answer(self, answer: GrantDecision) -> None:
        if (known := self._context.workers.get(answer.model)) is None:
            return
        worker, life = known
        most = self._context.told[answer.model] = self._context.machine.most_of(answer.model)
        grant = wire.Grant(
            seq=answer.seq,
            total_bytes=answer.total_bytes,
            granted=answer.granted,
            available_bytes=answer.available_bytes,
            budget_bytes=most,
            reason=answer.reason,
        )
        worker.tell(mail.Granted(grant, life))

    def _command(self, model: str, command: wire.Reclaim | wire.StartLevel) -> None:
        if (known := self._context.workers.get(model)) is not None:
            worker, life = known
            worker.tell(mail.Commanded(command, life))

    def _reassure(self) -> None:
        """Say for loads that wait for their memory that their silence is ours."""
        machine = self._context.machine
        for request in machine.ledger.queue:
            known = self._context.workers.get(request.model)
            if known is not None and machine.accounts[request.model].state == "loading":
                worker, life = known
                worker.tell(mail.StillWaits(life))

    def _verify(self) -> None:
        """Check what must always hold; say so and go on where it does not."""
        try:
            self._context.machine.check()
        except AssertionError as error:
            context = self._context
            context.violations += 1
            numbers = {
                "granted_bytes": context.granted_bytes,
                "budget_bytes": context.budget_bytes,
                "violations": context.violations,
            }
            context.events.record("violation", None, str(error), level="error", numbers=numbers)
