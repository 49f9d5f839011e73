"""Engine processes: one child per worker over a socketpair.

Implements `actors.ports.SpawnWorker`. Knows how a worker is started, spoken to and heard; when
and why it is started or killed is the actors' business. A child stays in our process group and
session, so that launchd and a terminal's hang-up reach it too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

import structlog

from actors.ports import Exit
from kvd.host.environment import environment
from kvd.host.memory.oom import OomWatch
from protocol.errors import RemoteProtocolError
from protocol.framing import FrameDecoder, decode_report, encode_frame

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from protocol.worker import Command, Report

_LINE_BYTES = 8192
"""Longer lines of a worker's output are cut into several log lines."""
_BURST_LINES, _LINES_PER_S = 1000, 20
"""Of one worker's output into the log: a whole traceback or report, and then what can be read."""
_LAST_WORDS_S = 1.0
"""How long after the exit we wait for the ends of socket and output; a grandchild that inherited
them must not keep a dead worker alive for us."""
_BROKE_PROTOCOL = 76
"""EX_PROTOCOL: the exit status we report for a worker that we killed because of a bad frame."""


class Spawner:
    """Starts workers; one for the daemon's life."""

    def __init__(
        self,
        *,
        fake: bool = False,
        blas: Path | None = None,
        native: str = "auto",
        attention: str = "auto",
        calibration: Path | None = None,
    ) -> None:
        self._fake = fake
        self._environment = environment(blas) | {
            "KVD_NATIVE": native,
            "KVD_ATTENTION": attention,
        }
        if calibration is not None:
            self._environment["KVD_CALIBRATION"] = str(calibration)
        self._watchers: set[asyncio.Task[None]] = set()
        self._oom = OomWatch()

    async def __call__(
        self,
        name: str,
        *,
        on_report: Callable[[Report], None],
        on_exit: Callable[[Exit], None],
    ) -> Worker:
        """Start the process of the model called `name`."""
        ours, theirs = socket.socketpair()
        output, their_output = os.pipe()
        with contextlib.closing(theirs), os.fdopen(their_output, "wb") as sink:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._arguments(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    pass_fds=(theirs.fileno(),),
                    env=self._environment,
                )
            except BaseException:
                ours.close()
                os.close(output)
                raise
        self._oom.began()
        worker = Worker(name, process, on_report, self._oom)
        watcher = asyncio.create_task(worker.live(ours, output, on_exit), name=f"worker {name}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return worker

    def _arguments(self, fd: int) -> list[str]:
        # -P: the daemon's working folder must not decide what the worker imports.
        arguments = [sys.executable, "-P", "-m", "kvd.worker", str(fd)]
        return [*arguments, "--engine", "fake"] if self._fake else arguments


class Worker:
    """One engine process, alive or dead."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        on_report: Callable[[Report], None],
        oom: OomWatch,
    ) -> None:
        self._name = name
        self._process = process
        self._link = _Link(on_report, self._broken)
        self._log = structlog.get_logger("kvd.worker").bind(model=name, worker_pid=process.pid)
        self._oom = oom
        self._killed = False
        """By us."""
        self._status: int | None = None

    @property
    def pid(self) -> int:
        """The process id, also after its death."""
        return self._process.pid

    def send(self, command: Command) -> None:
        """Buffer a command for the process; after its death do nothing."""
        self._link.send(encode_frame(command))

    def terminate(self) -> None:
        """Send SIGTERM."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL."""
        self._killed = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def live(self, ours: socket.socket, output: int, on_exit: Callable[[Exit], None]) -> None:
        """Carry bytes until the process has exited and all that it wrote is delivered."""
        loop = asyncio.get_running_loop()
        lines = _Lines(self._log.info)
        pipe, _ = await loop.connect_read_pipe(lambda: lines, os.fdopen(output, "rb", 0))
        await loop.create_unix_connection(lambda: self._link, sock=ours)
        returncode = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._link.ended.wait()
                await lines.ended.wait()
        self._link.close()
        pipe.close()
        starved = returncode == -signal.SIGKILL and not self._killed and self._oom.took()
        on_exit(Exit(returncode if self._status is None else self._status, starved))

    def _broken(self, error: RemoteProtocolError) -> None:
        self._log.error("worker broke the protocol", reason=error.message)
        self._status = _BROKE_PROTOCOL
        self.kill()


class _Link(asyncio.Protocol):
    """Frames over the socketpair; commands given before it is connected wait."""

    def __init__(
        self, on_report: Callable[[Report], None], on_broken: Callable[[RemoteProtocolError], None]
    ) -> None:
        self.ended = asyncio.Event()
        self._on_report = on_report
        self._on_broken = on_broken
        self._decoder = FrameDecoder()
        self._early = b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._early)

    def send(self, data: bytes) -> None:
        if self._transport is None:
            self._early += data
        elif not self._transport.is_closing():
            self._transport.write(data)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._decoder.receive(data):
                self._on_report(decode_report(frame))
        except RemoteProtocolError as error:
            self._on_broken(error)
            self.close()

    def connection_lost(self, _: Exception | None) -> None:
        self.ended.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Lines(asyncio.Protocol):
    """What a worker prints, line by line into the log; not so much that all else is lost there."""

    def __init__(
        self, log: Callable[..., object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ended = asyncio.Event()
        self._log = log
        self._rest = b""
        self._clock = clock
        self._room, self._since = float(_BURST_LINES), clock()
        self._left_out = 0

    def data_received(self, data: bytes) -> None:
        # Progress bars end their lines with a carriage return.
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > _LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._say(line)

    def connection_lost(self, _: Exception | None) -> None:
        self._say(self._rest)
        self._own_up()
        self.ended.set()

    def _say(self, line: bytes) -> None:
        if not (text := line.decode("utf-8", "replace").rstrip()):
            return
        now = self._clock()
        self._room = min(_BURST_LINES, self._room + _LINES_PER_S * (now - self._since))
        self._since = now
        if self._room < 1:
            self._left_out += 1
            return
        self._room -= 1
        self._own_up()
        self._log("worker says", line=text)

    def _own_up(self) -> None:
        """Say what was left out, once there is room again."""
        if self._left_out:
            self._log("worker says too much", lines_left_out=self._left_out)
            self._left_out = 0
