"""Segments written and read in threads: bounded, in order, and never in the engine's way."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvd.worker.cache.host_copy import COPIED_TOGETHER
from kvd.worker.prefix.record_memory import RecordMemory
from kvd.worker.prefix.segment_io import (
    END,
    NOT_YET,
    STAGING_BYTES,
    BackgroundReader,
    BackgroundWriter,
    Failed,
    SegmentRecord,
    Written,
)
from protocol import segment_file
from protocol.record_file import RecordReader
from protocol.record_format import PLAIN
from protocol.segment_file import SegmentHeader
from protocol.segments import segment_path

SPACE = b"s" * 16
KEYS = [bytes([number]) * 16 for number in range(1, 5)]
PATIENCE_S = 20.0
AT_ONCE_S = 5
"""Limit for calls of the engine. They take microseconds; other processes may hold the machine."""


def open_plain(path: Path) -> RecordReader:
    return segment_file.open_records(path, PLAIN)


def header(key: bytes) -> SegmentHeader:
    return SegmentHeader(version=segment_file.VERSION, space=SPACE, key=key, tokens=64)


def records(seed: int, count: int = 40, most: int = 5000) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(rng.randint(0, most)) for _ in range(count)]


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the condition does not become true"
        time.sleep(0.0005)


def threads(name: str) -> list[threading.Thread]:
    return [one for one in threading.enumerate() if one.name == name]


@pytest.fixture(autouse=True)
def _no_thread_stays() -> Iterator[None]:
    yield
    until(lambda: not threads("segment-writer") and not threads("segment-reader"))


def write(folder: Path, key: bytes, content: list[bytes], staging: int = 8192) -> Written | Failed:
    writer = BackgroundWriter(partial(segment_file.create, folder, header(key), PLAIN), staging)
    for record in content:
        until(partial(writer.put, record))
    writer.end()
    until(writer.poll)
    result = writer.poll()
    assert result is not None
    return result


def memory(nbytes: int = STAGING_BYTES) -> RecordMemory:
    made = RecordMemory(nbytes)
    made.open()
    return made


def read(reader: BackgroundReader) -> tuple[list[tuple[bytes, bytes]], object]:
    """Return all records, and what ended them."""
    found = []
    while isinstance(item := reader.next_record(), SegmentRecord) or item is NOT_YET:
        if isinstance(item, SegmentRecord):
            found.append((item.key, bytes(item.content)))
        else:
            until(lambda: reader.ready)
    assert reader.next_record() is item, "the end is final"
    return found, item


@pytest.mark.parametrize("readers", [1, 3])
def test_what_is_written_is_read_in_order(tmp_path: Path, readers: int) -> None:
    written = {key: records(number) for number, key in enumerate(KEYS)}
    for key, content in written.items():
        result = write(tmp_path, key, content)
        assert isinstance(result, Written)
        assert result.nbytes == segment_path(tmp_path, key).stat().st_size
        assert 0 < result.seconds < PATIENCE_S
    found, end = read(BackgroundReader(tmp_path, KEYS, open_plain, memory(8192), readers))
    assert end is END
    assert found == [(key, record) for key in KEYS for record in written[key]]


@pytest.mark.parametrize("staging", [1, 100, 5000, 1 << 20])
def test_records_above_the_limit_pass_one_by_one(staging: int, tmp_path: Path) -> None:
    content = [b"a" * 10_000, b"", b"b" * 4999, b"c" * 5001, b"", b"d" * 10_000]
    assert isinstance(write(tmp_path, KEYS[0], content, staging), Written)
    found, end = read(BackgroundReader(tmp_path, KEYS[:1], open_plain, memory(staging)))
    assert end is END
    assert [record for _, record in found] == content


class Gate:
    """A disk on which every operation waits until `open` is set, and counts what has passed."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.waiting = 0
        self.passed = 0

    def pass_through(self) -> None:
        self.waiting += 1
        assert self.open.wait(PATIENCE_S)
        self.passed += 1


class SlowFile:
    """A record file whose operations named in ``slow`` wait at a gate."""

    def __init__(self, folder: Path, gate: Gate, slow: str) -> None:
        self._gate = gate
        self._slow = slow
        self._pass("create")
        self._file = segment_file.create(folder, header(KEYS[0]), PLAIN)

    def _pass(self, operation: str) -> None:
        if operation in self._slow.split():
            self._gate.pass_through()

    @property
    def nbytes(self) -> int:
        return self._file.nbytes

    def add(self, record: bytes | memoryview) -> None:
        self._pass("add")
        self._file.add(record)

    def finish(self) -> int:
        self._pass("finish")
        return self._file.finish()

    def abort(self) -> None:
        self._file.abort()


