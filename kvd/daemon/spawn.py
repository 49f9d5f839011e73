"""Starts worker processes: one per worker, or several ranks that share a model.

All processes stay in the daemon's process group, so that the hang-up of a terminal reaches them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING

from actors.ports import Exit
from kvd.daemon.gang import Gang
from kvd.daemon.rank import RankProcess
from kvd.host.environment import environment
from kvd.host.memory.oom import OomWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from protocol.worker import Command, Report

_HOST = "127.0.0.1"
"""Where ranks listen for each other."""


class Spawner:
    """Starts worker processes."""

    def __init__(
        self,
        *,
        fake: bool = False,
        blas: Path | None = None,
        native: str = "auto",
        attention: str = "auto",
        calibration: Path | None = None,
        devices: Sequence[str] = (),
    ) -> None:
        """``devices``: names of the CUDA devices, if there are several."""
        self._devices = devices
        self._fake = fake
        self._environment = environment(blas) | {"KVD_NATIVE": native, "KVD_ATTENTION": attention}
        if calibration is not None:
            self._environment["KVD_CALIBRATION"] = str(calibration)
        self._watchers: set[asyncio.Task[None]] = set()
        self._oom = OomWatch()

    async def __call__(
        self,
        name: str,
        *,
        ranks: int = 1,
        device: int = 0,
        on_report: Callable[[Report], None],
        on_exit: Callable[[Exit], None],
    ) -> Worker:
        started: list[RankProcess] = []
        try:
            with contextlib.closing(Wiring(ranks)) as wiring:
                while len(started) < ranks:
                    started.append(await self._start(name, len(started), wiring, device))
        except BaseException:
            for process in started:
                process.abandon()
            await asyncio.gather(*(process.exited() for process in started))
            raise
        self._oom.process_started()
        worker = Worker(started, self._oom)
        watcher = asyncio.create_task(worker.run(on_report, on_exit), name=f"worker {name}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return worker

    async def _start(self, name: str, rank: int, wiring: Wiring, device: int) -> RankProcess:
        daemon_end, worker_end = socket.socketpair()
        output, worker_output = os.pipe()
        with contextlib.closing(worker_end), os.fdopen(worker_output, "wb") as sink:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._arguments(worker_end.fileno(), wiring.arguments(rank)),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    pass_fds=(worker_end.fileno(), *wiring.controls(rank)),
                    env=self._environment | self._visible(device + rank),
                )
            except BaseException:
                daemon_end.close()
                os.close(output)
                raise
        number = rank if wiring.ranks > 1 else None
        return RankProcess(name, number, process, daemon_end, output)

    def _visible(self, device: int) -> dict[str, str]:
        """Return the variables that show a process its device, and no other.

        They must be set before the process starts: CUDA reads them once, when MLX is imported.
        """
        if not self._devices:
            return {}
        # kvd numbers devices as NVIDIA's driver does. CUDA would number the fastest one 0.
        return {
            "CUDA_VISIBLE_DEVICES": self._devices[device],
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        }

    def _arguments(self, fd: int, gang: Sequence[str]) -> list[str]:
        # -P: do not import modules from the daemon's working folder.
        arguments = [sys.executable, "-P", "-m", "kvd.worker", str(fd), *gang]
        return [*arguments, "--engine", "fake"] if self._fake else arguments


class Wiring:
    """What connects the ranks of a gang; for one rank, nothing.

    The leader has a control socket to each follower. All ranks listen at addresses of a ring. Its
    ports are free when the gang starts. If another program takes one of them before the rank
    listens, the gang fails, and the next start chooses others.
    """

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._ring = free_addresses(ranks) if ranks > 1 else []
        self._pairs = [socket.socketpair() for _ in range(1, ranks)]

    def close(self) -> None:
        """Close this process's copies of the control sockets."""
        for pair in self._pairs:
            for end in pair:
                end.close()

    def controls(self, rank: int) -> list[int]:
        """Return a rank's control sockets: the leader has one per follower, in rank order."""
        if rank == 0:
            return [leader.fileno() for leader, _ in self._pairs]
        return [self._pairs[rank - 1][1].fileno()]

    def arguments(self, rank: int) -> list[str]:
        """Return the part of a rank's command line that describes the gang."""
        if self.ranks == 1:
            return []
        controls = ",".join(map(str, self.controls(rank)))
        place = ["--ranks", str(self.ranks), "--rank", str(rank)]
        return [*place, "--ring", ",".join(self._ring), "--controls", controls]


def free_addresses(count: int) -> list[str]:
    """Return this many addresses, as ``host:port``, at which nothing listens."""
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((_HOST, 0))
        return [f"{_HOST}:{one.getsockname()[1]}" for one in sockets]


class Worker:
    """One worker's processes, alive or dead. It has ended once all of them have."""

    def __init__(self, ranks: list[RankProcess], oom: OomWatch) -> None:
        self._ranks = ranks
        self._gang = Gang(len(ranks))
        self._oom = oom
        self._starved: set[int] = set()
        """Ranks that the kernel killed because memory was short."""
        self._grace: asyncio.TimerHandle | None = None

    @property
    def pid(self) -> int:
        """Process id of the leader."""
        return self._ranks[0].pid

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of all ranks, in rank order."""
        return tuple(rank.pid for rank in self._ranks)

    def send(self, command: Command) -> None:
        """Buffer a command for the leader; ignored after its death."""
        self._ranks[0].send(command)

    def terminate(self) -> None:
        for number in self._gang.alive:
            self._ranks[number].terminate()

    def kill(self) -> None:
        self._kill(self._gang.kill())

    async def run(
        self, on_report: Callable[[Report], None], on_exit: Callable[[Exit], None]
    ) -> None:
        """Transfer frames and output until all processes have exited and their output has ended."""
        await asyncio.gather(
            *(
                rank.run(on_report, lambda status, number=number: self._exited(number, status))  # type: ignore[misc]
                for number, rank in enumerate(self._ranks)
            )
        )
        cause = self._gang.cause
        rank = cause.rank if len(self._ranks) > 1 else None
        on_exit(Exit(cause.returncode, cause.rank in self._starved, rank))

    def _exited(self, number: int, status: int) -> None:
        was_killed = status == -signal.SIGKILL and number not in self._gang.killed
        if was_killed and self._oom.killed_process():
            self._starved.add(number)
        loop = asyncio.get_running_loop()
        self._kill(self._gang.exited(number, status, loop.time()))
        if self._gang.deadline is not None and self._grace is None:
            self._grace = loop.call_at(self._gang.deadline, self._time_out)

    def _time_out(self) -> None:
        self._kill(self._gang.time_out(asyncio.get_running_loop().time()))

    def _kill(self, ranks: list[int]) -> None:
        for number in ranks:
            self._ranks[number].kill()
