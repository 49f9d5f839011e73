"""Where kvd keeps its things: one folder, private to its user.

Covers the paths, the folder's mode and the limit on socket paths. Does not open, lock or
listen: that is `kvd.host.listen`.
"""

from __future__ import annotations

import errno
import os
import shlex
import stat
import sys
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import ConfigError

SOCKET_PATH_LIMIT = 103 if sys.platform == "darwin" else 107
"""Bytes in `sun_path`, less the closing zero: 104 on macOS, 108 on Linux."""


_OURS = {
    "kvd.sock", "http.sock", "kvd.lock", "config.toml", "logs", "cache", "models", "calibration",
    "chat_history", "journal", "swap", ".DS_Store",
}  # fmt: skip
"""What may lie in a home before its first start: `config.toml` and `models` are the user's."""


@dataclass(frozen=True)
class Home:
    """The folder and the places in it."""

    root: Path

    @property
    def socket(self) -> Path:
        """The Unix socket, mode 0600."""
        return self.root / "kvd.sock"

    @property
    def http_socket(self) -> Path:
        """The same for HTTP."""
        return self.root / "http.sock"

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

    @property
    def journal(self) -> Path:
        """The folder of requests that outlive the daemon, with ``journal = "disk"``."""
        return self.root / "journal"

    @property
    def chat_history(self) -> Path:
        """What was typed in `kvctl chat`."""
        return self.root / "chat_history"

    @property
    def swap(self) -> Path:
        """The folder of rows that gave their memory back, a folder a model; workers clear it."""
        return self.root / "swap"

    @property
    def calibration(self) -> Path:
        """The folder of what `kvctl calibrate` has found, a file a model."""
        return self.root / "calibration"

    def create(self) -> None:
        """Make the folders, private to the user; an existing home of ours is made private.

        A folder that is there and is no home of kvd stays as it is: `ConfigError`.
        """
        try:
            self._check_root()
            for folder in (self.root, self.logs, self.cache):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if self.root.stat().st_mode & 0o077:
                self.root.chmod(0o700)
        except OSError as error:
            raise unusable(self.root, error) from error

    def _check_root(self) -> None:
        """Refuse a folder of somebody else's, or one that holds something else."""
        if not self.root.exists():
            return
        found = self.root.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"{self.root} belongs to another user (uid {found.st_uid}); "
                "give kvd a folder of your own with KVD_HOME or --home",
                key="home",
            )
        strange = sorted({entry.name for entry in self.root.iterdir()} - _OURS)
        if strange and not self.lock.exists():
            raise ConfigError(
                f"{self.root} holds other things ({strange[0]}) and was never a home of kvd; give "
                "a new or an empty folder with KVD_HOME or --home, or, if it is to be this one, "
                f"`touch {shlex.quote(str(self.lock))}`",
                key="home",
            )


def locate(explicit: str | os.PathLike[str] | None = None) -> Home:
    """Return the home: what the caller says, else ``KVD_HOME``, else ``~/.kvd``."""
    chosen = explicit or os.environ.get("KVD_HOME") or "~/.kvd"
    # os.path keeps symlinks, and leaves `~nobody` as it is.
    return Home(Path(os.path.abspath(os.path.expanduser(chosen))))  # noqa: PTH100, PTH111


def unusable(path: Path, error: OSError) -> ConfigError:
    """Return the error for a part of the home that the system does not let us use."""
    return ConfigError(
        f"cannot use {path}: {error.strerror or error}; set KVD_HOME or --home", key="home"
    )


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
