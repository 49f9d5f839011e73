"""One side of the speed comparison, in a process of its own."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO

import msgspec

from kvd.doctor.ended_process import death, last_error
from kvd.host import blas
from kvd.host.environment import environment
from protocol.errors import InsufficientMemory, InternalError
from protocol.speed import Answer, Failed, Loaded, Ran, SideName, Task

MODULE = "kvd.worker.selftest.speed"
_READ_BYTES = 1 << 16


class TooSlow(InternalError):
    """A side takes longer than it may; it can run no further task."""


class SideProcess:
    """A process that has one model and runs tasks; see `opened`."""

    def __init__(
        self, name: SideName, process: subprocess.Popen[bytes], end: socket.socket, errors: IO[str]
    ) -> None:
        self.name = name
        self.loaded: Loaded
        self.load_s = 0.0
        """Seconds from the start of the process to `Loaded`."""
        self.mlx_peak_bytes = self.process_peak_bytes = 0
        self._process, self._socket, self._errors = process, end, errors
        self._began, self._buffer = time.monotonic(), b""

    def load(self, most_s: float) -> None:
        """Wait until the model is ready; raises what `run` raises."""
        answer = self._receive(most_s)
        if not isinstance(answer, Loaded):
            raise InternalError(f"{self.name} sent {type(answer).__name__} instead of Loaded")
        self.loaded, self.load_s = answer, time.monotonic() - self._began

    def run(self, task: Task, most_s: float) -> Ran:
        """Run a task.

        Raises `InsufficientMemory` if the side's memory was short, `TooSlow` after ``most_s``
        seconds, and `InternalError` if it failed or died.
        """
        try:
            self._socket.sendall(msgspec.json.encode(task) + b"\n")
        except ConnectionError as error:
            raise self._ended() from error
        answer = self._receive(most_s)
        if not isinstance(answer, Ran):
            raise InternalError(f"{self.name} sent {type(answer).__name__} instead of Ran")
        self.mlx_peak_bytes = max(self.mlx_peak_bytes, answer.mlx_peak_bytes)
        self.process_peak_bytes = max(self.process_peak_bytes, answer.process_peak_bytes)
        return answer

    def _receive(self, most_s: float) -> Loaded | Ran:
        answer: Answer = msgspec.json.decode(self._line(most_s), type=Loaded | Ran | Failed)
        if isinstance(answer, Failed):
            kind = InsufficientMemory if answer.short else InternalError
            raise kind(f"{self.name}: {answer.text}")
        return answer

    def _line(self, most_s: float) -> bytes:
        deadline = time.monotonic() + most_s
        while b"\n" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._socket], [], [], left)[0]:
                raise TooSlow(f"{self.name} took more than {most_s:g} s")
            try:
                part = self._socket.recv(_READ_BYTES)
            except ConnectionError as error:
                raise self._ended() from error
            if not part:
                raise self._ended()
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line

    def _ended(self) -> InternalError:
        words = last_error(self._errors)
        reason = f"{death(self._process.wait())}{words and f'; {words}'}"
        return InternalError(f"{self.name}: its process ended: {reason}")


@contextlib.contextmanager
def opened(
    name: SideName, source: str, *options: str, module: str = MODULE
) -> Iterator[SideProcess]:
    """Start a side; it is killed at the end of the block, also after Ctrl-C."""
    ours, theirs = socket.socketpair()
    with ours, tempfile.TemporaryFile("w+", errors="replace") as errors:
        with theirs:
            process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-P", "-m", module, name, source, *options],
                stdin=theirs.fileno(),
                stdout=errors,
                stderr=errors,
                env=environment(blas.choose("auto")) | {"PYTHONFAULTHANDLER": "1"},
            )
        with process:
            try:
                yield SideProcess(name, process, ours, errors)
            finally:
                process.kill()
