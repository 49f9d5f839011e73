"""systemd: user units, and `systemctl --user`. `units` is pure."""

from __future__ import annotations

import contextlib
import getpass
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from kvd.host import files
from kvd.host.exits import Exit
from kvd.host.home import Home
from kvd.service.commands import output, run, tail
from kvd.service.describe import Service, State, Status
from protocol.errors import ServiceError

_SERVICE = """\
[Unit]
Description=kvd, language models under one memory budget ({home})
StartLimitIntervalSec=60
StartLimitBurst=5

[Service]
Type=notify
NotifyAccess=main
ExecStart={command}
ExecReload=/bin/kill -HUP $MAINPID
{environment}\
WorkingDirectory={home}
UMask=0077
LimitNOFILE={files}

# Restart after a crash, except after errors that the next start would hit again: usage, a second
# daemon, configuration.
Restart=on-failure
RestartSec=2
RestartPreventExitStatus={permanent}

# Only the daemon gets SIGTERM. It finishes running requests and ends its workers.
KillMode=mixed
TimeoutStartSec=60
TimeoutStopSec={stop_s}
# The daemon's event loop sends keepalives.
WatchdogSec=60
# If the kernel kills a worker for memory, the daemon replaces it. The other workers continue.
OOMPolicy=continue

NoNewPrivileges=yes
LockPersonality=yes
RestrictRealtime=yes
RestrictSUIDSGID=yes
SystemCallArchitectures=native
"""
_WANTED_BY = """
[Install]
WantedBy={target}
"""
_SOCKET = """\
[Unit]
Description={what} of kvd ({home})

[Socket]
{listen}
SocketMode=0600
DirectoryMode=0700
FileDescriptorName={name}
Service={service}
RemoveOnStop=yes
"""
_CTL = ["systemctl", "--user"]
_STATUS: dict[str, Status] = {
    "active": "running",
    "reloading": "running",
    "activating": "starting",
    "deactivating": "stopping",
    "failed": "failed",
}


def units(service: Service) -> dict[str, str]:
    """Return the unit files by name; the first one is the daemon's."""
    name = f"{service.name}.service"
    text = _SERVICE.format(
        home=_escaped(str(service.home)),
        command=" ".join(_quoted(word) for word in service.command),
        environment="".join(
            f"Environment={_quoted(f'{key}={value}', commands=False)}\n"
            for key, value in service.variables.items()
        ),
        files=files.WANTED,
        permanent=f"{Exit.USAGE:d} {Exit.ALREADY_RUNNING:d} {Exit.CONFIG:d}",
        stop_s=service.stop_s,
    )
    if not service.on_demand:
        return {name: text + _WANTED_BY.format(target="default.target")}
    sockets = _sockets(service, name)
    text = text.replace("[Service]\n", f"[Service]\nSockets={' '.join(sockets)}\n", 1)
    return {name: text} | sockets


def _sockets(service: Service, name: str) -> dict[str, str]:
    protocol, *http = (f"ListenStream={_escaped(str(path))}" for path in service.sockets)
    for address, port in service.http:
        http.append(f"ListenStream={f'[{address}]' if ':' in address else address}:{port}")
    sockets = {f"{service.name}.socket": ("kvd", "the socket", [protocol])}
    if http:
        sockets[f"{service.name}-http.socket"] = ("http", "HTTP sockets", http)
    return {
        unit: _SOCKET.format(
            what=what,
            home=_escaped(str(service.home)),
            listen="\n".join(listen),
            name=fd_name,
            service=name,
        )
        + _WANTED_BY.format(target="sockets.target")
        for unit, (fd_name, what, listen) in sockets.items()
    }


def _quoted(word: str, *, commands: bool = True) -> str:
    """Quote a word for a unit file; systemd expands variables only in commands."""
    for special, plain in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        if special != "$" or commands:
            word = word.replace(special, plain)
    return f'"{word}"'


def _words(line: str) -> list[str]:
    """Return the words of an ``ExecStart=`` line, unquoted; an empty list for other lines."""
    key, _, value = line.partition("=")
    try:
        words = shlex.split(value) if key == "ExecStart" else []
    except ValueError:
        return []
    return [word.replace("%%", "%").replace("$$", "$") for word in words]


def _escaped(path: str) -> str:
    return path.replace("%", "%%")