def test_a_full_staging_refuses_records_and_delays_nobody(tmp_path: Path) -> None:
    gate = Gate()
    writer = BackgroundWriter(lambda: SlowFile(tmp_path, gate, "add"), 1000)
    assert writer.put(b"a" * 400)
    until(lambda: gate.waiting)
    assert writer.put(b"b" * 400)
    start = time.monotonic()
    assert not writer.put(b"c" * 400), "the record that is being written counts"
    assert writer.put(b"c" * 200)
    assert not writer.put(b"d")
    writer.end()
    assert writer.poll() is None
    assert time.monotonic() - start < AT_ONCE_S
    gate.open.set()
    until(writer.poll)
    assert isinstance(writer.poll(), Written)
    found = [
        bytes(one) for one in segment_file.read_records(segment_path(tmp_path, KEYS[0]), PLAIN)
    ]
    assert found == [b"a" * 400, b"b" * 400, b"c" * 200]


@pytest.mark.parametrize("slow", ["create", "add", "finish"])
def test_a_writer_can_be_closed_while_the_disk_hangs(slow: str, tmp_path: Path) -> None:
    gate = Gate()
    writer = BackgroundWriter(lambda: SlowFile(tmp_path, gate, slow), 1000)
    writer.put(b"a" * 500)
    if slow == "finish":
        writer.end()
    else:
        writer.put(b"b" * 500)
    until(lambda: gate.waiting)
    start = time.monotonic()
    writer.close()
    assert writer.poll() is None, "the result is not known before the disk answers"
    assert writer.put(b"b" * 2000), "a closed writer drops records"
    assert time.monotonic() - start < AT_ONCE_S
    gate.open.set()
    until(writer.poll)
    files = [one for one in tmp_path.rglob("*") if one.is_file()]
    if slow == "finish":  # it was complete
        assert isinstance(writer.poll(), Written)
        assert files == [segment_path(tmp_path, KEYS[0])]
    else:
        assert isinstance(result := writer.poll(), Failed)
        assert (result.reason, result.nbytes > 500) == ("closed by the engine", slow == "add")
        assert files == []
    assert gate.passed == 1, "what was staged is not written"


def test_a_writer_can_be_closed_at_any_moment(tmp_path: Path) -> None:
    rng = random.Random(4)
    results = set()
    for turn in range(60):
        key = KEYS[turn % 4]
        writer = BackgroundWriter(partial(segment_file.create, tmp_path, header(key), PLAIN), 4096)
        for record in records(turn, count=rng.randint(0, 30)):
            if not writer.put(record):
                break
        if rng.random() < 0.7:
            writer.end()
        if rng.random() < 0.5:
            time.sleep(0.002)
        writer.close()
        until(writer.poll)
        result = writer.poll()
        results.add(type(result))
        path = segment_path(tmp_path, key)
        assert path.exists() == isinstance(result, Written)
        assert not path.with_suffix(".part").exists()
        if isinstance(result, Written):
            list(segment_file.read_records(path, PLAIN))
            path.unlink()
    assert results == {Written, Failed}


