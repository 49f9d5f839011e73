"""The segment files of one space, as an engine uses them between its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

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

WAIT_SECONDS = 0.001
"""Seconds that the engine waits for a thread before it goes on with other work."""


class Reading:
    """Reads segments in a thread, one after another."""

    def __init__(self, folder: Path, segments: Sequence[SegmentInfo], form: RecordFormat) -> None:
        by_path = {segment_path(folder, segment.key): segment for segment in segments}
        self._reader = BackgroundReader(
            folder,
            [segment.key for segment in segments],
            lambda path: segment_file.open_records(path, form, by_path[path]),
        )
        self._next: SegmentRecord | None = None
        """A record of the next segment, which ended the one before it."""
        self.segments = [self._records(segment.key) for segment in segments]
        """The records of each segment, to be taken in this order; None while none is read yet.
        They raise `DamagedFile`."""
        self.damaged: bytes | None = None
        """Key of the segment that could not be read."""

    def close(self) -> None:
        self._reader.close()

    def _records(self, key: bytes) -> Iterator[memoryview | None]:
        while True:
            item, self._next = self._next or self._reader.next_record(), None
            if item is NOT_YET:
                self._reader.wait(WAIT_SECONDS)
                yield None
            elif isinstance(item, Failed):
                self.damaged = item.key
                raise DamagedFile(item.reason)
            elif item is END or not isinstance(item, SegmentRecord):
                return
            elif item.key != key:
                self._next = item
                return
            else:
                yield item.content


class SegmentFiles:
    """The files of one space below the store's folder."""

    def __init__(self, folder: Path, space: bytes, form: RecordFormat) -> None:
        self._folder = folder
        self._space = space
        self._form = form

    def read(self, segments: Sequence[SegmentInfo]) -> Reading:
        return Reading(self._folder, segments, self._form)

    def write(self, segment: SegmentInfo) -> BackgroundWriter:
        header = segment_file.SegmentHeader(
            version=segment_file.VERSION,
            space=self._space,
            key=segment.key,
            base=segment.base,
            tokens=segment.tokens,
        )
        return BackgroundWriter(lambda: segment_file.create(self._folder, header, self._form))
