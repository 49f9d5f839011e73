"""The file with the key of encrypted record files (`protocol.record_cipher`)."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from protocol.record_file import sync_folder
from protocol.segments import PART_SUFFIX

KEY_BYTES = 32
"""Size of a key that kvd creates, and the minimum size of any other key."""
_MAX_BYTES = 4096


class UnusableKey(OSError):
    """The file exists and is no key, or other users can read it."""


def create_key(path: Path) -> None:
    """Create a random key unless the file exists; raises `OSError`.

    Only one process may call it. A link to a missing file, such as one on a volume that is not
    mounted, stays.
    """
    if os.path.lexists(path):
        return
    part = path.with_name(path.name + PART_SUFFIX)
    part.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(part, flags, 0o600)
    try:
        os.write(fd, os.urandom(KEY_BYTES))
        os.fsync(fd)
    finally:
        os.close(fd)
    part.rename(path)
    sync_folder(path.parent)


def read_key(path: Path) -> bytes:
    """Return the whole file; raises `UnusableKey` or another `OSError`."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(fd)
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise UnusableKey(f"other users can read {path}; run `chmod 600 {path}`")
        key = os.read(fd, _MAX_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    finally:
        os.close(fd)
    if not KEY_BYTES <= len(key) <= _MAX_BYTES:
        raise UnusableKey(
            f"{path} is no file of {KEY_BYTES} to {_MAX_BYTES} bytes, so it is no key. Restore it,"
            " or delete it and restart kvd: a new key is created, and stored prefixes are deleted"
        )
    return key
