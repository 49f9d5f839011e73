"""Segment files, plain and encrypted: damage of any kind is found, and a file under its final name
is complete."""

from __future__ import annotations

import errno
import itertools
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from protocol import record_file, segment_file
from protocol.record_cipher import RecordCipher
from protocol.record_file import DamagedFile, RecordReader, RecordWriter
from protocol.record_format import CHECK_BYTES, PLAIN, RecordFormat
from protocol.segment_file import DamagedSegment, SegmentHeader
from protocol.segments import segment_path

KEY, OTHER, SPACE, BASE = (bytes([number]) * 16 for number in (1, 2, 3, 4))
RECORDS = (b"tail" * 900, b"", b"p" * 5000, b"p" * 5000, random.Random(1).randbytes(9000))


@pytest.fixture(params=["plain", "encrypted"])
def form(request: pytest.FixtureRequest) -> RecordFormat:
    return PLAIN if request.param == "plain" else RecordCipher(bytes(range(32)))


def header(key: bytes = KEY) -> SegmentHeader:
    return SegmentHeader(version=segment_file.VERSION, space=SPACE, key=key, base=BASE, tokens=1024)


def write(
    folder: Path, form: RecordFormat, key: bytes = KEY, records: Sequence[bytes] = RECORDS
) -> Path:
    file = segment_file.create(folder, header(key), form)
    for record in records:
        file.add(record)
    size = file.finish()
    path = segment_path(folder, key)
    assert path.stat().st_size == size == file.nbytes
    return path


def read(path: Path, form: RecordFormat) -> list[bytes]:
    return [bytes(record) for record in segment_file.read_records(path, form)]


def test_what_is_written_is_read(tmp_path: Path, form: RecordFormat) -> None:
    path = write(tmp_path, form)
    assert path == tmp_path / "01" / f"{KEY.hex()}.kvs"
    assert read(path, form) == list(RECORDS)
    found = segment_file.read_header(path, form)
    assert (found.space, found.key, found.base, found.tokens) == (SPACE, KEY, BASE, 1024)
    assert found.nbytes == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_a_segment_without_records_and_arrays_of_any_type(
    tmp_path: Path, form: RecordFormat
) -> None:
    assert read(write(tmp_path, form, records=()), form) == []
    numbers = memoryview(bytes(range(64))).cast("d")
    file = segment_file.create(tmp_path, header(OTHER), form)
    file.add(numbers)
    file.finish()
    assert read(segment_path(tmp_path, OTHER), form) == [bytes(range(64))]


def flip(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]


def cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data))]


def cut_out(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.randint(1, 100) :]


def insert(data: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.randint(1, 100)) + data[at:]


def zeros(data: bytes, rng: random.Random) -> bytes:
    at, count = rng.randrange(len(data)), rng.choice((1, 512, 4096))
    return data[:at] + bytes(len(data[at : at + count])) + data[at + count :]


def start_bytes(data: bytes) -> int:
    return PLAIN.start_bytes if PLAIN.open(data[: PLAIN.start_bytes]) else RecordCipher.start_bytes


def pieces_of(data: bytes) -> list[bytes]:
    """Return the start, each record with its head and check, and the end mark."""
    at = start_bytes(data)
    pieces = [data[:at]]
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little")
        size = 16 + (0 if length >> 63 else length) + CHECK_BYTES
        pieces.append(data[at : at + size])
        at += size
    return pieces


def swap(data: bytes, rng: random.Random) -> bytes:
    """Exchange two records."""
    pieces = pieces_of(data)
    one, two = rng.sample(range(1, len(pieces)), 2)
    pieces[one], pieces[two] = pieces[two], pieces[one]
    return b"".join(pieces)


def drop(data: bytes, rng: random.Random) -> bytes:
    """Remove some whole records at any place, or only the end mark."""
    pieces = pieces_of(data)
    first = rng.randrange(1, len(pieces))
    del pieces[first : first + rng.randint(1, 3)]
    return b"".join(pieces)


def drop_last(data: bytes, rng: random.Random) -> bytes:
    """Remove the last records; the end mark stays."""
    pieces = pieces_of(data)
    del pieces[-1 - rng.randint(1, len(RECORDS)) : -1]
    return b"".join(pieces)


