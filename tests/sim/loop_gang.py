"""A simulated gang: a leader that is a `LoopProcess`, and followers that start, stop and die.

Followers compute nothing. A leader whose followers are not all running waits, as in a collective.
When a rank dies, the watchdogs of the others end them soon after. Which exits the daemon answers
with kills, and which exit explains the end, is decided by the real `Gang`.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.ports import Exit
from kvd.daemon.gang import Gang
from protocol import worker as wire
from protocol.gang import PEER_LOST
from tests.sim.loop_process import LevelsTruth, LoopProcess


class LoopGang(LoopProcess):
    """A gang, with its port to the daemon, and its faults."""

    def __init__(self, pid: int, *arguments: Any, ranks: int) -> None:
        super().__init__(pid, *arguments)
        self.pids = tuple(range(pid, pid + ranks))
        self._gang = Gang(ranks)
        self._dying: set[int] = set()
        """Followers that are dead; the daemon has not observed all of these exits yet."""
        self._paused: dict[int, float] = {}
        """Ranks that were stopped, and until when."""
        self._timers: list[asyncio.TimerHandle] = []
        for rank in range(1, ranks):
            self._after(self._delay_s(), self._start, rank)

    # The port.

    def terminate(self) -> None:
        for rank in self._gang.alive:
            if rank not in self._paused:
                self.die(-15, rank)

    def kill(self) -> None:
        for rank in self._gang.kill():
            self.die(-9, rank)

    # Faults.

    def die(self, returncode: int, rank: int = 0) -> None:
        """End one rank; the watchdogs of the others notice soon."""
        if rank == 0:
            super().die(returncode)
        elif rank not in self._dying:
            self._dying.add(rank)
            self._after(self._delay_s(), self._observe, rank, returncode)

    def pause(self, seconds: float, rank: int = 0) -> None:
        """Stop one rank for a while; the leader needs all of them."""
        super().pause(seconds)
        self._paused[rank] = max(self._time.time() + seconds, self._paused.get(rank, 0.0))
        if math.isfinite(seconds):
            self._after(seconds, self._resume, rank)

    def orphan(self) -> None:
        super().orphan()
        self._cancel_timers()

    # The ranks.

    def _start(self, rank: int) -> None:
        if rank in self._paused:
            if math.isfinite(until := self._paused[rank]):
                self._after(until - self._time.time(), self._start, rank)
        elif rank not in self._dying:
            self._on_report(wire.Started(pid=self.pids[rank]))

    def _resume(self, rank: int) -> None:
        if self._paused.get(rank, math.inf) <= self._time.time():
            del self._paused[rank]

    def _deliver_exit(self) -> None:
        self._delivery = None
        assert self._returncode is not None
        self._observe(0, self._returncode)

    def _observe(self, rank: int, returncode: int) -> None:
        """Let the daemon see an exit, and the other ranks the end of their sockets."""
        for other in self._gang.exited(rank, returncode, self._time.time()):
            self.die(-9, other)
        if not self._gang.alive:
            self._cancel_timers()
            cause = self._gang.cause
            self.exit = Exit(cause.returncode, rank=cause.rank)
            self._on_exit(self.exit)
            return
        for other in self._gang.alive - self._paused.keys():
            self._after(self._delay_s(), self.die, PEER_LOST, other)
        if (deadline := self._gang.deadline) is not None:
            self._after(deadline - self._time.time(), self._time_out)

    def _time_out(self) -> None:
        for rank in self._gang.time_out(self._time.time()):
            self.die(-9, rank)

    def _after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self._timers.append(self._time.call_later(seconds, call, *arguments))

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()


@dataclass
class LoopSpawn:
    """Starts `LoopProcess`es; some spawns fail or take long."""

    draw: random.Random
    delay_s: Callable[[], float]
    processes: list[LoopProcess] = field(default_factory=list)
    levels: LevelsTruth = field(default_factory=LevelsTruth)
    failing: int = 0
    """Number of the next spawns that fail."""

    async def __call__(
        self,
        name: str,
        *,
        ranks: int = 1,
        device: int = 0,
        on_report: Callable[[wire.Report], None],
        on_exit: Callable[[Exit], None],
    ) -> LoopProcess:
        await asyncio.sleep(self.delay_s())
        if self.failing:
            self.failing -= 1
            raise OSError("no process can be started")
        pid = 1000 + sum(len(it.pids) for it in self.processes)
        wiring = (name, self.draw, self.delay_s, on_report, on_exit, self.levels)
        process = LoopProcess(pid, *wiring) if ranks == 1 else LoopGang(pid, *wiring, ranks=ranks)
        self.processes.append(process)
        if self.draw.random() < 0.2:
            await asyncio.sleep(self.delay_s())  # it may report before this returns
        return process

    def alive(self) -> list[LoopProcess]:
        return [process for process in self.processes if process.alive]
