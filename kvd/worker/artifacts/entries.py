"""Files in the user's cache folder that only this user can have written.

An entry is one file: the SHA-256 of its content, then the content. Its name is a digest of
everything that the content depends on, so an entry is either right or absent. Entries are read in
full and verified. Whatever fails (damage, another owner, wrong permissions) is deleted and counts
as absent. A folder that cannot be used costs time only: it is logged once, and nothing is kept.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import platformdirs

from protocol import atomic_file

_DIGEST_BYTES = 32
_log = logging.getLogger(__name__)


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache. Raises ``RuntimeError`` if the user has no home."""
    return platformdirs.user_cache_path("kvd").absolute() / name


def digest_of(*parts: str) -> str:
    """Return a name for what depends on exactly these texts: 32 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass")
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:32]


def check_owner(path: Path) -> None:
    """Raise ``PermissionError`` for content that other users could have written."""
    found = path.stat()
    if found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise PermissionError(f"{path} belongs to another user, or others can write to it")


def make_private(folder: Path) -> None:
    """Create a folder and its parent for this user only. Raises ``OSError``.

    If the parent exists and is this user's, others' write access is removed from it.
    """
    for path in (folder.parent, folder):
        # One by one: `mkdir` applies the mode to the last folder only.
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path is not folder:
            _close_to_others(path)
        check_owner(path)


def _close_to_others(folder: Path) -> None:
    """Remove others' write access. With a umask of 002, other parts of kvd create it with that."""
    found = folder.stat()
    if found.st_uid == os.getuid() and found.st_mode & 0o022:
        folder.chmod(found.st_mode & 0o7755)


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically, for this user only. Raises ``OSError``.

    Content that a crash of the machine damaged is found when it is read.
    """
    make_private(path.parent)
    atomic_file.write(path, content, sync=False)


@dataclass(frozen=True)
class Entries:
    """The entries of one folder, at most ``most_bytes``; deletes the least recently used first."""

    folder: Path
    most_bytes: int

    def get(self, name: str) -> bytes | None:
        """Return an entry's content; None if it is absent or was not usable."""
        path = self.folder / name
        try:
            content = _read(path)
            if content is not None:
                with contextlib.suppress(OSError):  # the disk may be read-only
                    os.utime(path)  # the time of use orders the entries
        except FileNotFoundError:
            return None
        except OSError as error:
            _log_once(str(error))
            return None
        if content is None:
            _log.warning("deleting %s: it is damaged, or others could have written it", path)
            with contextlib.suppress(OSError):
                path.unlink()
        return content

    def put(self, name: str, content: bytes) -> None:
        """Store an entry, unless the folder cannot be used."""
        try:
            write_private(self.folder / name, hashlib.sha256(content).digest() + content)
            self._bound()
        except OSError as error:
            _log_once(str(error))

    def names(self) -> list[str]:
        """Return the names of all entries, usable or not."""
        try:
            found = [entry.name for entry in os.scandir(self.folder) if entry.is_file()]
        except OSError:
            return []
        return sorted(name for name in found if not name.startswith("."))

    def _bound(self) -> None:
        found = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):  # another process deleted it
                about = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(about.st_mode):
                    found.append((about.st_mtime_ns, about.st_size, entry.path))
        left = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if left <= self.most_bytes:
                return
            Path(path).unlink(missing_ok=True)
            left -= size


def _read(path: Path) -> bytes | None:
    """Return verified content; None if it must not be trusted. Raises ``OSError``."""
    check_owner(path.parent)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise
    except OSError:
        return None  # a link, or not readable
    with os.fdopen(handle, "rb") as file:
        about = os.fstat(handle)
        owned = about.st_uid == os.getuid() and not about.st_mode & 0o022
        if not owned or not stat.S_ISREG(about.st_mode):
            return None
        data = file.read()
    digest, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return content if hashlib.sha256(content).digest() == digest else None


@functools.cache
def _log_once(reason: str) -> None:
    _log.info("the next load will be as slow as this one, because nothing can be kept: %s", reason)
