"""The actor that measures how much memory workers really use, and reports it to the governor.

Grants say what a worker may hold; measurements catch what exceeds them. A worker measures its own
footprint and its allocator's bytes and sends them with its counters. Only if a worker has reported
nothing for a while, because it loads or hangs, this actor reads the footprint of its process. Then
the kernel walks all page tables of the process, so reading happens outside the event loop, and
rarely if it takes long. All ranks of a gang are read every few seconds, because none of them can
measure the others; its footprint is their sum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from actors import mail
from actors.machines.governor_events import MemoryMeasured
from actors.runtime.actor import Actor
from actors.runtime.timers import Alarm
from protocol.memory_bounds import limit_bytes

if TYPE_CHECKING:
    from actors.mail import GovernorMail, ReadingsMail
    from actors.ports import MemoryReader
    from actors.runtime.actor import Ref
    from actors.status import StatusTable
    from protocol.types import MemoryUse, ModelStatus, WorkerStats

INTERVAL_S = 1.0
CALM_S = 5.0
"""The interval while all models are ready and have no requests."""
FRESH_S = 6.0
"""Seconds for which a worker's own measurement counts. An idle worker sends counters every 5 s."""
MAX_SHARE = 0.02
"""Part of the time that reading processes may take: 25 ms per GiB of small pages were measured."""
MIN_CHANGE_BYTES = 1024 * 1024


def used_bytes(memory: MemoryUse, footprint: int, *, separate: bool) -> int:
    """Return the bytes of the budget that a process uses; 0 if nothing is known yet.

    ``separate``: the accelerator has its own memory, which the budget is for. Otherwise the
    footprint includes the part of the allocator's memory that was touched.
    """
    device = memory.active + memory.cache
    return device if separate else max(footprint, device)


@dataclass
class ReadingsState:
    """What survives a restart of the actor, and what it needs."""

    memory: MemoryReader
    status: StatusTable
    governor: Ref[GovernorMail]
    seen: dict[str, tuple[WorkerStats, float]] = field(default_factory=dict)
    """The last counters of each model, and when they were first seen."""
    gangs_read_at: float = -float("inf")
    """When the processes of gangs were read last."""
    due: float = 0.0
    """Earliest time of the next read."""
    reported: MemoryMeasured | None = None
    above_limit: bool = False
    """Whether a worker was above its limit in the last report."""
    judged: dict[str, WorkerStats] = field(default_factory=dict)
    """With separate memory, the counters of each model that were reported last as fresh."""


class ReadingsActor(Actor["ReadingsMail"]):
    """Checks the workers' memory every `INTERVAL_S` or `CALM_S`."""

    def __init__(self, state: ReadingsState) -> None:
        self._state = state
        self._alarm = Alarm(lambda: self.ref.tell(mail.AlarmFired(), beyond_limit=True))

    def on_start(self) -> None:
        self._alarm.set(asyncio.get_running_loop().time() + INTERVAL_S)

    def on_stop(self) -> None:
        self._alarm.cancel()

    def receive(self, message: ReadingsMail) -> None:
        match message:
            case mail.AlarmFired():
                self._check_workers()
            case mail.FootprintsRead(footprints=footprints, took_s=took_s):
                now = asyncio.get_running_loop().time()
                self._state.status.footprints = footprints
                self._state.due = now + max(INTERVAL_S, took_s / MAX_SHARE)
                self._report(footprints.keys())
            case _:
                assert_never(message)

    def _check_workers(self) -> None:
        """Read the processes of silent workers if that is due; otherwise report at once."""
        state, now = self._state, asyncio.get_running_loop().time()
        models = [it for it in state.status.models.values() if it.worker_pid is not None]
        state.seen = {it.name: state.seen[it.name] for it in models if it.name in state.seen}
        for model in models:
            known = state.seen.get(model.name)
            if known is None or known[0] is not model.stats:
                state.seen[model.name] = (model.stats, now)
        silent = [it for it in models if self._is_silent(it, now)]
        gangs = [it for it in models if it.ranks]
        if now >= state.due and (silent or (gangs and now - state.gangs_read_at > FRESH_S)):
            state.gangs_read_at = now
            self._read(sorted({pid for it in silent + gangs for pid in _pids(it)}), now)
        else:
            self._report()

    def _is_silent(self, model: ModelStatus, now: float) -> bool:
        """Return whether to read the process: its own value is missing, old, or above the limit.

        A value above the limit may be older than a grant that has just shrunk.
        """
        _, seen_at = self._state.seen.get(model.name, (None, now))
        footprint = model.stats.memory.footprint
        above = footprint > _limit(model)
        return not footprint or above or now - seen_at > FRESH_S

    def _read(self, pids: list[int], now: float) -> None:
        ref, clock = self.ref, asyncio.get_running_loop().time
        self.pipe(
            self._state.memory.footprints(pids),
            lambda found: ref.tell(mail.FootprintsRead(found, clock() - now), beyond_limit=True),
            lambda _: ref.tell(mail.FootprintsRead({}, clock() - now), beyond_limit=True),
        )

    def _report(self, read: Collection[int] = ()) -> None:
        """Report to the governor. ``read``: ids of the processes that were read just now."""
        state, now = self._state, asyncio.get_running_loop().time()
        used, host, fresh, calm = {}, {}, {}, True
        for model in state.status.models.values():
            if model.worker_pid is None:
                continue
            calm = calm and model.state == "ready" and not state.status.requests.get(model.name)
            memory = model.stats.memory
            footprint = memory.footprint
            if model.ranks or self._is_silent(model, now):
                known = state.status.footprints
                found = [known[pid] for pid in _pids(model) if pid in known]
                footprint = sum(found) if found else footprint
            used[model.name] = used_bytes(memory, footprint, separate=state.memory.separate)
            if state.memory.separate:
                host[model.name] = footprint
            is_new = state.judged.get(model.name) is not model.stats
            if is_new if state.memory.separate else model.worker_pid in read:
                fresh[model.name] = model.worker_pid
                state.judged[model.name] = model.stats
        measured = MemoryMeasured(used, state.memory.host().pressure, fresh, host)
        above_before, state.above_limit = (
            state.above_limit,
            any(used[name] > _limit(state.status.models[name]) for name in used),
        )
        if state.above_limit or above_before or _differs(measured, state.reported):
            state.reported = measured
            state.governor.tell(mail.GovernorEvent(measured))
        self._alarm.set(now + (CALM_S if calm else INTERVAL_S))


def _pids(model: ModelStatus) -> list[int]:
    return [it.pid for it in model.ranks] or ([model.worker_pid] if model.worker_pid else [])


def _limit(model: ModelStatus) -> int:
    return limit_bytes(model.granted_bytes, max(1, len(model.ranks)))


def _differs(new: MemoryMeasured, old: MemoryMeasured | None) -> bool:
    return (
        old is None
        or new.pressure != old.pressure
        or new.used.keys() != old.used.keys()
        or any(abs(new.used[name] - old.used[name]) >= MIN_CHANGE_BYTES for name in new.used)
        or any(abs(new.host[name] - old.host[name]) >= MIN_CHANGE_BYTES for name in new.host)
    )
