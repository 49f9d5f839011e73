"""The actor that gives workers time slices: carries messages between workers and state machine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from actors import mail
from actors.machines import time_slices
from actors.runtime.actor import Actor
from actors.runtime.history import EventHistory
from actors.runtime.timers import Alarm
from protocol.worker import TimeSlice

if TYPE_CHECKING:
    from actors.mail import TimeSlicesMail, WorkerMail
    from actors.runtime.actor import Ref


@dataclass
class TimeSlicesState:
    """What survives a restart of the actor."""

    machine: time_slices.TimeSlices = field(default_factory=time_slices.TimeSlices)
    workers: dict[str, tuple[Ref[WorkerMail], int]] = field(default_factory=dict)
    """By model, the worker that last requested a time slice, and the number of its process."""

    def __post_init__(self) -> None:
        self.history = EventHistory(self.machine)


class TimeSlicesActor(Actor["TimeSlicesMail"]):
    """Lets the workers compute one after the other."""

    messages_per_pass = 64  # the accelerator may be idle until a message is handled

    def __init__(self, state: TimeSlicesState) -> None:
        state.machine.check()
        self._state = state
        self._alarm = Alarm(lambda: self.ref.tell(mail.AlarmFired(), beyond_limit=True))

    def on_start(self) -> None:
        self._alarm.set(self._state.machine.deadline)

    def on_stop(self) -> None:
        self._alarm.cancel()

    def receive(self, message: TimeSlicesMail) -> None:
        match message:
            case mail.RequestTimeSlice(model=model):
                self._state.workers[model] = (message.worker, message.life)
                self._apply(time_slices.TimeSliceRequested(model, message.weight, message.step_s))
            case mail.TimeSliceEnded(model=model, over=it):
                self._apply(
                    time_slices.TimeSliceEnded(
                        model, it.seq, it.used_s, it.more, it.step_s, it.left_s
                    )
                )
            case mail.TimeSlicesEvent(event=event):
                if isinstance(event, time_slices.WorkerExited):
                    self._state.workers.pop(event.model, None)
                self._apply(event)
            case mail.AlarmFired():
                self._apply(time_slices.AlarmFired())
            case _:
                assert_never(message)

    def check(self) -> None:
        self._state.machine.check()

    def _apply(self, event: time_slices.Event) -> None:
        state, now = self._state, asyncio.get_running_loop().time()
        for give in state.history.handle(event, now):
            worker, life = state.workers[give.model]
            worker.tell(mail.SendCommand(TimeSlice(seq=give.seq, slice_s=give.slice_s), life))
        self._alarm.set(state.machine.deadline)
