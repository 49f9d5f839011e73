"""The actor that gives workers time slices: carries messages between workers and state machines.

Each device has a state machine, because workers on different devices do not wait for each other. A
model over several devices takes part in the time slices of its first one.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from actors import mail
from actors.machines import time_slices
from actors.machines.time_slices import TimeSlices
from actors.runtime.actor import Actor
from actors.runtime.history import EventHistory
from actors.runtime.timers import Alarm
from protocol.worker import TimeSlice

if TYPE_CHECKING:
    from actors.mail import TimeSlicesMail, WorkerMail
    from actors.runtime.actor import Ref

ModelEvent = (
    time_slices.TimeSliceRequested
    | time_slices.TimeSliceEnded
    | time_slices.WeightChanged
    | time_slices.WorkerExited
)


@dataclass
class TimeSlicesState:
    """What survives a restart of the actor."""

    count: int = 1
    """Number of devices."""
    devices: dict[str, int] = field(default_factory=dict)
    """By model, the device on which it last requested a time slice."""
    workers: dict[str, tuple[Ref[WorkerMail], int]] = field(default_factory=dict)
    """By model, the worker that last requested a time slice, and the number of its process."""

    def __post_init__(self) -> None:
        self.machines = [TimeSlices() for _ in range(self.count)]
        self.histories = [EventHistory(it) for it in self.machines]

    @property
    def deadline(self) -> float | None:
        return min((it.deadline for it in self.machines if it.deadline is not None), default=None)


class TimeSlicesActor(Actor["TimeSlicesMail"]):
    """Lets the workers compute one after the other."""

    messages_per_pass = 64  # the accelerator may be idle until a message is handled

    def __init__(self, state: TimeSlicesState) -> None:
        self._state = state
        self.check()
        self._alarm = Alarm(lambda: self.ref.tell(mail.AlarmFired(), beyond_limit=True))

    def on_start(self) -> None:
        self._alarm.set(self._state.deadline)

    def on_stop(self) -> None:
        self._alarm.cancel()

    def receive(self, message: TimeSlicesMail) -> None:
        match message:
            case mail.RequestTimeSlice(model=model):
                self._state.workers[model] = (message.worker, message.life)
                self._state.devices[model] = message.device
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
                for device in range(len(self._state.machines)):
                    self._handle(device, time_slices.AlarmFired())
            case _:
                assert_never(message)

    def check(self) -> None:
        for machine in self._state.machines:
            machine.check()

    def _apply(self, event: ModelEvent) -> None:
        self._handle(self._state.devices.get(event.model, 0), event)

    def _handle(self, device: int, event: time_slices.Event) -> None:
        state, now = self._state, asyncio.get_running_loop().time()
        for give in state.histories[device].handle(event, now):
            worker, life = state.workers[give.model]
            worker.tell(mail.SendCommand(TimeSlice(seq=give.seq, slice_s=give.slice_s), life))
        self._alarm.set(state.deadline)
