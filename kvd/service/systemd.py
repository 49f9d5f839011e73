"""systemd's side: user units, and `systemctl --user`. `render` is pure."""

from __future__ import annotations

import getpass
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from kvd.host import files
from kvd.host.exits import Exit
from kvd.host.home import Home
from kvd.service.commands import run, said, tail
from kvd.service.describe import Service
from kvd.service.managing import State, Word
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

# After a crash, and not where the next start would find the same: usage, a second daemon, config.
Restart=on-failure
RestartSec=2
RestartPreventExitStatus={hopeless}

# Only the daemon is told to stop: it finishes what runs, and ends its workers.
KillMode=mixed
TimeoutStartSec=60
TimeoutStopSec={stop_s}
# Its event loop says that it turns.
WatchdogSec=60
# A worker that the kernel kills for memory is replaced; its siblings go on.
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
_WORDS: dict[str, Word] = {
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
        hopeless=" ".join(str(int(one)) for one in (Exit.USAGE, Exit.ALREADY_RUNNING, Exit.CONFIG)),
        stop_s=service.stop_s,
    )
    if not service.on_demand:
        return {name: text + _WANTED_BY.format(target="default.target")}
    sockets = _sockets(service, name)
    text = text.replace("[Service]\n", f"[Service]\nSockets={' '.join(sockets)}\n", 1)
    return {name: text} | sockets


def _sockets(service: Service, name: str) -> dict[str, str]:
    ours, *others = (f"ListenStream={_escaped(str(path))}" for path in service.sockets)
    for address, port in service.http:
        others.append(f"ListenStream={f'[{address}]' if ':' in address else address}:{port}")
    said_of = {f"{service.name}.socket": ("kvd", "the socket", [ours])}
    if others:
        said_of[f"{service.name}-http.socket"] = ("http", "HTTP sockets", others)
    return {
        unit: _SOCKET.format(
            what=what,
            home=_escaped(str(service.home)),
            listen="\n".join(listen),
            name=fd_name,
            service=name,
        )
        + _WANTED_BY.format(target="sockets.target")
        for unit, (fd_name, what, listen) in said_of.items()
    }


def _quoted(word: str, *, commands: bool = True) -> str:
    """Return a word as systemd reads it back; only in commands does it know of variables."""
    for special, plain in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        if special != "$" or commands:
            word = word.replace(special, plain)
    return f'"{word}"'


def _words(line: str) -> list[str]:
    """Return the words of a unit's command, as they were quoted."""
    key, _, value = line.partition("=")
    try:
        words = shlex.split(value) if key == "ExecStart" else []
    except ValueError:
        return []
    return [word.replace("%%", "%").replace("$$", "$") for word in words]


def _unix_sockets(service: Service) -> tuple[Path, Path]:
    home = Home(service.home)
    return home.socket, home.http_socket


def _escaped(path: str) -> str:
    """Return a path that stands alone in its line."""
    return path.replace("%", "%%")