@dataclass(frozen=True)
class Systemd:
    """The user's systemd; `kvd.service.installer.Manager` describes the methods."""

    service: Service
    folder: Path
    name: str = "systemd"

    def files(self) -> dict[Path, bytes]:
        return {self.folder / name: text.encode() for name, text in units(self.service).items()}

    def stale(self) -> list[Path]:
        """Return leftover units from before ``on_demand`` was changed."""
        name = self.service.name
        units_of_kvd = [f"{name}.service", f"{name}.socket", f"{name}-http.socket"]
        wanted = self.files()
        others = [path for unit in units_of_kvd if (path := self.folder / unit) not in wanted]
        return [path for path in others if self.owns(path) and not path.is_symlink()]

    def owns(self, path: Path) -> bool:
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return False
        if path.suffix == ".socket":
            home = Home(self.service.home)
            sockets = [home.socket, home.http_socket]
            listens = any(f"ListenStream={_escaped(str(path))}" in lines for path in sockets)
            return f"Service={self._unit}" in lines and listens
        return any(self.service.is_run_by(_words(line)) for line in lines)

    def is_on_demand(self) -> bool:
        return self.owns(self.folder / f"{self.service.name}.socket")

    def check(self) -> None:
        try:
            run([*_CTL, "show-environment"])
        except ServiceError as error:
            raise ServiceError(
                "no systemd user manager answers; log in directly as this user, because `su` and "
                f"`sudo` start none ({error.message})"
            ) from error

    def activate(self) -> None:
        if gone := self.stale():
            run([*_CTL, "disable", "--now", *(path.name for path in gone)])
            for path in gone:
                path.unlink()
        run([*_CTL, "daemon-reload"])
        if self.service.on_demand:
            # Remove the link of an earlier install that started the daemon with the session.
            run([*_CTL, "disable", self._unit])
        run([*_CTL, "enable", *self._started])
        output([*_CTL, "reset-failed", self._unit])
        # systemd cannot bind the sockets while a running daemon holds them.
        run([*_CTL, "stop", self._unit])
        run([*_CTL, "restart", *self._started])

    def deactivate(self) -> None:
        existing = [path.name for path in [*self.files(), *self.stale()] if path.exists()]
        if existing:
            run([*_CTL, "disable", "--now", *existing])
            # With sockets, the daemon's unit is not enabled, so `disable --now` does not stop it.
            output([*_CTL, "stop", self._unit])

    def forget(self) -> None:
        run([*_CTL, "daemon-reload"])
        output([*_CTL, "reset-failed", self._unit])  # a failed unit would stay listed

    def start(self) -> None:
        run([*_CTL, "start", *self._started])

    def stop(self) -> None:
        run([*_CTL, "stop", *self._sockets, self._unit])

    def restart(self) -> None:
        run([*_CTL, "restart", self._unit])

    def reload(self) -> None:
        run([*_CTL, "reload", self._unit])

    def state(self) -> State:
        names = "ActiveState,SubState,MainPID,StatusText,Result,ExecMainStatus,LoadState"
        text = output([*_CTL, "show", f"--property={names}", self._unit]) or ""
        found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        pid = int(found.get("MainPID") or 0) or None
        status = _STATUS.get(found.get("ActiveState", ""), "stopped")
        is_active = [*_CTL, "is-active", f"{self.service.name}.socket"]
        if status == "stopped" and self.service.on_demand and output(is_active) is not None:
            return State("listening", "starts with the first client")
        details = found.get("StatusText", "") if pid else ""
        if status == "failed" or found.get("SubState") == "auto-restart":
            details = f"{found.get('Result', '')}, exit status {found.get('ExecMainStatus', '')}"
        if found.get("LoadState") == "not-found":
            details = "not loaded into systemd"
        return State(status, details, pid)

    def hint(self) -> str | None:
        user = getpass.getuser()
        if Path("/var/lib/systemd/linger", user).exists():
            return None
        return f"kvd ends with your last session; `loginctl enable-linger {user}` keeps it running"

    def logs(self, lines: int, *, follow: bool) -> list[str]:
        journal = ["journalctl", "--user", "--quiet", "--no-pager", "--output=cat"]
        journal.append(f"--unit={self._unit}")
        with contextlib.suppress(ServiceError):  # journalctl is not installed
            if output([*journal, "--lines=1"]):
                return [*journal, f"--lines={lines}", *(["--follow"] if follow else [])]
        # Without a persistent journal, show the daemon's own log.
        return tail([Home(self.service.home).logs / "kvd.log"], lines, follow=follow)

    @property
    def _unit(self) -> str:
        return f"{self.service.name}.service"

    @property
    def _sockets(self) -> list[str]:
        return [path.name for path in self.files() if path.suffix == ".socket"]

    @property
    def _started(self) -> list[str]:
        return self._sockets if self.service.on_demand else [self._unit]


def folder() -> Path:
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "systemd" / "user"
