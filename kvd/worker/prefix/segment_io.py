"""Segment files are written and read in threads, so that a slow disk delays no step.

The engine submits records to write and takes records that were read; both calls return at once.
The threads also compute the checksums, or encrypt and decrypt. They are daemon threads: a disk that
hangs delays neither the engine nor the end of the process.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

import numpy as np

from kvd.worker.prefix.staging import Staging
from protocol.record_file import DamagedFile, RecordReader
from protocol.segments import segment_path

STAGING_BYTES = 8 * 1024 * 1024
"""Limit of the records between the engine and a thread. A larger record is staged alone."""
_CLOSED = "closed by the engine"
_NO_THREAD = "no thread can be started"


class OpenFile(Protocol):
    """A `protocol.record_file.RecordWriter`; tests replace it by a disk that hangs."""

    @property
    def nbytes(self) -> int: ...
    def add(self, record: bytes | memoryview) -> None: ...
    def finish(self) -> int: ...
    def abort(self) -> None: ...


@dataclass(frozen=True)
class Written:
    """The file is complete and on disk, under its final name."""

    nbytes: int
    """Size of the file."""
    seconds: float
    """Seconds of I/O, without those that the thread waited for records."""


@dataclass(frozen=True)
class Failed:
    """The file could not be written or read. A file that was being written is deleted."""

    reason: str
    key: bytes | None = None
    """Segment whose file is missing or damaged; None: the file may be good."""
    nbytes: int = 0
    """Bytes written before."""


class BackgroundWriter:
    """Writes one segment in a thread.

    ``create`` opens the file, also in the thread. Poll until there is a result; only then may
    another writer write the same segment.
    """

    def __init__(self, create: Callable[[], OpenFile], staging_bytes: int = STAGING_BYTES) -> None:
        self._create = create
        self._staging: Staging[bytes | memoryview | None] = Staging(staging_bytes)
        self._result: Written | Failed | None = None
        self._wanted = 0
        """Bytes of the record that `put` has refused."""
        self._over = False
        """Whether no further record is needed."""
        self._nbytes = 0
        """Bytes of a file that is not complete."""
        self._thread = _start(self._run, "segment-writer")
        if self._thread is None:
            self._result = Failed(_NO_THREAD)

    def put(self, record: bytes | memoryview) -> bool:
        """Stage a record; False: there is no room now. The buffer must not change any more."""
        nbytes = memoryview(record).nbytes
        staged = self._staging.offer(record, nbytes)
        self._wanted = 0 if staged else nbytes
        return staged

    def end(self) -> None:
        """Complete the file after the staged records."""
        self._over = True
        self._staging.offer(None, 0)

    @property
    def ready(self) -> bool:
        """Whether there is a result, or room for a record: the one that `put` has refused."""
        if self._result is not None:
            return True
        return not self._over and self._staging.fits(self._wanted)

    def poll(self) -> Written | Failed | None:
        """Return the result; None: the thread still works or waits for records."""
        return self._result

    def close(self) -> None:
        """Abandon the file unless it is being completed; `poll` has the result once I/O ends."""
        self._over = True
        self._staging.close()

    def _run(self) -> None:
        try:
            result = self._write()
        except BaseException as error:  # noqa: BLE001 - the engine waits for a result
            result = Failed(_reason(error), nbytes=self._nbytes)
        self._result = result
        self._staging.close()

    def _write(self) -> Written | Failed:
        start = time.monotonic()
        file = self._create()
        seconds = time.monotonic() - start
        try:
            while (record := self._staging.take()) is not None:
                start = time.monotonic()
                file.add(record)
                seconds += time.monotonic() - start
            if self._staging.closed:
                return Failed(_CLOSED, nbytes=file.nbytes)
            start = time.monotonic()
            nbytes = file.finish()
            return Written(nbytes, seconds + time.monotonic() - start)
        finally:
            self._nbytes = file.nbytes
            file.abort()  # does nothing if the file is complete


class Signal(Enum):
    """What `BackgroundReader.next_record` returns instead of a record."""

    NOT_YET = 0
    END = 1


NOT_YET: Final = Signal.NOT_YET
END: Final = Signal.END


@dataclass(frozen=True)
class SegmentRecord:
    """A record that was read and checked, or skipped."""

    key: bytes
    """The segment."""
    content: memoryview
    """Empty if the record was skipped."""


class BackgroundReader:
    """Reads the records of several segments in a thread, in order, ahead of their use.

    ``keys``: the segments below the store's ``folder``. ``open_records`` opens a segment's file, in
    the thread.
    """

    def __init__(
        self,
        folder: Path,
        keys: Sequence[bytes],
        open_records: Callable[[Path], RecordReader],
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        self._folder = folder
        self._keys = tuple(keys)
        self._open = open_records
        self._staging: Staging[SegmentRecord | Failed | Signal] = Staging(staging_bytes)
        self._skipped: dict[bytes, Container[int]] = {}
        self._last: Failed | Signal | None = None
        """The final answer of `next_record`."""
        self.seconds = 0.0
        """Seconds of I/O and checks that have ended, without those of waiting for room."""
        self._thread = _start(self._run, "segment-reader")
        if self._thread is None:
            self._last = Failed(_NO_THREAD)

    def next_record(self) -> SegmentRecord | Failed | Signal:
        """Return the next record, `NOT_YET`, `END` after the last one, or `Failed`.

        The record's bytes count as staged until the next call. `END` and `Failed` are final.
        """
        while self._last is None:
            item = self._staging.poll()
            if item is None:
                return NOT_YET
            if not isinstance(item, SegmentRecord):
                self._last = item
            else:
                return item
        return self._last

    def skip(self, key: bytes, numbers: Container[int]) -> None:
        """Skip records of a segment that are not read yet. The first record has the number 0."""
        self._skipped[key] = numbers

    @property
    def ready(self) -> bool:
        """Whether `next_record` may return something other than `NOT_YET`.

        The last record's bytes count no longer as staged, so that there is room for the next one.
        """
        return self._last is not None or self._staging.release()

    @property
    def working(self) -> bool:
        """Whether the thread has not ended, even if the reader is closed."""
        return self._thread is not None and self._thread.is_alive()

    def close(self) -> None:
        """Drop what is staged. The thread ends once its present I/O does."""
        self._staging.close()
        self._last = self._last or Failed(_CLOSED)

    def _run(self) -> None:
        last: Failed | Signal = END
        for key in self._keys:
            try:
                self._read(key)
            except BaseException as error:  # noqa: BLE001 - the engine waits for an end
                last = Failed(_reason(error), key if _is_damage(error) else None)
                break
        self._staging.offer(last, 0)

    def _read(self, key: bytes) -> None:
        if self._staging.closed:
            return
        start = time.monotonic()
        with self._open(segment_path(self._folder, key)) as records:
            self.seconds += time.monotonic() - start
            for number in itertools.count():
                if not self._staging.wait_for_room(records.next_nbytes):
                    return
                start = time.monotonic()
                content: memoryview | None = memoryview(b"")
                if records.next_nbytes and number in self._skipped.get(key, ()):
                    records.skip()
                else:
                    content = next(records, None)
                self.seconds += time.monotonic() - start
                if content is None:
                    return
                self._staging.offer(SegmentRecord(key, content), content.nbytes)


def uninitialized_memory(nbytes: int) -> memoryview:
    """Return memory for a record. With zeroed memory, reads of 2 MiB take 1.4 times as long."""
    return np.empty(nbytes, np.uint8).data


def _start(run: Callable[[], None], name: str) -> threading.Thread | None:
    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the limit of threads, or of memory
        return None
    return thread


def _reason(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) if isinstance(error, DamagedFile) else repr(error)


def _is_damage(error: BaseException) -> bool:
    """Return whether an error is the file's fault, and not that of a limit or of the system."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EIO)
    return isinstance(error, DamagedFile)
