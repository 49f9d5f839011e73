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

    def owns(self, path: Path) -> bool:
        """Return whether a file is of this home's service, from whichever version of kvd."""
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

    def forget(self) -> None:
        """Have the manager see that the files are gone."""
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


def install(manager: Manager, *, force: bool = False) -> list[Path]:
    """Write the files and start; return those that were written. Again: bring them up to date.

    `force`: also in the place of files that are somebody else's; never in that of a link.
    """
    refuse_foreign(manager, force=force)
    manager.check()
    files = manager.files()
    for path, content in files.items():
        _write(path, content)
    manager.activate()
    return list(files)


def uninstall(manager: Manager) -> list[Path]:
    """Stop and delete the files; return those that were there. The home stays as it is."""
    refuse_foreign(manager)
    there = installed(manager)
    if there:
        manager.check()
        manager.deactivate()
        for path in there:
            path.unlink(missing_ok=True)
        manager.forget()
    return there


def installed(manager: Manager) -> list[Path]:
    """Return the service's files that are there."""
    there = [path for path in manager.files() if manager.owns(path)]
    return [*there, *manager.stale()]


def foreign(manager: Manager) -> list[Path]:
    """Return what is in the place of the service's files and not kvd's to replace or delete."""
    there = [path for path in manager.files() if os.path.lexists(path)]
    return [path for path in there if path.is_symlink() or not manager.owns(path)]


def refuse_foreign(manager: Manager, *, force: bool = False) -> None:
    """Raise `ServiceError` if there is any; with `force`, only where a link is."""
    for path in foreign(manager):
        if path.is_symlink() or not force:
            raise ServiceError(whose(path))


def whose(path: Path) -> str:
    """Say why a file is left alone."""
    if path.is_symlink():
        return (
            f"{path} is a link to {path.readlink()}, not kvd's to replace or delete: take it away"
        )
    return f"{path} is not of this home's service: move it away, or install with --force"


def outdated(manager: Manager) -> list[Path]:
    """Return those that are not what this version would write."""
    wanted = manager.files()
    differ = [path for path in wanted if manager.owns(path) and path.read_bytes() != wanted[path]]
    return [*differ, *manager.stale()]


def _write(path: Path, content: bytes) -> None:
    """Replace a file at once: a manager may read it at any time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as new:
            try:
                new.write(content)
                new.flush()
                os.chmod(new.name, 0o644)  # noqa: PTH101 - managers refuse what others may write
                os.replace(new.name, path)  # noqa: PTH105 - both are names
            except OSError:
                Path(new.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror or error}") from error
