"""Segment files are written and read in threads, so that a slow disk delays no step.

The engine submits records to write and takes records that were read; both calls return at once.
The threads also compute the checksums, or encrypt and decrypt. They are daemon threads: a disk that
hangs delays neither the engine nor the end of the process.
"""

from __future__ import annotations

import errno
import itertools
import os
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, Protocol

from kvd.worker.cache.host_copy import COPIED_TOGETHER
from kvd.worker.prefix.page_cache import Part, cached_share
from kvd.worker.prefix.record_memory import RecordMemory
from kvd.worker.prefix.staging import Place, Staging
from protocol.record_file import DamagedFile, RecordReader, UnreadRecord
from protocol.segments import segment_path

STAGING_BYTES = 8 * 1024 * 1024
"""Limit of the records between the engine and a thread that writes. A larger record is staged
alone."""
READERS = min(8, max(1, (os.cpu_count() or 1) // 2))
"""Threads that read and check records of one prefix at the same time. From the page cache, records
of 9 MB are read at 12 GB/s by two threads, 22 by four and 32 by six or eight (host of an H200)."""
STAGED_RECORDS = COPIED_TOGETHER + READERS + 1
"""Least number of page records that fit into the memory of a read: those that are being copied, one
for each reading thread, and one that is read ahead."""
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


_Item = SegmentRecord | Failed | Signal
_Place = Place[_Item]


class BackgroundReader:
    """Reads the records of several segments in threads, ahead of their use.

    ``keys``: the segments below the store's ``folder``. ``open_records`` opens a segment's file, in
    a thread. ``threads`` read and check different records at the same time; `next_record` returns
    them in order. ``parts``: about which part of each file is needed; None: all. The records are in
    ``memory``, which must be open until the threads have ended; a record larger than that has
    memory of its own, and is staged alone.
    """

    def __init__(
        self,
        folder: Path,
        keys: Sequence[bytes],
        open_records: Callable[[Path], RecordReader],
        memory: RecordMemory,
        threads: int = READERS,
        parts: Sequence[Part] | None = None,
    ) -> None:
        self._folder = folder
        self._keys = tuple(keys)
        self._parts = parts
        self._open = open_records
        self._staging: Staging[SegmentRecord | Failed | Signal] = Staging(
            memory.nbytes, memory, COPIED_TOGETHER
        )
        self._skipped: dict[bytes, Container[int]] = {}
        self.cached_share: float | None = None
        """Share of ``parts`` that the page cache held at the start, 0 to 1; None: not known yet."""
        self._last: Failed | Signal | None = None
        """The final answer of `next_record`."""
        self._turn = threading.Lock()
        """Held by the thread that passes over the next record."""
        self._unread = self._pass_over_all()
        self._files = ExitStack()
        """Open until all threads have ended."""
        self._active = threads
        self._leaving = threading.Lock()
        self._busy = _BusyTime()
        found = [_start(self._run, "segment-reader") for _ in range(threads)]
        self._threads = [thread for thread in found if thread is not None]
        if not self._threads:
            self._last = Failed(_NO_THREAD)
        for _ in range(threads - len(self._threads)):
            self._leave()

    def next_record(self) -> SegmentRecord | Failed | Signal:
        """Return the next record, `NOT_YET`, `END` after the last one, or `Failed`.

        The record is valid and counts as staged until `COPIED_TOGETHER` others are returned, or
        until `ready` is called. `END` and `Failed` are final.
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

        Returned records no longer count as staged, so that there is room for others.
        """
        return self._last is not None or self._staging.release()

    def wait(self, seconds: float) -> None:
        """Wait until `ready`, for at most this time."""
        if self._last is None:
            self._staging.wait_for_item(seconds)

    @property
    def seconds(self) -> float:
        """Seconds of I/O and checks so far, without those of waiting for room."""
        return self._busy.seconds

    @property
    def working(self) -> bool:
        """Whether a thread has not ended, even if the reader is closed."""
        return any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Drop what is staged. The threads end once their present I/O does."""
        self._staging.close()
        self._last = self._last or Failed(_CLOSED)

    def _run(self) -> None:
        try:
            while True:
                with self._turn:
                    found = next(self._unread, None)
                if found is None:
                    return
                self._staging.fill(*self._read(*found))
        finally:
            self._leave()

    def _leave(self) -> None:
        """Close the files once no thread reads them."""
        with self._leaving:
            self._active -= 1
            if not self._active:
                self._files.close()

    def _read(self, place: _Place, key: bytes, record: UnreadRecord | None) -> tuple[_Place, _Item]:
        """Return a place and its item: the content of a record, or nothing if it is skipped."""
        if record is None:
            return place, SegmentRecord(key, memoryview(b""))
        try:
            with self._busy:
                return place, SegmentRecord(key, record.read(place.memory))
        except BaseException as error:  # noqa: BLE001 - the engine waits for an end
            return place, _failed(error, key)

    def _pass_over_all(self) -> Iterator[tuple[_Place, bytes, UnreadRecord | None]]:
        """Yield a place for each record, its segment, and what reads it; None: it is skipped.

        The last place has the item that ends the records.
        """
        last: Failed | Signal = END
        self.cached_share = self._find_cached_share()
        for key in self._keys:
            try:
                yield from self._pass_over(key)
            except Exception as error:  # noqa: BLE001 - the engine waits for an end
                last = _failed(error, key)
                break
        self._staging.offer(last, 0)

    def _find_cached_share(self) -> float:
        paths = [segment_path(self._folder, key) for key in self._keys]
        try:
            return cached_share(paths, self._parts)
        except Exception:  # noqa: BLE001 - the engine waits for records, which need no estimate
            return 1.0

    def _pass_over(self, key: bytes) -> Iterator[tuple[_Place, bytes, UnreadRecord | None]]:
        if self._staging.closed:
            return
        with self._busy:
            records = self._files.enter_context(self._open(segment_path(self._folder, key)))
        for number in itertools.count():
            with self._busy:
                record = records.next_unread()
            if record is None:
                return
            skipped = number in self._skipped.get(key, ())
            if (place := self._staging.reserve(0 if skipped else record.nbytes)) is None:
                return
            # The engine may have skipped it while there was no room.
            yield place, key, None if number in self._skipped.get(key, ()) else record


class _BusyTime:
    """Adds up the seconds in which at least one thread is within the context."""

    def __init__(self) -> None:
        self._ended_s = 0.0
        self._lock = threading.Lock()
        self._inside = 0
        self._since = 0.0

    @property
    def seconds(self) -> float:
        """Seconds so far. A slow disk may keep some thread within all the time."""
        with self._lock:
            return self._ended_s + (time.monotonic() - self._since if self._inside else 0.0)

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._since = time.monotonic()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._ended_s += time.monotonic() - self._since


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


def _failed(error: BaseException, key: bytes) -> Failed:
    return Failed(_reason(error), key if _is_damage(error) else None)


def _is_damage(error: BaseException) -> bool:
    """Return whether an error is the file's fault, and not that of a limit or of the system."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EIO)
    return isinstance(error, DamagedFile)