def repeat(data: bytes, rng: random.Random) -> bytes:
    """Repeat a record."""
    pieces = pieces_of(data)
    chosen = rng.randrange(1, len(pieces) - 1)
    return b"".join([*pieces[: chosen + 1], *pieces[chosen:]])


CORRUPTIONS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    one.__name__: one for one in (flip, cut, cut_out, insert, zeros, swap, drop, drop_last, repeat)
}


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_every_corruption_is_found(kind: str, tmp_path: Path, form: RecordFormat) -> None:
    path, rng = write(tmp_path, form), random.Random(kind)
    whole = path.read_bytes()
    found = 0
    while found < 100:
        damaged = CORRUPTIONS[kind](whole, rng)
        if damaged == whole:
            continue
        path.write_bytes(damaged)
        before: list[bytes] = []
        with pytest.raises(DamagedSegment, match=path.name):
            before.extend(bytes(one) for one in segment_file.read_records(path, form))
        assert before == list(RECORDS)[: len(before)]
        found += 1


def test_a_header_tells_whether_its_file_is_complete(tmp_path: Path, form: RecordFormat) -> None:
    path = write(tmp_path, form, records=(b"p" * 100, b""))
    pieces = pieces_of(path.read_bytes())
    path.write_bytes(b"".join(pieces[:-1]))  # ends with the empty record
    with pytest.raises(DamagedSegment, match="no end mark"):
        segment_file.read_header(path, form)


def test_a_damaged_length_allocates_nothing(
    tmp_path: Path, monkeypatch, form: RecordFormat
) -> None:
    path = write(tmp_path, form)
    data = bytearray(path.read_bytes())
    at = form.start_bytes
    data[at : at + 8] = (len(data) - 200).to_bytes(8, "little")
    path.write_bytes(data)
    sizes = []
    preadv = os.preadv

    def spy(fd: int, buffers: list[memoryview], at: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", spy)
    with pytest.raises(DamagedSegment):
        read(path, form)
    assert max(sizes) == form.start_bytes


def test_another_segment_under_this_name_is_found(tmp_path: Path, form: RecordFormat) -> None:
    path, other = write(tmp_path, form), write(tmp_path, form, OTHER)
    other.replace(path)
    with pytest.raises(DamagedSegment, match="not that of its name"):
        read(path, form)
    with pytest.raises(DamagedSegment, match="not that of its name"):
        segment_file.read_header(path, form)


def test_a_record_of_another_segment_is_found(tmp_path: Path, form: RecordFormat) -> None:
    path, other = write(tmp_path, form), write(tmp_path, form, OTHER)
    mine, theirs = path.read_bytes(), other.read_bytes()
    start = sum(map(len, pieces_of(mine)[:2]))
    path.write_bytes(mine[:start] + theirs[start:])
    with pytest.raises(DamagedSegment, match="wrong check of record 1"):
        read(path, form)


def test_files_of_other_formats_are_not_read(tmp_path: Path, form: RecordFormat) -> None:
    path = write(tmp_path, form)
    path.write_bytes(b"kvd swap 1\n" + bytes(200))
    with pytest.raises(DamagedSegment):
        segment_file.read_header(path, form)
    newer = SegmentHeader(version=segment_file.VERSION + 1, space=SPACE, key=KEY, tokens=1)
    segment_file.create(tmp_path, newer, form).finish()
    with pytest.raises(DamagedSegment, match="version"):
        segment_file.read_header(path, form)
    file = RecordWriter(path, form, sync=False)
    file.add(b"not a header")
    file.finish()
    with pytest.raises(DamagedSegment, match="no header"):
        segment_file.read_header(path, form)
    RecordWriter(path, form, sync=False).finish()
    with pytest.raises(DamagedSegment, match="no header"):
        segment_file.read_header(path, form)


def test_only_regular_files_are_read(tmp_path: Path, form: RecordFormat) -> None:
    path = write(tmp_path, form)
    real = path.rename(tmp_path / "real.kvs")
    path.symlink_to(real)
    with pytest.raises(DamagedSegment, match="symbolic link"):
        read(path, form)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedSegment, match="regular"):
        read(path, form)
    path.unlink()
    path.mkdir()
    with pytest.raises(DamagedSegment, match="regular"):
        read(path, form)
    path.rmdir()
    with pytest.raises(FileNotFoundError):
        read(path, form)


