"""The actor of the prefix store: between workers, the store's state machine and the disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Protocol, assert_never

from actors import mail, telemetry
from actors.machines import prefix_store_events as ev
from actors.machines.prefix_store import PrefixStore
from actors.ports import Level, Notice
from actors.runtime.actor import Actor, DeferredReply, Ref
from actors.runtime.timers import Alarm
from protocol import worker as wire
from protocol.errors import InvalidRequest, KvdError
from protocol.segments import PrefixSpace, PrefixStoreStatus
from protocol.types import Problem

if TYPE_CHECKING:
    from actors.event_log import EventLog
    from actors.ports import Notify, Observe

INTERVAL_S = 5.0
"""Seconds between the records of uses on disk."""


class SegmentDisk(Protocol):
    """The files and the index of the prefix store."""

    def submit(self, command: ev.DiskCommand, done: Callable[[ev.DiskEvent], None]) -> None:
        """Run a command after all earlier ones; call `done` on the event loop with its answer.

        Never blocks and never raises. Errors are answered with `DiskFailed`.
        """


class NoDisk:
    """A disk for a system without a prefix store."""

    def submit(self, _: ev.DiskCommand, done: Callable[[ev.DiskEvent], None]) -> None:
        failed = ev.DiskFailed("this daemon has no folder for prefixes")
        asyncio.get_running_loop().call_soon(done, failed)


@dataclass
class PrefixStoreState:
    """What survives a restart of the actor, and what it needs."""

    notify: Notify
    events: EventLog
    observe: Observe
    disk: SegmentDisk = field(default_factory=NoDisk)
    folder: str = ""
    """The folder of the segments, for workers."""
    encrypted: bool = False
    clock: Callable[[], float] = time.time
    machine: PrefixStore = field(default_factory=PrefixStore)
    workers: dict[int, Ref[mail.WorkerMail]] = field(default_factory=dict)
    """Workers by the number of their process."""
    drops: dict[int, DeferredReply[tuple[int, int]]] = field(default_factory=dict)
    """Replies to `mail.DropSegments` by ticket."""
    tickets: count[int] = field(default_factory=count)

    @property
    def is_configured(self) -> bool:
        return self.machine.limits.limit_bytes > 0

    def status(self) -> PrefixStoreStatus:
        machine = self.machine
        return PrefixStoreStatus(
            state=machine.state,
            encrypted=self.encrypted,
            fault=machine.fault,
            limit_bytes=machine.limits.limit_bytes,
            daily_bytes=machine.limits.daily_bytes,
            keep_free_bytes=machine.limits.keep_free_bytes,
            segments=len(machine.index),
            stored_bytes=machine.stored_bytes,
            written_today_bytes=machine.writes.today(self.clock()),
            written_bytes=sum(machine.writes.days.values()),
            evicted_segments=machine.evicted,
        )

    def spaces(self) -> list[PrefixSpace]:
        models = self.machine.readers.models
        found = [
            PrefixSpace(
                models=sorted(models.get(name, ())),
                segments=len(space.segments),
                tokens=space.tokens,
                nbytes=space.nbytes,
                hits=space.hits,
                saved_s=space.saved_s,
                used=space.used,
            )
            for name, space in self.machine.index.spaces.items()
        ]
        return sorted(found, key=lambda space: (space.models, -space.nbytes))

    def stored_for(self, model: str) -> PrefixSpace | None:
        """Return the largest space of a model, which may have been loaded with several settings."""
        found = [space for space in self.spaces() if model in space.models]
        return max(found, key=lambda space: space.nbytes, default=None)

    def problems(self) -> list[Problem]:
        if self.machine.fault is None:
            return []
        return [
            Problem(
                "prefix_store.limit",
                f"the prefix store is off: {self.machine.fault}",
                f"check the disk and the folder {self.folder}; kvd tries again every minute",
            )
        ]


class PrefixStoreActor(Actor["mail.PrefixStoreMail"]):
    """Lets workers write segments, and deletes segments."""

    def __init__(self, state: PrefixStoreState) -> None:
        self._state = state
        self._alarm = Alarm(lambda: self.ref.tell(mail.AlarmFired(), beyond_limit=True))

    def on_start(self) -> None:
        self._set_alarm()

    def on_restart(self, error: BaseException) -> None:
        """Continue without the index, which may be inconsistent; it is read again."""
        state, reason = self._state, f"{type(error).__name__}: {error}"
        for command in state.machine.refuse_waiting():
            self._execute(command)
        state.machine = state.machine.restarted(reason)
        for reply in state.drops.values():
            reply.fail(_drop_failed(reason))
        state.drops.clear()

    def on_stop(self) -> None:
        self._alarm.cancel()
        if self._state.machine.state == "on":
            self._submit(self._state.machine.synchronize())

    def check(self) -> None:
        self._state.machine.check()

    def receive(self, message: mail.PrefixStoreMail) -> object:
        match message:
            case mail.SegmentsReported():
                self._on_report(message)
            case mail.PrefixStoreEvent(event=event):
                self._apply(event)
                if isinstance(event, ev.WorkerExited):
                    self._state.workers.pop(event.life, None)
            case mail.DropSegments(model=model, unused_s=unused_s):
                return self._drop(model, unused_s)
            case mail.AlarmFired():
                self._apply(ev.AlarmFired())
            case _:
                assert_never(message)
        return None

    def _on_report(self, message: mail.SegmentsReported) -> None:
        state, model, report = self._state, message.model, message.report
        state.workers[message.life] = message.worker
        match report:
            case wire.SegmentWritten(segment=segment):
                state.observe(telemetry.SegmentWritten(model, segment.nbytes))
            case wire.SegmentUsed(tokens=tokens, seconds=seconds, prefill_s=prefill_s):
                saved_s = prefill_s - seconds
                state.observe(telemetry.SegmentUsed(model, tokens, saved_s, report.nbytes))
            case wire.SegmentDamaged(key=key, reason=reason):
                if key in state.machine.index:  # else it was deleted while it was read
                    text = f"{key.hex()} is deleted: {reason}"
                    state.events.record("segment_damaged", model, text, level="warning")
            case wire.SegmentAbandoned(key=key, reason=reason):
                fields = {"model": model, "key": key.hex(), "reason": reason}
                state.notify(Notice("segment_abandoned", "warning", fields))
            case wire.SegmentsOpened() | wire.SegmentOffered():
                pass
            case _:
                assert_never(report)
        self._apply(ev.Reported(model, message.life, report, message.draining))

    def _drop(self, model: str | None, unused_s: float | None) -> DeferredReply[tuple[int, int]]:
        state, ticket = self._state, next(self._state.tickets)
        if model is not None and not state.machine.readers.knows(model):
            raise InvalidRequest(
                f"the prefix store has nothing of {model!r}; `kvctl cache` lists its models",
                field="model",
            )
        reply = state.drops[ticket] = DeferredReply()
        self._apply(ev.DropRequested(ticket, model, unused_s))
        return reply

    def _apply(self, event: ev.Event) -> None:
        for command in self._state.machine.handle(event, self._state.clock()):
            self._execute(command)
        self._set_alarm()

    def _execute(self, command: ev.Command) -> None:
        state = self._state
        match command:
            case ev.SendToWorker(life=life, command=wire_command):
                if life in state.workers:
                    state.workers[life].tell(mail.SendCommand(wire_command, life))
            case ev.Continue(life=life):
                continued = mail.PrefixStoreEvent(ev.Continued(life))
                self.ref.tell(continued, beyond_limit=True)
            case ev.Refused(model=model, reason=reason):
                state.observe(telemetry.SegmentRefused(model, reason))
            case ev.Announce(kind=kind, reason=reason):
                level: Level = "info" if kind == "prefix_store_on" else "warning"
                state.events.record(kind, None, reason, level=level)
            case ev.Dropped():
                reply = state.drops.pop(command.ticket)
                if command.failed:
                    reply.fail(_drop_failed(state.machine.fault or "it is not configured"))
                else:
                    reply.answer((command.segments, command.nbytes))
            case _:
                self._submit(command)

    def _submit(self, command: ev.DiskCommand) -> None:
        ref = self.ref
        self._state.disk.submit(
            command, lambda event: ref.tell(mail.PrefixStoreEvent(event), beyond_limit=True)
        )

    def _set_alarm(self) -> None:
        if self._state.is_configured:
            self._alarm.set(asyncio.get_running_loop().time() + INTERVAL_S)


def _drop_failed(reason: str) -> KvdError:
    return InvalidRequest(
        f"the prefix store is off, so nothing was deleted: {reason}", field="cache"
    )
