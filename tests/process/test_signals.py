"""SIGHUP, and the service manager's notifications and sockets, with real daemons."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvd.host.home import Home
from tests.process.helpers import DEADLINE_S, Daemon, Reader, alive, source, wait_for, write_config


def events(daemon: Daemon, name: str) -> list[dict[str, Any]]:
    return [line for line in daemon.log() if line["event"] == name]


def reload(daemon: Daemon) -> None:
    """Send SIGHUP and wait until the daemon has read its configuration."""
    before = len(events(daemon, "reloading the configuration"))
    done = ("configuration reloaded", "configuration refused")
    daemon.signal(signal.SIGHUP)
    wait_for(
        "the configuration is read", lambda: sum(len(events(daemon, one)) for one in done) > before
    )


def test_sighup_without_a_terminal_reloads_the_configuration(home: Home, make_daemon):
    model = f'{{source = "{source(tps=50)}", alias = "m"}}'
    write_config(home, f'budget = "1GiB"\nmodels = [{model}]')
    daemon = make_daemon().start()
    wait_for("m is ready", lambda: "ready" in daemon.kvctl("status").stdout)
    running = Reader(daemon, "m", max_tokens=10_000).begun()
    worker = daemon.worker_pid("m")
    more = f'{{source = "{source(tps=100)}", alias = "more"}}'
    changed = model.replace("}", ", pinned = true}", 1)
    home.config.write_text(f'budget = "2GiB"\nmax_rows = 7\nmodels = [{changed}, {more}]')
    reload(daemon)
    with daemon.client() as kvd:
        status = kvd.status()
        assert (status.budget_bytes, status.config_pending) == (2 * 2**30, ["max_rows"])
        wait_for("more is ready", lambda: len(kvd.status().models) == 2)
        assert daemon.model("m").pinned
        (event,) = events(daemon, "setting waits for a restart of the daemon")
        assert (event["key"], event["before"], event["after"]) == ("max_rows", 32, 7)

        home.config.write_text('budget = "3GiB"\nbugdet = 1')
        reload(daemon)
        status = kvd.status()
        assert status.budget_bytes == 2 * 2**30
        assert "did you mean budget?" in (status.config_error or "")
        (refused,) = events(daemon, "configuration refused")
        assert refused["key"] == "bugdet"

        home.config.write_text("")
        reload(daemon)
        status = kvd.status()
        assert (status.config_error, status.config_pending) == (None, [])
    assert (daemon.worker_pid("m"), running.error) == (worker, None)


class Terminal:
    """A terminal that starts a daemon."""

    def __init__(self, daemon: Daemon, *before: str) -> None:
        self._controller, terminal = pty.openpty()
        command = [sys.executable, "-m", "kvd", "serve", "--home", str(daemon.home.root), "--fake"]
        own_terminal = "import os,sys;os.setsid();fd=os.open(sys.argv[1],os.O_RDWR);os.close(fd);"
        start = [sys.executable, "-c", own_terminal + "os.execvp(sys.argv[2],sys.argv[2:])"]
        with daemon.output.open("w") as out, daemon.errors.open("w") as err:
            daemon.process = subprocess.Popen(
                [*start, os.ttyname(terminal), *before, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                text=True,
            )
        wait_for("the daemon answers", daemon.answers)
        wait_for(
            "the daemon serves",
            lambda: "daemon started" in (daemon.home.logs / "kvd.log").read_text(),
        )
        os.close(terminal)

    def close(self) -> None:
        os.close(self._controller)


@pytest.mark.skipif(
    sys.platform != "linux", reason="only on Linux, opening a terminal makes it the controlling one"
)
def test_a_closed_terminal_drains_the_daemon(make_daemon):
    daemon = make_daemon()
    terminal = Terminal(daemon)
    daemon.load(source(tps=50), "m")
    running, worker = Reader(daemon, "m", max_tokens=30).begun(), daemon.worker_pid("m")
    terminal.close()
    assert daemon.wait() == 0
    assert running.finished().error is None
    assert len(running.completion.tokens) == 30
    assert not alive(worker)
    assert not events(daemon, "reloading the configuration")


@pytest.mark.skipif(
    sys.platform != "linux", reason="only on Linux, opening a terminal makes it the controlling one"
)
def test_with_nohup_a_closed_terminal_does_not_stop_the_daemon(make_daemon):
    daemon = make_daemon()
    terminal = Terminal(daemon, shutil.which("nohup") or "nohup")
    daemon.load(source(tps=50), "m")
    worker = daemon.worker_pid("m")
    terminal.close()
    wait_for("the configuration is read", lambda: events(daemon, "configuration reloaded"))
    assert daemon.answers()
    assert daemon.worker_pid("m") == worker


class Manager:
    """The receiving end of sd_notify."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(DEADLINE_S)
        self.received: list[dict[str, str]] = []

    def receive(self, key: str) -> dict[str, str]:
        """Return the next message with this key."""
        while True:
            text = self._socket.recv(4096).decode()
            self.received.append(dict(line.split("=", 1) for line in text.splitlines()))
            if key in self.received[-1]:
                return self.received[-1]

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def manager(home: Home):
    subject = Manager(home.root.parent / "n")
    yield subject
    subject.close()


