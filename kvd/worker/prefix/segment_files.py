"""Segment files, as an engine reads and writes them between its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from protocol import segment_file
from protocol.record_file import RecordWriter
from protocol.segments import SegmentInfo, segment_path


class Writing:
    """One segment that is being written."""

    def __init__(self, file: RecordWriter) -> None:
        self._file = file

    def put(self, record: bytes) -> bool:
        """Add a record; return False if it must be offered again later. Raises `OSError`."""
        self._file.add(record)
        return True

    def finished(self) -> int | None:
        """Return the file's size once it is complete on disk; raises `OSError`."""
        return self._file.finish()

    def abort(self) -> None:
        self._file.abort()


@dataclass(frozen=True)
class Reading:
    """The records of some segments."""

    segments: Sequence[Iterator[memoryview | None]]

    def close(self) -> None:
        pass


class SegmentFiles:
    """The files of one space below the store's folder."""

    def __init__(self, folder: Path, space: bytes) -> None:
        self._folder = folder
        self._space = space

    def read(self, segments: Sequence[SegmentInfo]) -> Reading:
        """Read these segments in order. Their iterators raise `DamagedFile` or `OSError`."""
        return Reading(
            [
                segment_file.read_records(segment_path(self._folder, one.key), one.key)
                for one in segments
            ]
        )

    def write(self, segment: SegmentInfo) -> Writing:
        """Create a segment's file; raises `OSError`."""
        header = segment_file.SegmentHeader(
            version=segment_file.VERSION,
            space=self._space,
            key=segment.key,
            base=segment.base,
            tokens=segment.tokens,
        )
        return Writing(segment_file.create(self._folder, header))

    def close(self) -> None:
        pass
