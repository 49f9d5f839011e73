"""One rank's process: its frames over a socketpair, and its output as lines of the log."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from typing import TYPE_CHECKING

import structlog

from protocol.errors import RemoteProtocolError
from protocol.framing import FrameDecoder, decode_report, encode_frame
from protocol.worker import Started

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from protocol.worker import Command, Report

_LINE_BYTES = 8192
"""Longer lines of a worker's output become several log lines."""
_BURST_LINES, _LINES_PER_S = 1000, 20
"""Limits on one process's output in the log: a burst for tracebacks, then a readable rate."""
_FINAL_OUTPUT_S = 1.0
"""Seconds after the exit to wait for the end of socket and output. A grandchild that inherited them
could keep them open."""
_BROKE_PROTOCOL = 76
"""EX_PROTOCOL: the reported exit status of a process that was killed because of an invalid
frame."""


class RankProcess:
    """One process of a worker, alive or dead."""

    def __init__(
        self,
        name: str,
        number: int | None,
        process: asyncio.subprocess.Process,
        daemon_end: socket.socket,
        output: int,
    ) -> None:
        """Own the process and both descriptors. ``number``: the rank in a gang, or None."""
        self.pid = process.pid
        self._process = process
        self._daemon_end, self._output = daemon_end, output
        self._is_follower = bool(number)
        self._log = structlog.get_logger("kvd.worker").bind(model=name, worker_pid=process.pid)
        if number is not None:
            self._log = self._log.bind(rank=number)
        self._frames = _Frames(self._receive, self._on_invalid_frame)
        self._lines = _OutputLines(self._log.info)
        self._on_report: Callable[[Report], None] = lambda _: None
        self._status: int | None = None

    def send(self, command: Command) -> None:
        """Buffer a command for the process; ignored after its death."""
        self._frames.send(encode_frame(command))

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    def abandon(self) -> None:
        """Kill the process before `run`."""
        self.kill()
        self._daemon_end.close()
        os.close(self._output)

    async def exited(self) -> int:
        """Wait for the exit of a process that does not `run`."""
        return await self._process.wait()

    async def run(
        self, on_report: Callable[[Report], None], on_exit: Callable[[int], None]
    ) -> None:
        """Transfer frames and output until the process has exited and both have ended.

        ``on_exit`` gets the status as soon as the process has exited. Reports may follow.
        """
        self._on_report = on_report
        loop = asyncio.get_running_loop()
        output = os.fdopen(self._output, "rb", 0)
        pipe, _ = await loop.connect_read_pipe(lambda: self._lines, output)
        await loop.create_unix_connection(lambda: self._frames, sock=self._daemon_end)
        returncode = await self._process.wait()
        on_exit(returncode if self._status is None else self._status)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FINAL_OUTPUT_S):
                await self._frames.ended.wait()
                await self._lines.ended.wait()
        self._frames.close()
        pipe.close()

    def _receive(self, report: Report) -> None:
        if self._is_follower and not isinstance(report, Started):
            raise RemoteProtocolError(f"a follower sent {type(report).__name__}")
        self._on_report(report)

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
