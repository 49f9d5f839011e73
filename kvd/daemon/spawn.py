"""Starts worker processes, and exchanges frames with them over a socketpair.

A worker stays in the daemon's process group, so that the hang-up of a terminal reaches it.
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
"""Longer lines of a worker's output become several log lines."""
_BURST_LINES, _LINES_PER_S = 1000, 20
"""Limits on one worker's output in the log: a burst for tracebacks, then a readable rate."""
_FINAL_OUTPUT_S = 1.0
"""Seconds after the exit to wait for the end of socket and output. A grandchild that inherited them
could keep them open."""
_BROKE_PROTOCOL = 76
"""EX_PROTOCOL: the reported exit status of a worker that was killed because of an invalid frame."""


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
    ) -> None:
        self._fake = fake
        self._environment = environment(blas) | {"KVD_NATIVE": native, "KVD_ATTENTION": attention}
        if calibration is not None:
            self._environment["KVD_CALIBRATION"] = str(calibration)
        self._watchers: set[asyncio.Task[None]] = set()
        self._oom = OomWatch()

    async def __call__(
        self, name: str, *, on_report: Callable[[Report], None], on_exit: Callable[[Exit], None]
    ) -> Worker:
        daemon_end, worker_end = socket.socketpair()
        output, worker_output = os.pipe()
        with contextlib.closing(worker_end), os.fdopen(worker_output, "wb") as sink:
            try:
                process = await asyncio.create_subprocess_exec(
                    *self._arguments(worker_end.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=sink,
                    stderr=sink,
                    pass_fds=(worker_end.fileno(),),
                    env=self._environment,
                )
            except BaseException:
                daemon_end.close()
                os.close(output)
                raise
        self._oom.process_started()
        worker = Worker(name, process, on_report, self._oom)
        running = worker.run(daemon_end, output, on_exit)
        watcher = asyncio.create_task(running, name=f"worker {name}")
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return worker

    def _arguments(self, fd: int) -> list[str]:
        # -P: do not import modules from the daemon's working folder.
        arguments = [sys.executable, "-P", "-m", "kvd.worker", str(fd)]
        return [*arguments, "--engine", "fake"] if self._fake else arguments


class Worker:
    """One worker process, alive or dead."""

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        on_report: Callable[[Report], None],
        oom: OomWatch,
    ) -> None:
        self._name = name
        self._process = process
        self._frames = _Frames(on_report, self._on_invalid_frame)
        self._log = structlog.get_logger("kvd.worker").bind(model=name, worker_pid=process.pid)
        self._oom = oom
        self._killed_by_daemon = False
        self._status: int | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Buffer a command for the process; ignored after its death."""
        self._frames.send(encode_frame(command))

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        self._killed_by_daemon = True
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def run(
        self, daemon_end: socket.socket, output: int, on_exit: Callable[[Exit], None]
    ) -> None:
        """Transfer frames and output until the process has exited and both have ended."""
        loop = asyncio.get_running_loop()
        lines = _OutputLines(self._log.info)
        pipe, _ = await loop.connect_read_pipe(lambda: lines, os.fdopen(output, "rb", 0))
        await loop.create_unix_connection(lambda: self._frames, sock=daemon_end)
        returncode = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINAL_OUTPUT_S):
                await self._frames.ended.wait()
                await lines.ended.wait()
        self._frames.close()
        pipe.close()
        was_killed = returncode == -signal.SIGKILL and not self._killed_by_daemon
        status = returncode if self._status is None else self._status
        on_exit(Exit(status, was_killed and self._oom.killed_process()))

    def _on_invalid_frame(self, error: RemoteProtocolError) -> None:
        self._log.error("worker broke the protocol", reason=error.message)
        self._status = _BROKE_PROTOCOL
        self.kill()


class _Frames(asyncio.Protocol):
    """Frames over the socketpair; commands before it is connected are buffered."""

    def __init__(
        self, on_report: Callable[[Report], None], on_invalid: Callable[[RemoteProtocolError], None]
    ) -> None:
        self.ended = asyncio.Event()
        self._on_report = on_report
        self._on_invalid = on_invalid
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
            self._on_invalid(error)
            self.close()

    def connection_lost(self, _: Exception | None) -> None:
        self.ended.set()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _OutputLines(asyncio.Protocol):
    """Logs a worker's output line by line, at a limited rate."""

    def __init__(
        self, log: Callable[..., object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.ended = asyncio.Event()
        self._log = log
        self._rest = b""
        self._clock = clock
        self._allowed, self._since = float(_BURST_LINES), clock()
        self._omitted = 0

    def data_received(self, data: bytes) -> None:
        # Progress bars end their lines with a carriage return.
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        if len(self._rest) > _LINE_BYTES:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            self._log_line(line)

    def connection_lost(self, _: Exception | None) -> None:
        self._log_line(self._rest)
        self._log_omitted()
        self.ended.set()

    def _log_line(self, line: bytes) -> None:
        if not (text := line.decode("utf-8", "replace").rstrip()):
            return
        now = self._clock()
        self._allowed = min(_BURST_LINES, self._allowed + _LINES_PER_S * (now - self._since))
        self._since = now
        if self._allowed < 1:
            self._omitted += 1
            return
        self._allowed -= 1
        self._log_omitted()
        self._log("worker output", line=text)

    def _log_omitted(self) -> None:
        if self._omitted:
            self._log("worker output omitted", lines=self._omitted)
            self._omitted = 0
