"""A real daemon in a separate process, and helpers for tests with it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvd.client import Client
from kvd.host.home import Home
from protocol.errors import KvdError, NotRunning
from protocol.types import ModelStatus

DEADLINE_S = 30.0
"""Timeout of waits that usually take a second, because the machine may be busy."""


def wait_for(what: str, condition: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    """Call a condition until its result is true and return that; fail after the deadline.

    Most conditions ask the daemon, which takes 2 ms of CPU time. So long waits poll less often.
    """
    pause, end = 0.01, time.monotonic() + deadline_s
    while True:
        if result := condition():
            return result
        assert time.monotonic() < end, f"not within {deadline_s:g} s: {what}"
        time.sleep(pause)
        pause = min(1.2 * pause, 0.05)


def alive(pid: int) -> bool:
    """Return whether the process runs; a zombie counts as ended."""
    if sys.platform == "linux":  # without `ps`, which takes 6 ms
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat.rpartition(")")[2].split()[0] not in {"Z", "X"}
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
    ).stdout.strip()
    return bool(state) and not state.startswith("Z")


class Daemon:
    """`kvd serve` with a home; it can be started several times."""

    def __init__(self, home: Home, *arguments: str) -> None:
        self.home = home
        self._arguments = arguments
        self.process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def output(self) -> Path:
        """The file of its stdout; a full pipe would block it."""
        return self.home.root.with_suffix(".out")

    @property
    def errors(self) -> Path:
        """The file of its stderr."""
        return self.home.root.with_suffix(".err")

    def launch(self, *more: str) -> subprocess.Popen[str]:
        """Start it in a new session, as a terminal does."""
        command = [sys.executable, "-m", "kvd", "serve", "--home", str(self.home.root)]
        with self.output.open("w") as output, self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                [*command, *self._arguments, *more],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        return self.process

    def start(self, *more: str) -> Daemon:
        """Start it and wait until it answers."""
        process = self.launch(*more)
        wait_for("the daemon answers", lambda: process.poll() is not None or self.answers())
        assert process.poll() is None, self.errors.read_text()
        return self

    def answers(self) -> bool:
        try:
            with self.client() as kvd:
                return kvd.hello().pid == self.pid
        except NotRunning:
            return False

    def client(self) -> Client:
        return Client(home=self.home.root)

    def load(self, source: str, alias: str) -> ModelStatus:
        with self.client() as kvd:
            return kvd.load(source, alias=alias).result

    def model(self, name: str) -> ModelStatus:
        with self.client() as kvd:
            return next(model for model in kvd.status().models if model.name == name)

    def model_names(self) -> list[str]:
        """Return the names of the models that have workers."""
        with self.client() as kvd:
            return [model.name for model in kvd.status().models]

    def has(self, name: str) -> bool:
        return name in self.model_names()

    def worker_pid(self, name: str) -> int:
        pid = self.model(name).worker_pid
        assert pid is not None
        return pid

    def kvctl(self, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.kvctl_command(*arguments),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
            **options,
        )

    def kvctl_command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "kvd.cli", "--home", str(self.home.root), *arguments]

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Return the exit status."""
        assert self.process is not None
        return self.process.wait(deadline_s)

    def log(self) -> list[dict[str, Any]]:
        """Return the lines of the log file."""
        text = (self.home.logs / "kvd.log").read_text()
        return [json.loads(line) for line in text.splitlines()]

    def connect(self) -> socket.socket:
        """Return a raw connection."""
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(DEADLINE_S)
        raw.connect(str(self.home.socket))
        return raw

    def end(self) -> None:
        """Kill it, even if SIGSTOP suspended it; for teardown."""
        if self.process is None:
            return
        if self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGCONT)
                os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


class Reader(threading.Thread):
    """Reads one completion in the background, over a separate connection."""

    def __init__(self, daemon: Daemon, model: str, prompt: str = "Hi", **options: Any) -> None:
        super().__init__(daemon=True)
        self._client = daemon.client()
        self.completion = self._client.generate(model, prompt, **options)
        self.error: KvdError | None = None
        self.started = threading.Event()
        self.ended_at = 0.0
        self.start()

    def run(self) -> None:
        try:
            for _ in self.completion:
                if self.completion.tokens:
                    self.started.set()
        except KvdError as error:
            self.error = error
        finally:
            self.ended_at = time.monotonic()
            self.started.set()
            self._client.close()

    def begun(self) -> Reader:
        """Wait for the first tokens."""
        assert self.started.wait(DEADLINE_S), "no tokens came"
        return self

    def finished(self, deadline_s: float = DEADLINE_S) -> Reader:
        """Wait for the end."""
        self.join(deadline_s)
        assert not self.is_alive(), "the stream did not end"
        return self


def lines_of(raw: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the daemon's messages on a raw connection until it closes."""
    buffer = b""
    while data := raw.recv(65536):
        buffer += data
        *lines, buffer = buffer.split(b"\n")
        for line in lines:
            yield json.loads(line)


def write_config(home: Home, text: str) -> Home:
    """Create the home with this configuration."""
    home.create()
    home.config.write_text(text)
    return home


def source(**options: float | str) -> str:
    """Return the fake engine's source with these options."""
    return "fake:" + ",".join(f"{key}={value}" for key, value in options.items())


def folder_mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@contextlib.contextmanager
def configured(config: str) -> Iterator[Daemon]:
    """Yield a daemon with a home of its own and this config.toml; it is not started yet."""
    with tempfile.TemporaryDirectory(prefix="kvd-", ignore_cleanup_errors=True) as root:
        daemon = Daemon(Home(Path(root) / "h"))
        daemon.home.create()
        daemon.home.config.write_text(config)
        try:
            yield daemon
        finally:
            daemon.end()