def test_a_link_is_not_written_through(tmp_path: Path, form: RecordFormat) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = segment_path(tmp_path, KEY)
    path.parent.mkdir()
    path.with_suffix(".part").symlink_to(victim)
    assert read(write(tmp_path, form), form) == list(RECORDS)
    assert victim.read_bytes() == b"precious"


def test_a_part_of_an_ended_process_is_replaced(tmp_path: Path, form: RecordFormat) -> None:
    first = segment_file.create(tmp_path, header(), form)
    first.add(b"half")
    os.close(first._fd)  # as the process's end does
    path = write(tmp_path, form)
    assert read(path, form) == list(RECORDS)
    assert list(path.parent.iterdir()) == [path]


def test_abort_deletes_the_part_and_never_a_finished_file(
    tmp_path: Path, form: RecordFormat
) -> None:
    file = segment_file.create(tmp_path, header(), form)
    file.add(b"half")
    file.abort()
    file.abort()
    assert list((tmp_path / "01").iterdir()) == []
    file = segment_file.create(tmp_path, header(), form)
    file.finish()
    file.abort()
    assert read(segment_path(tmp_path, KEY), form) == []


class Disk:
    """Counts the calls of `os` that write, and lets one fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int, error: int) -> None:
        self.calls = 0
        for name in ("open", "write", "fsync", "rename"):
            self._replace(monkeypatch, name, fails_at, error)

    def _replace(self, monkeypatch, name: str, fails_at: int, error: int) -> None:
        real = getattr(os, name)

        def call(*args, **options):
            self.calls += 1
            if self.calls == fails_at:
                raise OSError(error, os.strerror(error))
            return real(*args, **options)

        monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_failing_disk_leaves_no_file(
    error: int, tmp_path: Path, monkeypatch, form: RecordFormat
) -> None:
    fails_at, errors = 0, []
    while True:
        fails_at += 1
        folder = tmp_path / str(fails_at)
        folder.mkdir()
        with monkeypatch.context() as patch:
            disk = Disk(patch, fails_at, error)
            file = None
            try:
                file = segment_file.create(folder, header(), form)
                for record in RECORDS:
                    file.add(record)
                file.finish()
            except OSError as raised:
                errors.append(raised.errno)
                if file is not None:
                    file.abort()
            else:
                break
        assert [one for one in folder.rglob("*") if one.is_file()] == []
    assert disk.calls == fails_at - 1 >= 12
    assert errors == [error] * disk.calls
    assert read(segment_path(folder, KEY), form) == list(RECORDS)


def test_writes_and_reads_may_be_short(tmp_path: Path, monkeypatch, form: RecordFormat) -> None:
    write_, preadv = os.write, os.preadv
    rng = random.Random(3)

    def short_read(fd: int, buffers: list[memoryview], at: int) -> int:
        (buffer,) = buffers
        return preadv(fd, [buffer[: rng.randint(1, len(buffer))]], at)

    def short_write(fd: int, data: memoryview) -> int:
        return write_(fd, data[: rng.randint(1, len(data))])

    monkeypatch.setattr(os, "write", short_write)
    monkeypatch.setattr(os, "preadv", short_read)
    assert read(write(tmp_path, form), form) == list(RECORDS)


def test_a_bad_sector_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, monkeypatch, form: RecordFormat
) -> None:
    path = write(tmp_path, form)
    preadv = os.preadv

    def bad(fd: int, buffers: list[memoryview], at: int) -> int:
        if at <= 6000 < at + len(buffers[0]):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", bad)
    with pytest.raises(OSError, match="Input/output"):
        read(path, form)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, form: RecordFormat) -> None:
    path = write(tmp_path, form)
    with RecordReader(path, form) as reader:
        next(reader)
        os.truncate(path, 300)
        with pytest.raises(DamagedFile, match="shorter"):
            list(reader)


def test_records_are_read_into_memory_with_any_content(tmp_path: Path, form: RecordFormat) -> None:
    path = write(tmp_path, form)
    memory = memoryview(bytearray(b"\xa5" * sum(map(len, RECORDS))))
    with segment_file.open_records(path, form) as reader:
        start = 0
        for content in RECORDS:
            record = reader.next_unread()
            assert record is not None
            found = record.read(memory[start : start + record.nbytes])
            assert found.obj is memory.obj
            assert bytes(found) == content
            start += record.nbytes
        assert reader.next_unread() is None
    assert bytes(memory) == b"".join(RECORDS)


def test_records_are_skipped_unread(tmp_path: Path, form: RecordFormat) -> None:
    """The check of a skipped record is what the next one depends on."""
    records = [bytes([letter]) * 1000 for letter in b"abcdef"]
    for skipped in itertools.chain.from_iterable(
        itertools.combinations(range(6), count) for count in range(7)
    ):
        path = write(tmp_path, form, records=records)
        data = bytearray(path.read_bytes())
        for number in skipped:  # damage there is not noticed
            data[len(data) - 32 - (6 - number) * 1032 + 500] ^= 1
        path.write_bytes(data)
        found = []
        with segment_file.open_records(path, form) as reader:
            for number in range(6):
                if number in skipped:
                    reader.next_unread()
                else:
                    found.append(bytes(next(reader)))
            assert next(reader, None) is None
        assert found == [one for number, one in enumerate(records) if number not in skipped]


def test_records_are_read_in_any_order(tmp_path: Path, form: RecordFormat) -> None:
    """So that several threads can read them at the same time."""
    with RecordReader(write(tmp_path, form), form) as reader:
        unread = list(iter(reader.next_unread, None))
        contents = {record.number: bytes(record.read()) for record in reversed(unread)}
        assert [contents[number] for number in range(len(unread))][1:] == list(RECORDS)


def test_damage_after_a_skipped_record_is_found(tmp_path: Path, form: RecordFormat) -> None:
    path = write(tmp_path, form, records=[b"a" * 1000, b"b" * 1000])
    data = bytearray(path.read_bytes())
    for back, check in ((32 + 1032 + 12, "the first check"), (32 + 500, "the second content")):
        path.write_bytes(data[:-back] + bytes([data[-back] ^ 1]) + data[len(data) - back + 1 :])
        with segment_file.open_records(path, form) as reader:
            reader.next_unread()
            if check == "the first check" and form is not PLAIN:
                assert bytes(next(reader)) == b"b" * 1000, "nonces do not depend on it"
                continue
            with pytest.raises(DamagedFile):
                next(reader)


def test_files_are_closed(tmp_path: Path, form: RecordFormat) -> None:
    path = write(tmp_path, form)
    damaged = write(tmp_path, form, OTHER)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(5):
        read(path, form)
        with pytest.raises(DamagedSegment):
            read(damaged, form)
        partly = segment_file.read_records(path, form)
        next(partly)
        partly.close()
    assert len(list(Path("/dev/fd").iterdir())) == before


WRITES = """
import os, random, signal, sys, time
from pathlib import Path
from protocol import segment_file
from protocol.record_format import PLAIN

