"""Where kvd keeps its things: one folder, private to its user.

Covers the paths, the folder's mode and the limit on socket paths. Does not open, lock or
listen: that is `kvd.listen`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError

SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107
"""Bytes in `sun_path`, less the closing zero: 104 on macOS, 108 on Linux."""


@dataclass(frozen=True)
class Home:
    """The folder and the places in it."""

    root: Path

    @property
    def socket(self) -> Path:
        """The Unix socket, mode 0600."""
        return self.root / "kvd.sock"

    @property
    def lock(self) -> Path:
        """The file that the daemon holds locked for life."""
        return self.root / "kvd.lock"

    @property
    def config(self) -> Path:
        """The configuration, if there is one."""
        return self.root / "config.toml"

    @property
    def logs(self) -> Path:
        """The folder of `kvd.log` and its older generations."""
        return self.root / "logs"

    @property
    def cache(self) -> Path:
        """The folder of everything that may be deleted while no daemon runs."""
        return self.root / "cache"

    def create(self) -> None:
        """Make the folders, private to the user; an existing root is made private."""
        try:
            for folder in (self.root, self.logs, self.cache):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.root.stat().st_mode & 0o077:
                self.root.chmod(0o700)
        except OSError as error:
            raise ConfigError(
                f"cannot use {self.root} as home: {error.strerror}; set KVD_HOME or --home",
                key="home",
            ) from error


def locate(explicit: str | os.PathLike[str] | None = None) -> Home:
    """Return the home: what the caller says, else ``KVD_HOME``, else ``~/.kvd``."""
    chosen = explicit or os.environ.get("KVD_HOME") or "~/.kvd"
    return Home(Path(os.path.abspath(Path(chosen).expanduser())))  # noqa: PTH100 - keeps symlinks


def check_socket_path(path: Path) -> Path:
    """Return the path, or say that the system cannot bind or connect to one so long."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"the socket's path has {size} bytes, and this system allows {SOCKET_PATH_LIMIT}: "
            f"{path}; choose a shorter KVD_HOME",
            key="home",
        )
    return path
