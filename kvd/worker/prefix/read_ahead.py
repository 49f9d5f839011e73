"""Asks the operating system to read files into its page cache, ahead of their use."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

PIECE_BYTES = 128 * 1024
"""Bytes that the system is asked for at once. Linux shortens a request to the device's read-ahead,
which is 128 KiB by default."""


class ReadAhead:
    """Asks for files, one after another, in a thread. It takes no memory of this process.

    A missing or unreadable file ends it. So does `close`, once the present call returns.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = tuple(paths)
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="segment-reader", daemon=True)
        with contextlib.suppress(RuntimeError):  # the limit of threads, or of memory
            self._thread.start()

    @property
    def working(self) -> bool:
        """Whether the thread has not ended, even after `close`."""
        return self._thread.is_alive()

    def close(self) -> None:
        self._closed = True

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            for path in self._paths:
                self._ask_for(path)

    def _ask_for(self, path: Path) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            for start in range(0, os.fstat(fd).st_size, PIECE_BYTES):
                if self._closed:
                    return
                _advise(fd, start)
        finally:
            os.close(fd)


def _advise(fd: int, start: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(fd, start, PIECE_BYTES, os.POSIX_FADV_WILLNEED)
    else:  # macOS: `struct radvisory` of fcntl(2)
        command = getattr(fcntl, "F_RDADVISE", 44)
        fcntl.fcntl(fd, command, struct.pack("@qi4x", start, PIECE_BYTES))
