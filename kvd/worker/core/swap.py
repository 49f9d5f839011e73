"""Files of preempted rows: checksummed records in a folder with a size limit.

::

    magic, then for each record:  length (8 bytes)  SHA-256 of the content (32 bytes)  content

A file is written under a temporary name and renamed when it is complete. Files of an earlier
process are never read, so nothing is synced to disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

from kvd.worker.cache.snapshot_records import DamagedRecord, SnapshotReader
from kvd.worker.core.request import SwappedRows

_log = logging.getLogger("kvd.worker")

SPARE_DISK_BYTES = 1024 * 1024 * 1024
"""Disk space that stays free for other programs."""
_MAGIC = b"kvd swap 1\n"
_HEAD = struct.Struct("<Q32s")


class SwapFile:
    """A swap file that is being written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.with_suffix(".part").open("xb")
        self._file.write(_MAGIC)

    def add(self, record: bytes) -> None:
        """Write a record; raises `OSError`."""
        self._file.write(_HEAD.pack(len(record), hashlib.sha256(record).digest()))
        self._file.write(record)

    def finish(self) -> None:
        """Close the complete file under its final name; raises `OSError`."""
        self._file.close()
        self.path.with_suffix(".part").rename(self.path)

    def abort(self) -> None:
        """Close the file; `SwapFolder.delete` removes it."""
        with contextlib.suppress(OSError):  # flushing the buffer fails on a full disk
            self._file.close()


class SwapFolder:
    """The swap folder of one worker. Files of an earlier process are deleted.

    ``path`` None: nothing may be written. ``limit_bytes``: limit of all files together.
    """

    def __init__(self, path: Path | None, limit_bytes: int) -> None:
        self._path = path
        self._limit_bytes = limit_bytes
        self._sizes: dict[Path, int] = {}
        if path is not None:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for old in path.iterdir():
                if old.suffix in (".swap", ".part"):
                    old.unlink()

    @classmethod
    def open(cls, path: str | None, limit_bytes: int) -> SwapFolder:
        """Return the folder that the daemon named; one without room if it cannot be used."""
        if path is not None and limit_bytes > 0:
            try:
                return cls(Path(path), limit_bytes)
            except OSError as error:
                _log.warning("cannot swap rows to disk: %s", error)
        return cls(None, 0)

    @property
    def held_bytes(self) -> int:
        return sum(self._sizes.values())

    def has_room(self, nbytes: int) -> bool:
        if self._path is None or self.held_bytes + nbytes > self._limit_bytes:
            return False
        try:
            return nbytes + SPARE_DISK_BYTES <= shutil.disk_usage(self._path).free
        except OSError:
            return False

    def create(self, name: str, nbytes: int) -> SwapFile:
        """Create a file of about ``nbytes``; raises `OSError`. `has_room` must be true."""
        assert self._path is not None, "a folder without a path has no room"
        path = self._path / f"{name}.swap"
        self._sizes[path] = nbytes
        try:
            return SwapFile(path)
        except OSError:
            self.delete(path)
            raise

    def clear(self) -> None:
        for path in list(self._sizes):
            self.delete(path)

    def delete(self, path: Path) -> None:
        self._sizes.pop(path, None)
        for name in (path, path.with_suffix(".part")):
            name.unlink(missing_ok=True)


def read_records(path: Path) -> Iterator[bytes]:
    """Yield a file's records; raises `DamagedRecord` or `OSError` if the file is damaged."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(len(_MAGIC)) != _MAGIC:
            raise DamagedRecord(f"{path.name} does not begin with {_MAGIC!r}")
        while head := file.read(_HEAD.size):
            if len(head) < _HEAD.size:
                raise DamagedRecord(f"{path.name} ends within a record's header")
            length, digest = _HEAD.unpack(head)
            if length > size - file.tell():
                raise DamagedRecord(f"{path.name} ends within a record")
            record = file.read(length)
            if hashlib.sha256(record).digest() != digest:
                raise DamagedRecord(f"a record of {path.name} has a wrong checksum")
            yield record


class Transfers:
    """Transfers of rows to and from a swap folder; each takes several steps."""

    def __init__(self, folder: SwapFolder) -> None:
        self.folder = folder
        self.reading: dict[str, SnapshotReader] = {}
        """Requests that are admitted and whose rows are being read."""
        self.writing: dict[str, SwapFile] = {}

    def start_writing(self, rid: str, nbytes: int) -> SwapFile:
        """Create the file of a request; raises `OSError`."""
        # Request ids may contain any character, so the file name is a digest.
        name = hashlib.sha256(rid.encode()).hexdigest()[:32]
        file = self.writing[rid] = self.folder.create(name, nbytes)
        return file

    def abort_writing(self, rid: str) -> None:
        file = self.writing.pop(rid, None)
        if file is not None:
            file.abort()
            self.folder.delete(file.path)

    def abort_reading(self, rid: str) -> None:
        """Free the pages that were read so far."""
        reader = self.reading.pop(rid, None)
        if reader is not None:
            reader.forget()

    def discard(self, rid: str, swapped: SwappedRows | None) -> None:
        """Abort the transfers of a request that has ended, and delete its file."""
        self.abort_reading(rid)
        self.abort_writing(rid)
        if swapped is not None:
            self.folder.delete(swapped.path)
