"""launchd: the agent's plist, and `launchctl`.

launchd expands neither ``~`` nor variables, so all paths are absolute. File modes are decimal.
"""

from __future__ import annotations

import os
import plistlib
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.parsers.expat import ExpatError

from kvd.host import files
from kvd.host.home import Home
from kvd.service.commands import output, run, tail
from kvd.service.describe import Service, State
from protocol.errors import ServiceError

_POLL_S = 0.2
_KILL_S = 10
"""Seconds after the stop timeout for launchd to kill the job and notice its end."""


def label(service: Service) -> str:
    return f"dev.kvd.{service.name}"


def agent(service: Service) -> dict[str, Any]:
    """Return the job description, launchd.plist(5)."""
    home = Home(service.home)
    job: dict[str, Any] = {
        "Label": label(service),
        "ProgramArguments": service.command,
        "EnvironmentVariables": {"KVD_SERVICE": "launchd", **service.variables},
        "WorkingDirectory": str(service.home),
        # With Background, the GPU runs at an eighth of its speed.
        "ProcessType": "Interactive",
        # After this many seconds launchd kills the job.
        "ExitTimeOut": service.stop_s,
        "ThrottleInterval": 10,
        "Umask": 0o077,
        "SoftResourceLimits": {"NumberOfFiles": files.WANTED},
        # The daemon rotates its own log; this file gets only errors before that log opens.
        "StandardOutPath": "/dev/null",
        "StandardErrorPath": str(home.logs / "launchd.log"),
    }
    if service.on_demand:
        job["Sockets"] = _sockets(service)
    else:
        # Restart after a crash, but not after `kvctl shutdown`; implies RunAtLoad.
        job |= {"RunAtLoad": True, "KeepAlive": {"SuccessfulExit": False}}
    return job


def _sockets(service: Service) -> dict[str, Any]:
    protocol, *http = (
        {"SockPathName": str(path), "SockPathMode": 0o600} for path in service.sockets
    )
    http += [
        {"SockNodeName": address, "SockServiceName": str(port), "SockType": "stream"}
        for address, port in service.http
    ]
    return {"kvd": protocol} | ({"http": http} if http else {})


def render(service: Service) -> bytes:
    return plistlib.dumps(agent(service), sort_keys=False)


@dataclass(frozen=True)
class Launchd:
    """The user's launchd; `kvd.service.installer.Manager` describes the methods."""

    service: Service
    folder: Path = Path("~/Library/LaunchAgents").expanduser()  # noqa: RUF009 - one home a process
    name: str = "launchd"

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"

    @property
    def _target(self) -> str:
        return f"{self._domain}/{label(self.service)}"

    @property
    def _file(self) -> Path:
        return self.folder / f"{label(self.service)}.plist"

    def files(self) -> dict[Path, bytes]:
        return {self._file: render(self.service)}

    def stale(self) -> list[Path]:
        return []

    def owns(self, path: Path) -> bool:
        words = _read(path).get("ProgramArguments")
        return isinstance(words, list) and self.service.is_run_by(words)

    def is_on_demand(self) -> bool:
        return self.owns(self._file) and "Sockets" in _read(self._file)

    def check(self) -> None:
        run(["launchctl", "print", self._domain])

    def forget(self) -> None:
        """Do nothing: launchd forgets a job when it is booted out."""

    def start(self) -> None:
        if not self._is_loaded():
            self._bootstrap()
        elif not self.service.on_demand:
            run(["launchctl", "kickstart", self._target])

    def stop(self) -> None:
        """Unload the job and wait for its end; the daemon finishes running requests first."""
        if output(["launchctl", "bootout", self._target]) is None and not self._is_loaded():
            return
        timeout_s = self.service.stop_s + _KILL_S
        deadline = time.monotonic() + timeout_s
        while self._is_loaded():
            if time.monotonic() > deadline:
                raise ServiceError(f"{self._target} still runs after {timeout_s} s")
            time.sleep(_POLL_S)

    deactivate = stop

    def restart(self) -> None:
        self.stop()
        self._bootstrap()

    activate = restart

    def reload(self) -> None:
        run(["launchctl", "kill", "SIGHUP", self._target])

    def state(self) -> State:
        text = output(["launchctl", "print", self._target])
        return State("stopped", "not loaded into launchd") if text is None else parse(text)

    def hint(self) -> str | None:
        return None

    def logs(self, lines: int, *, follow: bool) -> list[str]:
        folder = Home(self.service.home).logs
        return tail([folder / "launchd.log", folder / "kvd.log"], lines, follow=follow)

    def _bootstrap(self) -> None:
        run(["launchctl", "enable", self._target])
        run(["launchctl", "bootstrap", self._domain, str(self._file)])

    def _is_loaded(self) -> bool:
        return output(["launchctl", "print", self._target]) is not None


def _read(path: Path) -> dict[str, Any]:
    """Return the content of an agent's file; empty if it is missing or malformed."""
    try:
        job = plistlib.loads(path.read_bytes())
    except (OSError, ValueError, ExpatError):  # InvalidFileException is a ValueError
        return {}
    return job if isinstance(job, dict) else {}


def parse(text: str) -> State:
    found = dict(re.findall(r"^\t([a-z ]+) = (.+)$", text, re.MULTILINE))
    pid = int(found["pid"]) if found.get("pid", "").isdigit() else None
    if pid is not None:
        return State("running", found.get("state", ""), pid)
    exit_code = found.get("last exit code", "(never exited)")
    if "sockets = {" in text:
        return State("listening", f"starts with the first client; last exit code {exit_code}")
    failed = exit_code.split(":")[0].strip() not in {"0", "(never exited)"}
    return State("failed" if failed else "stopped", f"last exit code {exit_code}")
