"""The segment files of one space, as an engine uses them between its steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path

from kvd.worker.cache import cuda_driver
from kvd.worker.prefix.page_cache import Part
from kvd.worker.prefix.read_ahead import ReadAhead
from kvd.worker.prefix.record_memory import RecordMemory
from kvd.worker.prefix.segment_io import (
    END,
    NOT_YET,
    BackgroundReader,
    BackgroundWriter,
    Failed,
    SegmentRecord,
)
from protocol import segment_file
from protocol.record_file import DamagedFile
from protocol.record_format import RecordFormat
from protocol.segments import SegmentInfo, segment_path

HANG_SECONDS = 1.0
"""Seconds without a record, or until a closed file's I/O ends, after which the disk hangs."""


class UnreadableSegments(Exception):
    """Segments cannot be read now, although their files may be good."""


class Reading:
    """Reads segments in threads, one after another. Nothing is read before `start`."""

    def __init__(
        self,
        files: SegmentFiles,
        segments: Sequence[SegmentInfo],
        parts: Sequence[Part] | None = None,
    ) -> None:
        self._files = files
        self._segments = segments
        self._parts = parts
        self._reader: BackgroundReader | None = None
        self._next: SegmentRecord | None = None
        """A record of the next segment, which ended the one before it."""
        self.segments = [self._records(segment.key) for segment in segments]
        """The records of each segment, to be taken in this order; None while none is read yet.
        They raise `DamagedFile` or `UnreadableSegments`."""
        self.damaged: bytes | None = None
        """Key of the segment that could not be read."""
        self.nbytes = 0
        """Bytes of the records so far."""
        self._changed_at = 0.0

    @property
    def started(self) -> bool:
        return self._reader is not None

    def start(self) -> None:
        """Begin to read. Only one reading at a time may have started and not ended.

        Raises `UnreadableSegments` if there is no memory for records.
        """
        self._changed_at = self._files.clock()
        try:
            self._reader = self._files.open_reader(self._segments, self._parts)
        except OSError as error:
            raise UnreadableSegments(f"no memory for records: {error.strerror}") from error

    @property
    def ready(self) -> bool:
        """Whether the next record is read, or the reading can start, or the disk hangs."""
        if self._reader is None:
            return not self._files.occupied or self._files.hangs
        return self._reader.ready or self.hangs

    def wait(self, seconds: float) -> None:
        """Wait until the next record is read, for at most this time."""
        if self._reader is None:
            time.sleep(min(seconds, 0.001))
        else:
            self._reader.wait(seconds)

    @property
    def hangs(self) -> bool:
        """Whether the disk has returned nothing for `HANG_SECONDS`."""
        if self._reader is None:
            return self._files.hangs
        late = self._files.clock() >= self._changed_at + HANG_SECONDS
        return late and not self._reader.ready

    @property
    def seconds(self) -> float:
        """Seconds of I/O so far."""
        return 0.0 if self._reader is None else self._reader.seconds

    @property
    def cached_share(self) -> float | None:
        """Share of the parts that the page cache held at the start, 0 to 1; None: not known yet."""
        return None if self._reader is None else self._reader.cached_share

    def skip(self, index: int, numbers: Container[int]) -> None:
        """Skip records of a segment that are not read yet: they are returned without content."""
        if self._reader is not None:
            self._reader.skip(self._segments[index].key, numbers)

    def close(self) -> None:
        if self._reader is not None:
            self._files.close_reader(self._reader)

    def _records(self, key: bytes) -> Iterator[memoryview | None]:
        reader = self._reader
        assert reader is not None, "records are taken after the start"
        while True:
            item, self._next = self._next or reader.next_record(), None
            if item is NOT_YET:
                yield None
                continue
            self._changed_at = self._files.clock()
            if isinstance(item, Failed):
                if item.key is None:
                    raise UnreadableSegments(item.reason)
                self.damaged = item.key
                raise DamagedFile(item.reason)
            if item is END or not isinstance(item, SegmentRecord):
                return
            if item.key != key:
                self._next = item
                return
            self.nbytes += item.content.nbytes
            yield item.content


class SegmentFiles:
    """The files of one space below the store's folder. ``clock``: monotonic seconds.

    ``memory``: what records are read into; it is open from a reading until `free_memory` frees it.

    One reading at a time. If the disk hangs, its threads stay, and nothing else is read until they
    end.
    """

    def __init__(
        self,
        folder: Path,
        space: bytes,
        form: RecordFormat,
        memory: RecordMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.clock = clock
        self._memory = memory
        self._folder = folder
        self._space = space
        self._form = form
        self._reader: BackgroundReader | ReadAhead | None = None
        """Reader of the segment that was opened last."""
        self._closed_at: float | None = None
        """When it was closed."""
        self._has_records = False
        """Whether it has or will have records, which are used until it is closed."""

    @property
    def reads(self) -> bool:
        """Whether a thread reads a file."""
        return self._reader is not None and self._reader.working

    @property
    def occupied(self) -> bool:
        """Whether the memory of records is in use: by a thread, or by records not yet taken.

        The threads end before the last records are taken.
        """
        return self._has_records or self.reads

    @property
    def hangs(self) -> bool:
        """Whether a closed reader still waits for the disk."""
        closed_at = self._closed_at
        return closed_at is not None and self.reads and self.clock() >= closed_at + HANG_SECONDS

    def prefetch(self, segments: Sequence[SegmentInfo]) -> None:
        """Ask the system to read segments into its page cache, until the next `read`.

        No thread may read.
        """
        self._closed_at = None
        self._reader = ReadAhead([segment_path(self._folder, one.key) for one in segments])

    def read(self, segments: Sequence[SegmentInfo], parts: Sequence[Part] | None = None) -> Reading:
        """Return a reading that can start; ``parts``: see `BackgroundReader`."""
        if isinstance(self._reader, ReadAhead):
            self.close_reader(self._reader)
        return Reading(self, segments, parts)

    def open_reader(
        self, segments: Sequence[SegmentInfo], parts: Sequence[Part] | None = None
    ) -> BackgroundReader:
        """Open the memory and begin to read; raises `OSError` if there is no memory."""
        self._closed_at = None
        self._memory.open()
        by_path = {segment_path(self._folder, segment.key): segment for segment in segments}
        reader = self._reader = BackgroundReader(
            self._folder,
            [segment.key for segment in segments],
            lambda path: segment_file.open_records(path, self._form, by_path[path]),
            self._memory,
            parts=parts,
        )
        self._has_records = True
        return reader

    def free_memory(self) -> None:
        """Free the memory of records, unless it is in use.

        With CUDA it is kept: to lock 117 MB again would delay the next read by 25 ms (H200).
        """
        if self._memory.is_open and not self.occupied and not cuda_driver.is_usable():
            self._memory.close()

    def close_reader(self, reader: BackgroundReader | ReadAhead) -> None:
        """Close a reader; its thread ends once its present I/O does."""
        reader.close()
        if reader is self._reader and self._closed_at is None:
            self._closed_at = self.clock()
            self._has_records = False

    def write(self, segment: SegmentInfo) -> BackgroundWriter:
        header = segment_file.SegmentHeader(
            version=segment_file.VERSION,
            space=self._space,
            key=segment.key,
            base=segment.base,
            tokens=segment.tokens,
        )
        return BackgroundWriter(lambda: segment_file.create(self._folder, header, self._form))
