"""What the workers really take: read every second or so, and told to the governor when it moves.

Grants say what a worker may hold; this is the second line. A worker reads its own footprint and
its allocator's bytes and tells them with its counters. Only of one that has not told anything for a
while, because it loads or hangs, the process is read from here: for that the kernel walks all page
tables of the process, so it is done beside the event loop, and seldom where it takes long.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from actors import mail
from actors.runtime.actor import Actor
from actors.runtime.timers import Alarm

if TYPE_CHECKING:
    from actors.mail import GovernorMail, ReadingsMail
    from actors.ports import MemoryReader
    from actors.runtime.actor import Ref
    from actors.status import StatusTable
    from protocol.types import MemoryUse, ModelStatus, WorkerStats

INTERVAL_S = 1.0
CALM_S = 5.0
"""The same while nobody asks for anything and nothing loads."""
FRESH_S = 6.0
"""How long a worker's own word holds: an idle one tells its counters every five seconds."""
MOST_SHARE = 0.02
"""Of the time that our own readings may take: 25 ms for each GiB of small pages was measured."""
GRAIN_BYTES = 1024 * 1024
"""Smaller changes are not worth a message."""


def used_bytes(memory: MemoryUse, footprint: int, *, separate: bool) -> int:
    """Return what a process takes of the budgeted memory; 0 if nothing is known yet.

    `separate`: the accelerator has memory of its own, and the budget is of that. Else what the
    allocator holds is in the footprint, as far as it was touched.
    """
    device = memory.active + memory.cache
    return device if separate else max(footprint, device)


@dataclass
class Scale:
    """What outlives a restart of the actor, and what it needs."""

    memory: MemoryReader
    board: StatusTable
    governor: Ref[GovernorMail]
    heard: dict[str, tuple[WorkerStats, float]] = field(default_factory=dict)
    """The last counters of each model, and when they were new."""
    footprints: dict[int, int] = field(default_factory=dict)
    """Our own readings, by process."""
    due: float = 0.0
    """When the next one of them may be taken."""
    told: mail.Measured | None = None


class Readings(Actor["ReadingsMail"]):
    """Looks at the workers' memory from time to time."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        self._alarm = Alarm(lambda: self.ref.tell(mail.AlarmFired(), beyond_limit=True))

    def on_start(self) -> None:
        """Begin with the first look."""
        self._alarm.set(asyncio.get_running_loop().time() + INTERVAL_S)

    def on_stop(self) -> None:
        """Look no more."""
        self._alarm.cancel()

    def receive(self, message: ReadingsMail) -> None:
        """Handle a message."""
        match message:
            case mail.AlarmFired():
                self._look()
            case mail.HaveRead(footprints=footprints, took_s=took_s):
                now = asyncio.get_running_loop().time()
                self._scale.footprints = footprints
                self._scale.due = now + max(INTERVAL_S, took_s / MOST_SHARE)
                self._tell()
            case _:
                assert_never(message)

    def _look(self) -> None:
        scale, now = self._scale, asyncio.get_running_loop().time()
        models = [one for one in scale.board.models.values() if one.worker_pid is not None]
        scale.heard = {one.name: scale.heard[one.name] for one in models if one.name in scale.heard}
        for model in models:
            known = scale.heard.get(model.name)
            if known is None or known[0] is not model.stats:
                scale.heard[model.name] = (model.stats, now)
        silent = [one.worker_pid for one in models if one.worker_pid and self._is_silent(one, now)]
        if silent and not scale.memory.separate and now >= scale.due:
            self._read(silent, now)
        else:
            self._tell()

    def _is_silent(self, model: ModelStatus, now: float) -> bool:
        _, heard_at = self._scale.heard.get(model.name, (None, now))
        return not model.stats.memory.footprint or now - heard_at > FRESH_S

    def _read(self, pids: list[int], now: float) -> None:
        ref, clock = self.ref, asyncio.get_running_loop().time
        self.pipe(
            self._scale.memory.footprints(pids),
            lambda found: ref.tell(mail.HaveRead(found, clock() - now), beyond_limit=True),
            lambda _: ref.tell(mail.HaveRead({}, clock() - now), beyond_limit=True),
        )

    def _tell(self) -> None:
        scale, now = self._scale, asyncio.get_running_loop().time()
        used, calm = {}, True
        for model in scale.board.models.values():
            if model.worker_pid is None:
                continue
            calm = calm and model.state == "ready" and not scale.board.requests.get(model.name)
            footprint = model.stats.memory.footprint
            if self._is_silent(model, now):
                footprint = scale.footprints.get(model.worker_pid, footprint)
            used[model.name] = used_bytes(
                model.stats.memory, footprint, separate=scale.memory.separate
            )
        measured = mail.Measured(used, scale.memory.host().pressure)
        if _differs(measured, scale.told):
            scale.told = measured
            scale.governor.tell(measured)
        self._alarm.set(now + (CALM_S if calm else INTERVAL_S))


def _differs(new: mail.Measured, old: mail.Measured | None) -> bool:
    return (
        old is None
        or new.pressure != old.pressure
        or new.used.keys() != old.used.keys()
        or any(abs(new.used[name] - old.used[name]) >= GRAIN_BYTES for name in new.used)
    )