folder, rng = Path(sys.argv[1]), random.Random(5)

def write_until_killed(turn, first_is_complete):
    for number in range(1_000_000):
        key = turn.to_bytes(2) + number.to_bytes(14)
        file = segment_file.create(folder, segment_file.SegmentHeader(
            version=segment_file.VERSION, space=bytes(16), key=key, tokens=1), PLAIN)
        for _ in range(rng.randint(0, 6)):
            file.add(rng.randbytes(rng.randint(0, 200_000)))
        file.finish()
        if number == 0:
            os.write(first_is_complete, b".")

for turn in range(50):
    complete, first_is_complete = os.pipe()
    child = os.fork()
    if child == 0:
        write_until_killed(turn, first_is_complete)
    os.read(complete, 1)
    time.sleep(rng.random() * 0.03)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_process_leaves_complete_files_and_parts(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", WRITES, str(tmp_path)], check=True, timeout=60)
    files = [one for one in tmp_path.rglob("*") if one.is_file()]
    complete = [one for one in files if one.suffix == ".kvs"]
    parts = [one for one in files if one.suffix == ".part"]
    assert len(complete) + len(parts) == len(files)
    assert len(parts) >= 20, "most of the 50 kills are within a write"
    assert len(complete) >= 50
    for path in complete:
        read(path, PLAIN)


def test_swap_files_have_the_same_format(tmp_path: Path, form: RecordFormat) -> None:
    file = RecordWriter(tmp_path / "a.swap", form, sync=False)
    for record in RECORDS:
        file.add(record)
    file.finish()
    assert [bytes(one) for one in record_file.read_records(tmp_path / "a.swap", form)] == list(
        RECORDS
    )