@dataclass(frozen=True)
class Systemd:
    """The user's systemd."""

    service: Service
    folder: Path
    name: str = "systemd"

    def files(self) -> dict[Path, bytes]:
        """Return what belongs where."""
        return {self.folder / name: text.encode() for name, text in units(self.service).items()}

    def stale(self) -> list[Path]:
        """Return files of ours that do not belong there: of the other way to be started."""
        name = self.service.name
        ours = [f"{name}.service", f"{name}.socket", f"{name}-http.socket"]
        wanted = self.files()
        there = [path for one in ours if (path := self.folder / one) not in wanted]
        return [path for path in there if self.owns(path) and not path.is_symlink()]

    def owns(self, path: Path) -> bool:
        """Return whether a unit is of this home's service, from whichever version of kvd."""
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError):
            return False
        if path.suffix == ".socket":
            mine = [f"ListenStream={_escaped(str(one))}" for one in _unix_sockets(self.service)]
            return f"Service={self._unit}" in lines and any(one in lines for one in mine)
        return any(self.service.is_run_by(_words(line)) for line in lines)

    def is_on_demand(self) -> bool:
        """Return whether it was installed to be started by its first client."""
        return self.owns(self.folder / f"{self.service.name}.socket")

    def check(self) -> None:
        """Raise `ServiceError` unless the manager answers."""
        try:
            run([*_CTL, "show-environment"])
        except ServiceError as error:
            raise ServiceError(
                "no systemd user manager answers; log in as the user itself (not by `su` or "
                f"`sudo`), so that there is one ({error.message})"
            ) from error

    def activate(self) -> None:
        """Take the files that are there now, and start as they say."""
        if gone := self.stale():
            run([*_CTL, "disable", "--now", *(path.name for path in gone)])
            for path in gone:
                path.unlink()
        run([*_CTL, "daemon-reload"])
        if self.service.on_demand:
            # The link that starts it with the session stays from the other way, unless we say so.
            run([*_CTL, "disable", self._unit])
        run([*_CTL, "enable", *self._started])
        said([*_CTL, "reset-failed", self._unit])
        # A daemon that has bound its sockets itself keeps systemd from doing it.
        run([*_CTL, "stop", self._unit])
        run([*_CTL, "restart", *self._started])

    def deactivate(self) -> None:
        """Stop, and take it out of the manager's hands; the files are deleted after that."""
        there = [path.name for path in [*self.files(), *self.stale()] if path.exists()]
        if there:
            run([*_CTL, "disable", "--now", *there])
            said([*_CTL, "stop", self._unit])  # nobody enables the daemon of a socket

    def forget(self) -> None:
        """Have systemd see that the files are gone; one that failed stays listed otherwise."""
        run([*_CTL, "daemon-reload"])
        said([*_CTL, "reset-failed", self._unit])

    def start(self) -> None:
        """Start it, or listen for it."""
        run([*_CTL, "start", *self._started])

    def stop(self) -> None:
        """Finish what runs, end it, and do not listen; the next session starts it again."""
        sockets = [path.name for path in self.files() if path.suffix == ".socket"]
        run([*_CTL, "stop", *sockets, self._unit])

    def restart(self) -> None:
        """End it, not longer than a stop may take, and start it again."""
        run([*_CTL, "restart", self._unit])

    def reload(self) -> None:
        """Have it read its configuration again."""
        run([*_CTL, "reload", self._unit])

    def state(self) -> State:
        """Return what systemd knows of it."""
        shown = "ActiveState,SubState,MainPID,StatusText,Result,ExecMainStatus,LoadState"
        text = said([*_CTL, "show", f"--property={shown}", self._unit]) or ""
        found = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        return self._state_of(found)

    def _state_of(self, found: dict[str, str]) -> State:
        pid = int(found.get("MainPID") or 0) or None
        state = _WORDS.get(found.get("ActiveState", ""), "stopped")
        if state == "stopped" and self.service.on_demand and self._listens():
            return State("listening", "starts with the first client")
        about = found.get("StatusText", "") if pid else ""
        if state == "failed" or found.get("SubState") == "auto-restart":
            about = f"{found.get('Result', '')}, exit status {found.get('ExecMainStatus', '')}"
        if found.get("LoadState") == "not-found":
            about = "systemd does not have it"
        return State(state, about, pid)

    def _listens(self) -> bool:
        return said([*_CTL, "is-active", f"{self.service.name}.socket"]) is not None

    def hint(self) -> str | None:
        """Return what would make more of the service."""
        user = getpass.getuser()
        if Path("/var/lib/systemd/linger", user).exists():
            return None
        return f"it ends with your last session; `loginctl enable-linger {user}` lets it stay"

    def logs(self, lines: int, *, follow: bool) -> list[str]:
        """Return the command that shows what was said, by the daemon and by systemd."""
        journal = ["journalctl", "--user", "--quiet", "--no-pager", "--output=cat"]
        journal.append(f"--unit={self._unit}")
        if not _has_words([*journal, "--lines=1"]):
            # No journal, or one that forgets, and would say nothing for ever: the daemon's own log.
            return tail([Home(self.service.home).logs / "kvd.log"], lines, follow=follow)
        return [*journal, f"--lines={lines}", *(["--follow"] if follow else [])]

    @property
    def _unit(self) -> str:
        return f"{self.service.name}.service"

    @property
    def _started(self) -> list[str]:
        """What the session starts."""
        if not self.service.on_demand:
            return [self._unit]
        return [path.name for path in self.files() if path.suffix == ".socket"]


_CTL = ["systemctl", "--user"]


def _has_words(command: list[str]) -> bool:
    try:
        return bool(said(command))
    except ServiceError:  # there is no such program
        return False


def folder() -> Path:
    """Return where the user's units lie."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "systemd" / "user"
