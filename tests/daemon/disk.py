"""A disk in memory that fails: full, broken, without power, or under a process that is killed.

It has the functions of `os` that the journal uses (`kvd.host.journal_file.Files`). Writes and names
are in the system's cache until `fsync`, or until they happen to reach the disk.
"""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace

SECTOR = 512
PAGE = 4096


class Killed(BaseException):
    """The process is killed within a call."""


@dataclass(eq=False)
class Inode:
    data: bytearray = field(default_factory=bytearray)
    """Content as processes see it."""
    durable: bytes = b""
    """Content as of the last `fsync`."""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """Writes since then: position and data; None: the file was cut there."""
    unreadable: set[int] = field(default_factory=set)
    """Numbers of pages that cannot be read."""

    def write(self, at: int, data: bytes) -> None:
        self.data.extend(bytes(max(0, at - len(self.data))))
        self.data[at : at + len(data)] = data
        self.pending.append((at, data))

    def cut(self, at: int) -> None:
        del self.data[at:]
        self.data.extend(bytes(at - len(self.data)))
        self.pending.append((at, None))

    def check(self, at: int, size: int) -> None:
        """Raise EIO if a page of this range cannot be read."""
        if size and self.unreadable.intersection(range(at // PAGE, (at + size - 1) // PAGE + 1)):
            raise OSError(errno.EIO, "Input/output error")

    def sync(self) -> None:
        self.durable, self.pending = bytes(self.data), []

    def damage(self, data: bytes) -> None:
        """Replace the content on the disk as well."""
        self.data[:] = data
        self.sync()

    def lose_power(self, random: Random) -> None:
        """Keep any part of what was not synced; lost data may be zeros or a torn write."""
        writes, kept = self.pending, Inode(bytearray(self.durable))
        for at, data in writes:
            if data is None:
                if random.random() < 0.5:
                    kept.cut(at)
                continue
            fate = random.choice(("whole", "whole", "lost", "zeros", "torn"))
            if fate == "whole":
                kept.write(at, data)
            elif fate == "zeros":
                kept.write(at, bytes(len(data)))
            elif fate == "torn":
                kept.write(at, data[: random.randrange(len(data) + 1)])
        self.damage(kept.data)


class Disk:
    """The disk, and the system's state of one process."""

    def __init__(self, random: Random) -> None:
        self.names: dict[str, Inode] = {}
        self.durable_names: dict[str, Inode] = {}
        self.pending_names: list[dict[str, Inode]] = []
        """All names after each operation since the last power loss."""
        self.room: int | None = None
        """Bytes by which files may grow; None: no limit."""
        self.failing: set[str] = set()
        """Functions that fail with EIO."""
        self.calls_left: int | None = None
        """Changing calls until the process is killed; None: it is not."""
        self.newest_write = b""
        self.random = random
        self._open: dict[int, Inode] = {}
        self._numbers = 3
        self._dead = False

    # -- what happens to the machine ----------------------------------------------------------

    def restart(self) -> None:
        """Begin another process."""
        self._open.clear()
        self._dead, self.calls_left = False, None

    def lose_power(self) -> None:
        """Lose what is not on the disk: any of the newest names, any of the unsynced data."""
        states = [self.durable_names, *self.pending_names]
        self.names = dict(self.random.choice(states))
        for inode in dict.fromkeys(self.names.values()):
            inode.lose_power(self.random)
        self.durable_names, self.pending_names = dict(self.names), []
        self.restart()

    def content(self, name: str = "requests") -> bytes:
        """Return what can be read of a file."""
        inode = self.names.get(name)
        if inode is None:
            return b""
        data = bytearray(inode.data)
        for page in inode.unreadable:
            part = data[page * PAGE : (page + 1) * PAGE]
            data[page * PAGE : (page + 1) * PAGE] = bytes(len(part))
        return bytes(data)

    # -- the functions of os ------------------------------------------------------------------

    def makedirs(self, name: Path, mode: int, exist_ok: bool) -> None:
        self._call("makedirs")

    def open(self, path: Path, flags: int, mode: int) -> int:
        self._call("open")
        inode = self.names.get(path.name)
        if inode is None:
            if not flags & os.O_CREAT:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            if self.room == 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            inode = Inode()
            self._rename({**self.names, path.name: inode})
        if flags & os.O_TRUNC:
            inode.cut(0)
        self._numbers += 1
        self._open[self._numbers] = inode
        return self._numbers

    def close(self, fd: int, /) -> None:
        self._call("close")
        del self._open[fd]

    def fstat(self, fd: int, /) -> SimpleNamespace:
        self._call("fstat")
        return SimpleNamespace(st_size=len(self._open[fd].data))

    def pread(self, fd: int, length: int, offset: int, /) -> bytes:
        self._call("pread")
        inode = self._open[fd]
        data = bytes(inode.data[offset : offset + length])
        inode.check(offset, len(data))
        return data

    def pwrite(self, fd: int, data: bytes, offset: int, /) -> int:
        inode = self._open[fd]
        part = self.random.randrange(len(data) + 1)
        try:
            self._call("pwrite", changes=True)
        except Killed:
            inode.write(offset, data[:part])
            raise
        except OSError:
            inode.write(offset, self.random.choice((b"", data[:part], data)))
            raise
        inode.check(offset, len(data))  # the rest of a page is read before a part is written
        growth = max(0, offset + len(data) - len(inode.data))
        if self.room is not None:
            part = len(data) - max(0, growth - self.room)
            self.room -= min(self.room, growth)
            if not part:
                raise OSError(errno.ENOSPC, "No space left on device")
            data = data[:part]
        inode.write(offset, data)
        self.newest_write = data
        return len(data)

    def ftruncate(self, fd: int, length: int, /) -> None:
        self._call("ftruncate", changes=True)
        inode = self._open[fd]
        if self.room is not None:
            self.room += max(0, len(inode.data) - length)
        inode.cut(length)

    def fsync(self, fd: int) -> None:
        self._call("fsync", changes=True)
        self._open[fd].sync()

    def replace(self, src: Path, dst: Path) -> None:
        self._call("replace", changes=True)
        names = dict(self.names)
        names[dst.name] = names.pop(src.name)
        self._rename(names)

    def link(self, src: Path, dst: Path) -> None:
        self._call("link", changes=True)
        if dst.name in self.names:
            raise FileExistsError(errno.EEXIST, "File exists")
        self._rename({**self.names, dst.name: self.names[src.name]})

    def unlink(self, path: Path) -> None:
        self._call("unlink", changes=True)
        if path.name not in self.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        self._rename({name: inode for name, inode in self.names.items() if name != path.name})

    def _rename(self, names: dict[str, Inode]) -> None:
        self.names = names
        self.pending_names.append(names)

    def _call(self, name: str, *, changes: bool = False) -> None:
        if self._dead:
            raise Killed
        if changes and self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                self._dead = True
                raise Killed
        if name in self.failing:
            raise OSError(errno.EIO, "Input/output error")
