"""Installs, updates and uninstalls the service through launchd or systemd (`Manager`)."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from protocol import atomic_file
from protocol.errors import ServiceError

if TYPE_CHECKING:
    from kvd.service.describe import Service, State


class Manager(Protocol):
    """launchd or systemd, for one service."""

    @property
    def service(self) -> Service: ...

    @property
    def name(self) -> str: ...

    def files(self) -> dict[Path, bytes]: ...

    def stale(self) -> list[Path]:
        """Return existing files of this service that `files` does not contain."""

    def owns(self, path: Path) -> bool:
        """Return whether a file belongs to this home's service, from any version of kvd."""

    def is_on_demand(self) -> bool:
        """Return whether the installed service starts with its first client."""

    def check(self) -> None:
        """Raise `ServiceError` unless the manager answers."""

    def activate(self) -> None:
        """Load the current files, and start the service."""

    def deactivate(self) -> None:
        """Stop and unload the service, before its files are deleted."""

    def forget(self) -> None:
        """Make the manager notice that the files are deleted."""

    def start(self) -> None:
        """Start the daemon, or listen for its first client."""

    def stop(self) -> None:
        """Drain and stop the daemon, and stop listening until the next session."""

    def restart(self) -> None: ...

    def reload(self) -> None: ...

    def state(self) -> State: ...

    def hint(self) -> str | None: ...

    def logs(self, lines: int, *, follow: bool) -> list[str]:
        """Return the command that shows the log, including errors before the daemon could log."""


def manager_of(service: Service) -> Manager:
    if sys.platform == "darwin":
        from kvd.service.launchd import Launchd  # noqa: PLC0415 - only on macOS

        return Launchd(service)
    if sys.platform == "linux":
        from kvd.service.systemd import Systemd, folder  # noqa: PLC0415 - only on Linux

        return Systemd(service, folder())
    raise ServiceError(
        "this system has neither launchd nor systemd; start `kvd serve` with its service manager"
    )


def install(manager: Manager, *, force: bool = False) -> list[Path]:
    """Write the files and start the service; return the files. Updates an installed service.

    ``force`` also replaces files that are not kvd's, but never links.
    """
    refuse_foreign(manager, force=force)
    manager.check()
    files = manager.files()
    for path, content in files.items():
        _write(path, content)
    manager.activate()
    return list(files)


def uninstall(manager: Manager) -> list[Path]:
    """Stop the service and delete its files; return the files. The home is not touched."""
    refuse_foreign(manager)
    existing = installed(manager)
    if existing:
        manager.check()
        manager.deactivate()
        for path in existing:
            path.unlink(missing_ok=True)
        manager.forget()
    return existing


def installed(manager: Manager) -> list[Path]:
    existing = [path for path in manager.files() if manager.owns(path)]
    return [*existing, *manager.stale()]


def foreign(manager: Manager) -> list[Path]:
    """Return files at the service's paths that do not belong to kvd."""
    existing = [path for path in manager.files() if os.path.lexists(path)]
    return [path for path in existing if path.is_symlink() or not manager.owns(path)]


def refuse_foreign(manager: Manager, *, force: bool = False) -> None:
    """Raise `ServiceError` if there are `foreign` files; with ``force``, only for links."""
    for path in foreign(manager):
        if path.is_symlink() or not force:
            raise ServiceError(describe_foreign(path))


def describe_foreign(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which kvd does not replace: remove it"
    return f"{path} does not belong to this home's service: move it away, or install with --force"


def outdated(manager: Manager) -> list[Path]:
    """Return installed files that this version would write differently, or not at all."""
    wanted = manager.files()
    differ = [path for path in wanted if manager.owns(path) and path.read_bytes() != wanted[path]]
    return [*differ, *manager.stale()]


def _write(path: Path, content: bytes) -> None:
    """Replace a file atomically, because the manager may read it at any time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_file.write(path, content, mode=0o644)  # managers refuse files that others can write
    except OSError as error:
        raise ServiceError(f"cannot write {path}: {error.strerror or error}") from error
