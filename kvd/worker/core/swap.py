"""Files of parked rows: checksummed records, in a folder with bounds.

::

    magic, then for each record:  length (8 bytes)  SHA-256 of what follows (32 bytes)  content

A file is written under another name and renamed when it is whole; nothing of a life before is ever
read, so nothing is synced to the disk.

Does not cover: what the records say (`kvd.worker.cache.snapshot_records`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from kvd.worker.cache.snapshot_records import DamagedRecord

_log = logging.getLogger("kvd.worker")

MAGIC = b"kvd parked 1\n"
SPARE_DISK_BYTES = 1024 * 1024 * 1024
"""Of the disk, what is left free for others."""
_HEAD = struct.Struct("<Q32s")


class Folder:
    """One worker's own folder; what a life before has left there is deleted.

    ``cap_bytes``: what all files together may hold.
    """

    def __init__(
        self,
        path: Path,
        cap_bytes: int,
        free_bytes: Callable[[Path], int] = lambda path: shutil.disk_usage(path).free,
    ) -> None:
        self._path = path
        self._cap_bytes = cap_bytes
        self._free_bytes = free_bytes
        self._sizes: dict[Path, int] = {}
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in path.iterdir():
            if left.suffix in (".parked", ".part"):
                left.unlink()

    @classmethod
    def open(cls, path: str | None, cap_bytes: int) -> Folder | None:
        """Return the folder that the daemon named; None if there is none, or it cannot be used."""
        if path is None or cap_bytes <= 0:
            return None
        try:
            return cls(Path(path), cap_bytes)
        except OSError as error:
            _log.warning("no rows are parked on disk: %s", error)
            return None

    @property
    def held_bytes(self) -> int:
        """Bytes of all files, those that are being written too."""
        return sum(self._sizes.values())

    def has_room(self, nbytes: int) -> bool:
        """Return whether so much may be written."""
        if self.held_bytes + nbytes > self._cap_bytes:
            return False
        try:
            return nbytes + SPARE_DISK_BYTES <= self._free_bytes(self._path)
        except OSError:
            return False

    def new(self, name: str, nbytes: int) -> Writing:
        """Begin a file of about so many bytes; raises `OSError`."""
        path = self._path / f"{name}.parked"
        self._sizes[path] = nbytes
        try:
            return Writing(path)
        except OSError:
            self.delete(path)
            raise

    def clear(self) -> None:
        """Delete all files."""
        for path in list(self._sizes):
            self.delete(path)

    def delete(self, path: Path) -> None:
        """Delete a file, whole or not."""
        self._sizes.pop(path, None)
        for one in (path, path.with_suffix(".part")):
            one.unlink(missing_ok=True)


class Writing:
    """A file that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.with_suffix(".part").open("xb")
        self._file.write(MAGIC)

    def add(self, record: bytes) -> None:
        """Write a record; raises `OSError`."""
        self._file.write(_HEAD.pack(len(record), hashlib.sha256(record).digest()))
        self._file.write(record)

    def finish(self) -> None:
        """Make it whole; raises `OSError`."""
        self._file.close()
        self.path.with_suffix(".part").rename(self.path)

    def stop(self) -> None:
        """Give it up; `Folder.delete` removes what there is."""
        with contextlib.suppress(OSError):  # what was buffered does not fit either
            self._file.close()


def records_of(path: Path) -> Iterator[bytes]:
    """Yield a file's records; raises `DamagedRecord` or `OSError` where they are not what was written."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise DamagedRecord("it does not begin as it should")
        while head := file.read(_HEAD.size):
            if len(head) < _HEAD.size:
                raise DamagedRecord("it ends within a record")
            length, digest = _HEAD.unpack(head)
            if length > size - file.tell():
                raise DamagedRecord("it ends within a record")
            record = file.read(length)
            if hashlib.sha256(record).digest() != digest:
                raise DamagedRecord("a checksum is wrong")
            yield record