def test_the_service_manager_is_notified_of_start_watchdog_reload_and_stop(
    home: Home, make_daemon, manager: Manager, monkeypatch
):
    monkeypatch.setenv("NOTIFY_SOCKET", str(manager.path))
    monkeypatch.setenv("WATCHDOG_USEC", "100000")
    write_config(home, "drain_timeout_s = 12")
    daemon = make_daemon()
    daemon.launch()
    assert manager.receive("READY")["STATUS"] == f"serves {home.socket}"
    assert daemon.answers()  # clients can connect once systemd knows
    assert manager.receive("WATCHDOG") == manager.receive("WATCHDOG") == {"WATCHDOG": "1"}
    daemon.load(source(tps=100), "m")
    environment = Path(f"/proc/{daemon.worker_pid('m')}/environ")
    if environment.exists():  # workers must not notify in the daemon's name
        assert b"NOTIFY_SOCKET" not in environment.read_bytes()
        assert b"WATCHDOG" not in environment.read_bytes()
    home.config.write_text("max_rows = 3")
    daemon.signal(signal.SIGHUP)
    assert int(manager.receive("RELOADING")["MONOTONIC_USEC"]) > 0
    assert manager.receive("READY")["STATUS"] == "serving; restart to apply max_rows"
    daemon.signal(signal.SIGTERM)
    stopping = manager.receive("STOPPING")
    assert stopping["EXTEND_TIMEOUT_USEC"] == str(int((30 + 15) * 1e6))
    assert daemon.wait() == 0


@pytest.mark.skipif(sys.platform == "darwin", reason="launchd passes sockets differently")
def test_a_socket_from_the_service_manager_is_served_and_kept(home: Home, make_daemon):
    home.create()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(home.socket))
    listener.listen()
    early = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    early.connect(str(home.socket))  # before the daemon runs
    early.sendall(b'{"v":1,"id":"1","op":"status"}\n')
    early.settimeout(DEADLINE_S)
    daemon = make_daemon()
    # LISTEN_PID must be the daemon's pid, so a shell sets it and then executes the daemon.
    script = 'exec 3<&"$1"; shift; LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES=kvd exec "$@"'
    command = [sys.executable, "-m", "kvd", "serve", "--home", str(home.root), "--fake"]
    with daemon.output.open("w") as out, daemon.errors.open("w") as err:
        daemon.process = subprocess.Popen(
            ["bash", "-c", script, "sh", str(listener.fileno()), *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            pass_fds=[listener.fileno()],
            text=True,
            start_new_session=True,
        )
    wait_for("the daemon answers", daemon.answers)
    daemon.load(source(tps=100), "m")
    environment = Path(f"/proc/{daemon.worker_pid('m')}/environ")
    if environment.exists():
        assert b"LISTEN_FDS" not in environment.read_bytes()
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert home.socket.is_socket()
    assert b'"event":"status"' in early.recv(65536)
    early.close()
    listener.close()
