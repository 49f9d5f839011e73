"""Files of preempted rows: record files (`protocol.record_file`) in a folder with a size limit.

Files of an earlier process are never read, so nothing is synced to disk, and a key in memory is
enough to encrypt them.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

from kvd.worker.cache.segment_records import SegmentReader
from kvd.worker.cache.snapshot_records import SnapshotReader
from kvd.worker.core.request import SwappedRows
from protocol.record_file import RecordWriter, read_records
from protocol.record_format import RecordFormat
from protocol.segments import PART_SUFFIX

_log = logging.getLogger("kvd.worker")

SPARE_DISK_BYTES = 1024 * 1024 * 1024
"""Disk space that stays free for other programs."""
_SUFFIX = ".swap"


class SwapFolder:
    """The swap folder of one worker. Files of an earlier process are deleted.

    ``path`` None: nothing may be written. ``limit_bytes``: limit of all files together.
    """

    def __init__(self, path: Path | None, limit_bytes: int, form: RecordFormat) -> None:
        self._path = path
        self._form = form
        self._limit_bytes = limit_bytes
        self._sizes: dict[Path, int] = {}
        if path is not None:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for old in path.iterdir():
                if old.suffix in (_SUFFIX, PART_SUFFIX):
                    old.unlink()

    @classmethod
    def open(cls, path: str | None, limit_bytes: int, form: RecordFormat) -> SwapFolder:
        """Return the folder that the daemon named; one without room if it cannot be used."""
        if path is not None and limit_bytes > 0:
            try:
                return cls(Path(path), limit_bytes, form)
            except OSError as error:
                _log.warning("cannot swap rows to disk: %s", error)
        return cls(None, 0, form)

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

    def create(self, name: str, nbytes: int) -> RecordWriter:
        """Create a file of about ``nbytes``; raises `OSError`. `has_room` must be true."""
        assert self._path is not None, "a folder without a path has no room"
        path = self._path / f"{name}{_SUFFIX}"
        self._sizes[path] = nbytes
        try:
            return RecordWriter(path, self._form, sync=False)
        except OSError:
            self.delete(path)
            raise

    def read(self, path: Path) -> Iterator[memoryview]:
        """Yield the records of a file; raises `DamagedFile` or `OSError`."""
        return read_records(path, self._form)

    def clear(self) -> None:
        for path in list(self._sizes):
            self.delete(path)

    def delete(self, path: Path) -> None:
        """Delete a file; one that the disk does not delete stays until the next start."""
        self._sizes.pop(path, None)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("cannot delete a swapped row: %s", error)


class Transfers:
    """Transfers of rows to and from a swap folder; each takes several steps."""

    def __init__(self, folder: SwapFolder) -> None:
        self.folder = folder
        self.reading: dict[str, SnapshotReader | SegmentReader] = {}
        """Requests that are admitted and whose rows are being read."""
        self.writing: dict[str, RecordWriter] = {}

    def start_writing(self, rid: str, nbytes: int) -> RecordWriter:
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
