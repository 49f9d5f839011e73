"""What a service manager can do for us, which one is here, and what install and uninstall are."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from protocol.errors import ServiceError

if TYPE_CHECKING:
    from kvd.service.describe import Service

Word = Literal["running", "starting", "stopping", "listening", "stopped", "failed"]


@dataclass(frozen=True)
class State:
    """What the manager knows of the service."""

    word: Word
    """``listening``: the first client starts it."""
    about: str = ""
    pid: int | None = None


class Manager(Protocol):
    """launchd or systemd, for one service."""

    @property
    def service(self) -> Service:
        """What is run."""
        ...

    @property
    def name(self) -> str:
        """What people call the manager."""
        ...

    def files(self) -> dict[Path, bytes]:
        """Return what belongs where."""
        ...

    def stale(self) -> list[Path]:
        """Return files of ours that do not belong there."""
        ...

    def is_on_demand(self) -> bool:
        """Return whether it was installed to be started by its first client."""
        ...

    def check(self) -> None:
        """Raise `ServiceError` unless the manager answers."""
        ...

    def activate(self) -> None:
        """Take the files that are there now, and start as they say."""
        ...

    def deactivate(self) -> None:
        """Stop, and take it out of the manager's hands."""
        ...

    def start(self) -> None:
        """Start it, or listen for it."""
        ...

    def stop(self) -> None:
        """Finish what runs, end it, and do not listen."""
        ...

    def restart(self) -> None:
        """End it and start it again."""
        ...

    def reload(self) -> None:
        """Have it read its configuration again."""
        ...

    def state(self) -> State:
        """Return what the manager knows of it."""
        ...

    def hint(self) -> str | None:
        """Return what would make more of the service."""
        ...

    def logs(self, lines: int, *, follow: bool) -> list[str]:
        """Return the command that shows what was said, also before the daemon could log."""
        ...


def manager_of(service: Service) -> Manager:
    """Return this machine's manager for a service."""
    if sys.platform == "darwin":
        from kvd.service.launchd import Launchd  # noqa: PLC0415 - one of the two

        return Launchd(service)
    if sys.platform == "linux":
        from kvd.service.systemd import Systemd, folder  # noqa: PLC0415 - the other

        return Systemd(service, folder())
    raise ServiceError("neither launchd nor systemd is here; have `kvd serve` started by what is")


def install(manager: Manager) -> list[Path]:
    """Write the files and start; return those that were written. Again: bring them up to date."""
    manager.check()
    files = manager.files()
    for path, content in files.items():
        _write(path, content)
    manager.activate()
    return list(files)


def uninstall(manager: Manager) -> list[Path]:
    """Stop and delete the files; return those that were there. The home stays as it is."""
    there = installed(manager)
    if there:
        manager.check()
        manager.deactivate()
        for path in there:
            path.unlink(missing_ok=True)
    return there


def installed(manager: Manager) -> list[Path]:
    """Return the service's files that are there."""
    there = [path for path in manager.files() if path.exists()]
    return [*there, *manager.stale()]


def outdated(manager: Manager) -> list[Path]:
    """Return those that are not what this version would write."""
    wanted = manager.files()
    differ = [path for path in wanted if path.exists() and path.read_bytes() != wanted[path]]
    return [*differ, *manager.stale()]


def _write(path: Path, content: bytes) -> None:
    """Replace a file at once: a manager may read it at any time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as new:
            new.write(content)
        os.chmod(new.name, 0o644)  # noqa: PTH101 - managers refuse files that others may write
        os.replace(new.name, path)  # noqa: PTH105 - both are names
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror or error}") from error
