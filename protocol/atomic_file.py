"""Replaces files atomically, for readers and against crashes of the writer."""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from pathlib import Path

_SUFFIX = ".kvd-new"
"""Suffix that only kvd uses, so a file with it and without a writer may be removed."""


def write(path: Path, content: bytes, *, mode: int = 0o600, sync: bool = True) -> None:
    """Replace a file's content in one rename; readers find the old content or the new one.

    The new file has a random name next to the file until then, and is locked while its writer
    lives. New files that killed writers left in the folder are removed first. The folder must
    exist. Raises `OSError`; the file is unchanged then.

    ``sync``: whether the content is on the disk before the rename. Without that, a crash of the
    machine can leave a file without its content.
    """
    _remove_stale(path.parent)
    handle, new = _new_file(path.parent, f".{path.name}.")
    with os.fdopen(handle, "wb") as file:
        try:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            file.flush()
            if sync:
                os.fsync(file.fileno())
            new.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                new.unlink()
            raise


def _new_file(folder: Path, prefix: str) -> tuple[int, Path]:
    """Create and lock a new file; return its descriptor and path. Raises `OSError`."""
    while True:
        handle, name = tempfile.mkstemp(prefix=prefix, suffix=_SUFFIX, dir=folder)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        # Another writer may have found it without a lock, and removed it.
        if os.fstat(handle).st_nlink:
            return handle, Path(name)
        os.close(handle)


def _remove_stale(folder: Path) -> None:
    """Remove new files whose writer is gone: their locks are free."""
    for path in folder.iterdir():
        if path.suffix != _SUFFIX:
            continue
        with contextlib.suppress(OSError):  # locked, or removed in the meantime
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)