@pytest.mark.parametrize("name", ["open", "write", "fsync", "rename"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_is_a_result(
    name: str, error: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_args: object, **_options: object) -> None:
        raise OSError(error, os.strerror(error))

    (tmp_path / "01").mkdir()
    monkeypatch.setattr(os, name, fail)
    result = write(tmp_path, KEYS[0], records(1))
    assert isinstance(result, Failed)
    assert result.reason == os.strerror(error)
    monkeypatch.undo()
    assert list((tmp_path / "01").iterdir()) == []


def test_a_failed_write_reports_the_bytes_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon counts them as written: they wear the disk."""
    plain, written = os.write, 0

    def write_some(fd: int, data: memoryview) -> int:
        nonlocal written
        if written > 60_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written += (count := plain(fd, data))
        return count

    monkeypatch.setattr(os, "write", write_some)
    result = write(tmp_path, KEYS[0], [bytes(5000)] * 40)
    monkeypatch.undo()
    assert result == Failed(os.strerror(errno.ENOSPC), nbytes=written)


def test_an_unexpected_error_is_a_result_too(tmp_path: Path) -> None:
    def create() -> SlowFile:
        raise MemoryError("no memory")

    writer = BackgroundWriter(create)
    until(writer.poll)
    assert writer.poll() == Failed("MemoryError('no memory')")


def test_without_a_thread_nothing_is_written_or_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    writer = BackgroundWriter(partial(segment_file.create, tmp_path, header(KEYS[0]), PLAIN))
    assert writer.poll() == Failed("no thread can be started")
    writer.close()
    reader = BackgroundReader(tmp_path, KEYS, open_plain, memory())
    assert reader.next_record() == Failed("no thread can be started")
    reader.close()


@pytest.mark.parametrize("readers", [1, 3])
def test_a_segment_that_cannot_be_read_is_named(tmp_path: Path, readers: int) -> None:
    for number, key in enumerate(KEYS):
        write(tmp_path, key, records(number))
    damaged = segment_path(tmp_path, KEYS[1])
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    found, end = read(BackgroundReader(tmp_path, KEYS, open_plain, memory(), readers))
    assert isinstance(end, Failed)
    assert end.key == KEYS[1]
    assert damaged.name in end.reason
    assert [record for key, record in found if key == KEYS[0]] == records(0)
    correct = records(1)
    assert [record for key, record in found if key == KEYS[1]] == correct[: len(found) - 40]
    damaged.unlink()
    found, end = read(BackgroundReader(tmp_path, KEYS, open_plain, memory(), readers))
    assert end == Failed("No such file or directory", KEYS[1])


def test_several_records_are_read_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = [bytes([letter]) * 5000 for letter in b"abcdefgh"]
    write(tmp_path, KEYS[0], content)
    gate, preadv = Gate(), os.preadv

    def slow(fd: int, buffers: list[memoryview], at: int) -> int:
        if len(buffers[0]) == 5000:
            gate.pass_through()
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", slow)
    reader = BackgroundReader(tmp_path, KEYS[:1], open_plain, memory(), threads=3)
    until(lambda: gate.waiting == 3)
    assert reader.next_record() is NOT_YET
    gate.open.set()
    found, end = read(reader)
    assert end is END
    assert [record for _, record in found] == content


def test_an_engine_that_waits_is_woken_by_the_next_record(tmp_path: Path) -> None:
    write(tmp_path, KEYS[0], [b"a"])
    gate = Gate()

    def hang(path: Path) -> RecordReader:
        gate.pass_through()
        return open_plain(path)

    reader = BackgroundReader(tmp_path, KEYS[:1], hang, memory())
    reader.wait(0.001)
    assert not reader.ready
    threading.Timer(0.05, gate.open.set).start()
    reader.wait(PATIENCE_S)
    assert reader.ready
    assert read(reader)[1] is END


def test_reading_ahead_is_bounded(tmp_path: Path) -> None:
    write(tmp_path, KEYS[0], [b"a" * 400, b"b" * 400, b"c" * 400, b"d" * 2000, b"e"])
    reader = BackgroundReader(tmp_path, KEYS[:1], open_plain, memory(1000))
    until(lambda: reader._staging.held_bytes == 800)
    held, contents = [], []
    while (item := reader.next_record()) is not END:
        held.append(reader._staging.held_bytes)
        if isinstance(item, SegmentRecord):
            contents.append(bytes(item.content))
        else:
            until(lambda: reader.ready)
    assert [content[:1] for content in contents] == [b"a", b"b", b"c", b"d", b"e"]
    assert max(count for count in held if count != 2000) <= 1000
    assert 2000 in held, "a larger record is staged alone"


def test_records_stay_valid_while_others_are_taken(tmp_path: Path) -> None:
    """Until `COPIED_TOGETHER` others are: a device may copy as many at once."""
    content = [bytes([letter]) * 900 for letter in range(10)]
    write(tmp_path, KEYS[0], content)
    space = (COPIED_TOGETHER + 1) * 1024
    reader = BackgroundReader(tmp_path, KEYS[:1], open_plain, memory(space))
    until(lambda: reader._staging.held_bytes == (COPIED_TOGETHER + 1) * 900)
    taken = []
    for number in range(COPIED_TOGETHER + 1):
        item = reader.next_record()
        assert isinstance(item, SegmentRecord)
        taken.append(item.content)
        valid = range(max(0, number - COPIED_TOGETHER + 1), number + 1)
        assert [bytes(taken[at]) for at in valid] == [content[at] for at in valid]
    until(lambda: bytes(taken[0]) == content[COPIED_TOGETHER + 1])  # its memory is used again
    assert bytes(taken[1]) == content[1]
    assert [record for _, record in read(reader)[0]] == content[COPIED_TOGETHER + 1 :]


def test_a_reader_that_waits_for_room_gets_ready(tmp_path: Path) -> None:
    """The record that was taken last counts no longer once the engine asks for the next one."""
    write(tmp_path, KEYS[0], [b"a" * 900, b"b" * 900])
    reader = BackgroundReader(tmp_path, KEYS[:1], open_plain, memory(1000))
    for letter in (b"a", b"b"):
        until(lambda: reader.ready)
        assert isinstance(item := reader.next_record(), SegmentRecord)
        assert bytes(item.content) == letter * 900
    until(lambda: reader.ready)
    assert reader.next_record() is END


def test_the_reader_delays_nobody_while_the_disk_hangs(tmp_path: Path) -> None:
    write(tmp_path, KEYS[0], records(0))
    gate = Gate()

    def hang(path: Path) -> RecordReader:
        gate.pass_through()
        return open_plain(path)

    reader = BackgroundReader(tmp_path, KEYS[:1], hang, memory())
    until(lambda: gate.waiting)
    start = time.monotonic()
    assert reader.next_record() is NOT_YET
    reader.close()
    assert reader.next_record() == Failed("closed by the engine")
    assert time.monotonic() - start < AT_ONCE_S
    gate.open.set()


def test_a_reader_can_be_closed_at_any_moment(tmp_path: Path) -> None:
    for number, key in enumerate(KEYS):
        write(tmp_path, key, records(number))
    opened = len(list(Path("/dev/fd").iterdir()))
    for turn in range(60):
        reader = BackgroundReader(tmp_path, KEYS, open_plain, memory(4096), threads=1 + turn % 3)
        for _ in range(turn):
            if reader.next_record() is NOT_YET:
                until(partial(getattr, reader, "ready"))
        reader.close()
        until(lambda: not threads("segment-reader"))
    assert len(list(Path("/dev/fd").iterdir())) == opened
