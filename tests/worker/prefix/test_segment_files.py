"""Readings of one space share the memory of records, one after another."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvd.worker.prefix.record_memory import RecordMemory
from kvd.worker.prefix.segment_files import SegmentFiles, UnreadableSegments
from kvd.worker.prefix.segment_io import Written
from protocol.record_format import PLAIN
from protocol.segments import SegmentInfo

PATIENCE_S = 20.0
CONTENTS = (b"a" * 3000, b"b" * 3000)


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the condition does not become true"
        time.sleep(0.0005)


def files_of(folder: Path, memory: RecordMemory) -> SegmentFiles:
    return SegmentFiles(folder, b"s" * 16, PLAIN, memory)


def written(files: SegmentFiles, number: int) -> SegmentInfo:
    """Write a segment with one record; return what the index knows of it."""
    segment = SegmentInfo(key=bytes([number]) * 16, tokens=64, nbytes=4096)
    writer = files.write(segment)
    until(lambda: writer.put(CONTENTS[number]))
    writer.end()
    until(writer.poll)
    result = writer.poll()
    assert isinstance(result, Written)
    return replace(segment, nbytes=result.nbytes)


def record(records: Iterator[memoryview | None]) -> memoryview:
    while (found := next(records)) is None:
        pass
    return found


def test_memory_that_a_device_has_locked_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To lock it takes longer than to read many records."""
    memory = RecordMemory(1 << 16)
    files = files_of(tmp_path, memory)
    reading = files.read([written(files, 0)])
    reading.start()
    assert record(reading.segments[0]) == CONTENTS[0]
    reading.close()
    until(lambda: not files.occupied)
    with monkeypatch.context() as patch:
        patch.setattr("kvd.worker.cache.cuda_driver.is_usable", lambda: True)
        files.free_memory()
    assert memory.is_open
    files.free_memory()
    assert not memory.is_open


def test_a_reading_starts_after_the_records_of_the_one_before_are_taken(tmp_path: Path) -> None:
    """Its threads end earlier, and the next reading has the same memory."""
    memory = RecordMemory(1 << 16)
    files = files_of(tmp_path, memory)
    segments = [written(files, number) for number in range(2)]
    first, second = (files.read([segment]) for segment in segments)
    assert second.ready
    first.start()
    until(lambda: not files.reads)
    files.free_memory()
    assert memory.is_open
    assert not second.ready
    assert record(first.segments[0]) == CONTENTS[0]
    first.close()
    assert second.ready
    second.start()
    assert record(second.segments[0]) == CONTENTS[1]
    second.close()
    until(lambda: not files.occupied)
    files.free_memory()
    assert not memory.is_open


def test_without_memory_for_records_nothing_is_read(tmp_path: Path) -> None:
    files = files_of(tmp_path, RecordMemory(1 << 62))
    reading = files.read([written(files, 0)])
    with pytest.raises(UnreadableSegments, match="no memory for records"):
        reading.start()
    assert not reading.started
    reading.close()
    assert not files.occupied
