"""The shell of the turns: passes the workers' wishes to the machine and turns to the workers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from actors import mail
from actors.machines import time_slices as machine
from actors.runtime.actor import Actor
from actors.runtime.history import EventHistory
from actors.runtime.timers import Alarm
from protocol.worker import TimeSlice

if TYPE_CHECKING:
    from actors.mail import TimeSlicesMail, WorkerMail
    from actors.runtime.actor import Ref
    from protocol.worker import TimeSliceOver


@dataclass
class Ring:
    """What outlives a restart of the actor."""

    machine: machine.TimeSlices = field(default_factory=machine.TimeSlices)
    workers: dict[str, tuple[Ref[WorkerMail], int]] = field(default_factory=dict)
    """Who asked last for each model, and in which life of its process."""

    def __post_init__(self) -> None:
        self.journal: EventHistory[machine.Event, machine.Command] = EventHistory(self.machine)


class TimeSlices(Actor["TimeSlicesMail"]):
    """Lets the workers compute one after the other."""

    turn = 64  # each message is a moment in which the accelerator may wait

    def __init__(self, ring: Ring) -> None:
        ring.machine.check()
        self._ring = ring
        self._alarm = Alarm(lambda: self.ref.tell(mail.AlarmFired(), beyond_limit=True))

    def on_start(self) -> None:
        """Watch a turn that was given before a restart."""
        self._alarm.set(self._ring.machine.deadline)

    def on_stop(self) -> None:
        """Ring no more."""
        self._alarm.cancel()

    def receive(self, message: TimeSlicesMail) -> None:
        """Handle a message."""
        match message:
            case mail.TimeSliceAsked(model=model):
                self._ring.workers[model] = (message.worker, message.life)
                self._do(machine.Wanted(model, message.weight, message.step_s))
            case mail.TimeSliceEnded(model=model, over=over):
                self._do(_over(model, over))
            case mail.TimeSlicesWeighed(model=model, weight=weight):
                self._do(machine.Weighed(model, weight))
            case mail.TimeSlicesLost(model=model):
                self._ring.workers.pop(model, None)
                self._do(machine.Gone(model))
            case mail.AlarmFired():
                self._do(machine.Tick())
            case _:
                assert_never(message)

    def check(self) -> None:
        """Check the invariants."""
        self._ring.machine.check()

    def _do(self, event: machine.Event) -> None:
        now = asyncio.get_running_loop().time()
        for give in self._ring.journal.handle(event, now):
            worker, life = self._ring.workers[give.model]
            worker.tell(mail.TimeSliceGiven(TimeSlice(seq=give.seq, slice_s=give.slice_s), life))
        self._alarm.set(self._ring.machine.deadline)


def _over(model: str, over: TimeSliceOver) -> machine.Over:
    return machine.Over(model, over.seq, over.used_s, over.more, over.step_s, over.left_s)
