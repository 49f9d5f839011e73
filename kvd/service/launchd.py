"""launchd's side: the agent's plist, and `launchctl`.

`render` is pure. launchd expands neither ``~`` nor variables, so all paths are absolute, and its
modes are decimal numbers.
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
from kvd.service.commands import run, said, tail
from kvd.service.describe import Service
from kvd.service.managing import State
from protocol.errors import ServiceError

_NOT_LOADED = 113
"""`launchctl print` of a job that is not there."""
_LOOK_AGAIN_S = 0.2
_KILL_S = 10
"""Beyond a stop: for launchd to kill what is left then, and to take note of its end."""
_PREFIX = "dev.kvd."


def label(service: Service) -> str:
    """Return the job's name."""
    return _PREFIX + service.name


def agent(service: Service) -> dict[str, Any]:
    """Return the job's description, launchd.plist(5)."""
    home = Home(service.home)
    job: dict[str, Any] = {
        "Label": label(service),
        "ProgramArguments": service.command,
        "EnvironmentVariables": {"KVD_SERVICE": "launchd", **service.variables},
        "WorkingDirectory": str(service.home),
        # Background would have the GPU at an eighth of its speed.
        "ProcessType": "Interactive",
        # launchd kills what has not exited by then.
        "ExitTimeOut": service.stop_s,
        "ThrottleInterval": 10,
        "Umask": 0o077,
        "SoftResourceLimits": {"NumberOfFiles": files.WANTED},
        # Its own log rotates; here is only what goes wrong before it can.
        "StandardOutPath": "/dev/null",
        "StandardErrorPath": str(home.logs / "launchd.log"),
    }
    if service.on_demand:
        job["Sockets"] = _sockets(service)
    else:
        # Come back after a crash, and not after `kvctl shutdown`; implies RunAtLoad.
        job |= {"RunAtLoad": True, "KeepAlive": {"SuccessfulExit": False}}
    return job


def _sockets(service: Service) -> dict[str, Any]:
    paths = [{"SockPathName": str(path), "SockPathMode": 0o600} for path in service.sockets]
    found: dict[str, Any] = {"kvd": paths[0]}
    http: list[dict[str, Any]] = [*paths[1:]]
    for address, port in service.http:
        http.append({"SockNodeName": address, "SockServiceName": str(port), "SockType": "stream"})
    return found | ({"http": http} if http else {})


def render(service: Service) -> bytes:
    """Return the file's content."""
    return plistlib.dumps(agent(service), sort_keys=False)


@dataclass(frozen=True)
class Launchd:
    """The user's launchd."""

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
        """Return what belongs where."""
        return {self._file: render(self.service)}

    def stale(self) -> list[Path]:
        """Return files of ours that do not belong there: none, with launchd."""
        return []

    def owns(self, path: Path) -> bool:
        """Return whether an agent is of this home's service, from whichever version of kvd."""
        words = _read(path).get("ProgramArguments")
        return isinstance(words, list) and self.service.is_run_by(words)

    def is_on_demand(self) -> bool:
        """Return whether it was installed to be started by its first client."""
        return self.owns(self._file) and "Sockets" in _read(self._file)

    def check(self) -> None:
        """Raise `ServiceError` unless the manager answers."""
        run(["launchctl", "print", self._domain])

    def activate(self) -> None:
        """Take the files that are there now, and start as they say."""
        self._boot_out()
        self._bootstrap()

    def deactivate(self) -> None:
        """Stop, and take it out of the manager's hands; the files are deleted after that."""
        self._boot_out()

    def forget(self) -> None:
        """Do nothing: launchd forgets what is booted out."""

    def start(self) -> None:
        """Start it, or listen for it."""
        if said(["launchctl", "print", self._target]) is None:
            self._bootstrap()
        elif not self.service.on_demand:
            run(["launchctl", "kickstart", self._target])

    def stop(self) -> None:
        """Finish what runs, end it, and do not listen; the next session starts it again."""
        self._boot_out()

    def restart(self) -> None:
        """End it, not longer than a stop may take, and start it again."""
        self._boot_out()
        self._bootstrap()

    def reload(self) -> None:
        """Have it read its configuration again."""
        run(["launchctl", "kill", "SIGHUP", self._target])

    def state(self) -> State:
        """Return what launchd knows of it."""
        text = said(["launchctl", "print", self._target])
        if text is None:
            return State("stopped", "launchd does not have it")
        return parse(text)

    def hint(self) -> str | None:
        """Return what would make more of the service."""
        return None

    def logs(self, lines: int, *, follow: bool) -> list[str]:
        """Return the command that shows what was said, by the daemon and before it could log."""
        home = Home(self.service.home)
        paths = [home.logs / name for name in ("launchd.log", "kvd.log")]
        return tail(paths, lines, follow=follow)

    def _bootstrap(self) -> None:
        run(["launchctl", "enable", self._target])
        run(["launchctl", "bootstrap", self._domain, str(self._file)])

    def _boot_out(self) -> None:
        """Take it out, and wait until it is gone: it finishes what runs."""
        if said(["launchctl", "bootout", self._target]) is None and not self._is_there():
            return
        most_s = self.service.stop_s + _KILL_S
        deadline = time.monotonic() + most_s
        while self._is_there():
            if time.monotonic() > deadline:
                raise ServiceError(f"{self._target} still runs after {most_s} s")
            time.sleep(_LOOK_AGAIN_S)

    def _is_there(self) -> bool:
        return said(["launchctl", "print", self._target]) is not None


def _read(path: Path) -> dict[str, Any]:
    """Return what an agent's file says; of one that is none: nothing."""
    try:
        job = plistlib.loads(path.read_bytes())
    except (OSError, ValueError, ExpatError):  # InvalidFileException is a ValueError
        return {}
    return job if isinstance(job, dict) else {}


def parse(text: str) -> State:
    """Return what `launchctl print` says of a job."""
    found = dict(re.findall(r"^\t([a-z ]+) = (.+)$", text, re.MULTILINE))
    pid = int(found["pid"]) if found.get("pid", "").isdigit() else None
    if pid is not None:
        return State("running", found.get("state", ""), pid)
    ended = found.get("last exit code", "(never exited)")
    if "sockets = {" in text:
        return State("listening", f"starts with the first client; last exit code {ended}")
    failed = ended.split(":")[0].strip() not in {"0", "(never exited)"}
    return State("failed" if failed else "stopped", f"last exit code {ended}")
