"""The daemon's home: its paths, its mode, and the limit on socket paths."""

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
"""Size of `sun_path` without the final zero byte: 104 on macOS, 108 on Linux."""
_OURS = {
    "kvd.sock", "http.sock", "kvd.lock", "config.toml", "logs", "cache", "models", "calibration",
    "chat_history", "journal", "swap", "prefixes", "prefixes.key", ".DS_Store",
}  # fmt: skip
"""Names that may exist in a home before the first start, such as the user's `config.toml`."""


@dataclass(frozen=True)
class _PathBelow:
    """A path in the home."""

    name: str

    def __get__(self, home: Home, _: type[Home]) -> Path:
        return home.root / self.name


@dataclass(frozen=True)
class Home:
    """The home folder and the paths in it."""

    root: Path

    socket = _PathBelow("kvd.sock")
    """The Unix socket of the protocol, mode 0600."""
    http_socket = _PathBelow("http.sock")
    """The Unix socket of HTTP, mode 0600."""
    lock = _PathBelow("kvd.lock")
    """The file that the daemon keeps locked while it runs."""
    config = _PathBelow("config.toml")
    logs = _PathBelow("logs")
    """The folder of `kvd.log` and its rotated files."""
    cache = _PathBelow("cache")
    """Files that may be deleted while no daemon runs."""
    journal = _PathBelow("journal")
    """The folder of the journal, with ``journal = "disk"``."""
    chat_history = _PathBelow("chat_history")
    swap = _PathBelow("swap")
    """The folder of swapped-out rows, with a folder per model that its worker clears."""
    prefixes = _PathBelow("prefixes")
    """The folder of the prefix store."""
    key_file = _PathBelow("prefixes.key")
    """The key of encrypted segments."""
    calibration = _PathBelow("calibration")
    """The results of `kvctl calibrate`, one file per model."""

    def create(self) -> None:
        """Create the folders, private to the user; an existing home is made private.

        Raises `ConfigError` for an existing folder that is not a home of kvd, without changing it.
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
        if not self.root.exists():
            return
        found = self.root.stat()
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"{self.root} belongs to another user (uid {found.st_uid}); "
                "choose a folder of your own with KVD_HOME or --home",
                key="home",
            )
        strange = sorted({entry.name for entry in self.root.iterdir()} - _OURS)
        if strange and not self.lock.exists():
            raise ConfigError(
                f"{self.root} contains other files ({strange[0]}) and is not a home of kvd; choose "
                "a new or empty folder with KVD_HOME or --home, or make this one a home with "
                f"`touch {shlex.quote(str(self.lock))}`",
                key="home",
            )


def locate(explicit: str | os.PathLike[str] | None = None) -> Home:
    chosen = explicit or os.environ.get("KVD_HOME") or "~/.kvd"
    # os.path keeps symlinks, and leaves the names of unknown users unchanged.
    return Home(Path(os.path.abspath(os.path.expanduser(chosen))))  # noqa: PTH100, PTH111


def unusable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot use {path}: {error.strerror or error}; set KVD_HOME or --home", key="home"
    )


def check_socket_path(path: Path) -> Path:
    """Return the path; raises `ConfigError` if it is too long for a Unix socket."""
    size = len(os.fsencode(path))
    if size > SOCKET_PATH_LIMIT:
        raise ConfigError(
            f"the socket's path has {size} bytes, but this system allows only "
            f"{SOCKET_PATH_LIMIT}: {path}; choose a shorter KVD_HOME",
            key="home",
        )
    return path
