"""Segment files: damage of any kind is found, and a file under its final name is complete."""

from __future__ import annotations

import errno
import os
import random
import stat
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from protocol import record_file, segment_file
from protocol.record_file import DamagedFile, RecordReader, RecordWriter
from protocol.segment_file import DamagedSegment, SegmentHeader
from protocol.segments import segment_path

KEY, OTHER, SPACE, BASE = (bytes([number]) * 16 for number in (1, 2, 3, 4))
RECORDS = (b"tail" * 900, b"", b"p" * 5000, b"p" * 5000, random.Random(1).randbytes(9000))


def header(key: bytes = KEY) -> SegmentHeader:
    return SegmentHeader(version=segment_file.VERSION, space=SPACE, key=key, base=BASE, tokens=1024)


def write(folder: Path, key: bytes = KEY, records: Sequence[bytes] = RECORDS) -> Path:
    file = segment_file.create(folder, header(key))
    for record in records:
        file.add(record)
    size = file.finish()
    path = segment_path(folder, key)
    assert path.stat().st_size == size == file.nbytes
    return path


def read(path: Path) -> list[bytes]:
    return [bytes(record) for record in segment_file.read_records(path)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    assert path == tmp_path / "01" / f"{KEY.hex()}.kvs"
    assert read(path) == list(RECORDS)
    found = segment_file.read_header(path)
    assert (found.space, found.key, found.base, found.tokens) == (SPACE, KEY, BASE, 1024)
    assert found.nbytes == path.stat().st_size
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


def test_a_segment_without_records_and_arrays_of_any_type(tmp_path: Path) -> None:
    assert read(write(tmp_path, records=())) == []
    numbers = memoryview(bytes(range(64))).cast("d")
    file = segment_file.create(tmp_path, header(OTHER))
    file.add(numbers)
    file.finish()
    assert read(segment_path(tmp_path, OTHER)) == [bytes(range(64))]


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


def pieces_of(data: bytes) -> list[bytes]:
    """Return the magic, the frame and the content of each record, and the end mark."""
    pieces, at = [data[:16]], 16
    while at < len(data):
        length = int.from_bytes(data[at : at + 8], "little") & ~(1 << 63)
        size = 32 + (0 if len(data) - at == 32 else length)
        pieces.append(data[at : at + size])
        at += size
    return pieces


def swap(data: bytes, rng: random.Random) -> bytes:
    """Exchange the frames and contents of two records."""
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
def test_every_corruption_is_found(kind: str, tmp_path: Path) -> None:
    path, rng = write(tmp_path), random.Random(kind)
    whole = path.read_bytes()
    found = 0
    while found < 100:
        damaged = CORRUPTIONS[kind](whole, rng)
        if damaged == whole:
            continue
        path.write_bytes(damaged)
        before: list[bytes] = []
        with pytest.raises(DamagedSegment, match=path.name):
            before.extend(bytes(one) for one in segment_file.read_records(path))
        assert before == list(RECORDS)[: len(before)]
        found += 1


def test_a_header_tells_whether_its_file_is_complete(tmp_path: Path) -> None:
    path = write(tmp_path, records=(b"p" * 100, b""))
    pieces = pieces_of(path.read_bytes())
    path.write_bytes(b"".join(pieces[:-1]))  # ends with the frame of the empty record
    with pytest.raises(DamagedSegment, match="no end mark"):
        segment_file.read_header(path)


def test_a_damaged_length_allocates_nothing(tmp_path: Path, monkeypatch) -> None:
    path = write(tmp_path)
    data = bytearray(path.read_bytes())
    data[16:24] = (len(data) - 200).to_bytes(8, "little")
    path.write_bytes(data)
    sizes = []
    pread = os.pread

    def spy(fd: int, size: int, at: int) -> bytes:
        sizes.append(size)
        return pread(fd, size, at)

    monkeypatch.setattr(os, "pread", spy)
    with pytest.raises(DamagedSegment):
        read(path)
    assert max(sizes) == 32


def test_another_segment_under_this_name_is_found(tmp_path: Path) -> None:
    path, other = write(tmp_path), write(tmp_path, OTHER)
    other.replace(path)
    with pytest.raises(DamagedSegment, match="not that of its name"):
        read(path)
    with pytest.raises(DamagedSegment, match="not that of its name"):
        segment_file.read_header(path)


def test_a_record_of_another_segment_is_found(tmp_path: Path) -> None:
    path, other = write(tmp_path), write(tmp_path, OTHER)
    mine, theirs = path.read_bytes(), other.read_bytes()
    start = 16 + 32 + int.from_bytes(mine[16:24], "little")
    path.write_bytes(mine[:start] + theirs[start:])
    with pytest.raises(DamagedSegment, match="checksum"):
        read(path)


def test_files_of_other_formats_are_not_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    path.write_bytes(b"kvd swap 1\n" + bytes(200))
    with pytest.raises(DamagedSegment):
        segment_file.read_header(path)
    newer = SegmentHeader(version=segment_file.VERSION + 1, space=SPACE, key=KEY, tokens=1)
    segment_file.create(tmp_path, newer).finish()
    with pytest.raises(DamagedSegment, match="version"):
        segment_file.read_header(path)
    file = RecordWriter(path, sync=False)
    file.add(b"not a header")
    file.finish()
    with pytest.raises(DamagedSegment, match="no header"):
        segment_file.read_header(path)
    RecordWriter(path, sync=False).finish()
    with pytest.raises(DamagedSegment, match="no header"):
        segment_file.read_header(path)


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    real = path.rename(tmp_path / "real.kvs")
    path.symlink_to(real)
    with pytest.raises(DamagedSegment, match="symbolic link"):
        read(path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DamagedSegment, match="regular"):
        read(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(DamagedSegment, match="regular"):
        read(path)
    path.rmdir()
    with pytest.raises(FileNotFoundError):
        read(path)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    path = segment_path(tmp_path, KEY)
    path.parent.mkdir()
    path.with_suffix(".part").symlink_to(victim)
    assert read(write(tmp_path)) == list(RECORDS)
    assert victim.read_bytes() == b"precious"


def test_a_part_of_an_ended_process_is_replaced(tmp_path: Path) -> None:
    first = segment_file.create(tmp_path, header())
    first.add(b"half")
    os.close(first._fd)  # as the process's end does
    path = write(tmp_path)
    assert read(path) == list(RECORDS)
    assert list(path.parent.iterdir()) == [path]


def test_abort_deletes_the_part_and_never_a_finished_file(tmp_path: Path) -> None:
    file = segment_file.create(tmp_path, header())
    file.add(b"half")
    file.abort()
    file.abort()
    assert list((tmp_path / "01").iterdir()) == []
    file = segment_file.create(tmp_path, header())
    file.finish()
    file.abort()
    assert read(segment_path(tmp_path, KEY)) == []


class Disk:
    """Counts the calls of `os` that write, and lets one fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fails_at: int, error: int) -> None:
        self.calls = 0
        for name in ("open", "writev", "fsync", "rename"):
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
def test_a_failing_disk_leaves_no_file(error: int, tmp_path: Path, monkeypatch) -> None:
    fails_at, errors = 0, []
    while True:
        fails_at += 1
        folder = tmp_path / str(fails_at)
        folder.mkdir()
        with monkeypatch.context() as patch:
            disk = Disk(patch, fails_at, error)
            file = None
            try:
                file = segment_file.create(folder, header())
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
    assert read(segment_path(folder, KEY)) == list(RECORDS)


def test_writes_and_reads_may_be_short(tmp_path: Path, monkeypatch) -> None:
    writev, pread = os.writev, os.pread
    rng = random.Random(3)

    def short_write(fd: int, parts: Sequence[memoryview]) -> int:
        joined = b"".join(parts)
        return writev(fd, [joined[: rng.randint(1, len(joined))]])

    monkeypatch.setattr(os, "writev", short_write)
    monkeypatch.setattr(os, "pread", lambda fd, size, at: pread(fd, rng.randint(1, size), at))
    assert read(write(tmp_path)) == list(RECORDS)


def test_a_bad_sector_is_an_error_and_not_the_end_of_the_process(
    tmp_path: Path, monkeypatch
) -> None:
    path = write(tmp_path)
    pread = os.pread

    def bad(fd: int, size: int, at: int) -> bytes:
        if at <= 6000 < at + size:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return pread(fd, size, at)

    monkeypatch.setattr(os, "pread", bad)
    with pytest.raises(OSError, match="Input/output"):
        read(path)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    with RecordReader(path) as reader:
        next(reader)
        os.truncate(path, 300)
        with pytest.raises(DamagedFile, match="shorter"):
            list(reader)


def test_files_are_closed(tmp_path: Path) -> None:
    path = write(tmp_path)
    damaged = write(tmp_path, OTHER)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    before = len(list(Path("/dev/fd").iterdir()))
    for _ in range(5):
        read(path)
        with pytest.raises(DamagedSegment):
            read(damaged)
        partly = segment_file.read_records(path)
        next(partly)
        partly.close()
    assert len(list(Path("/dev/fd").iterdir())) == before


WRITES = """
import os, random, signal, sys, time
from pathlib import Path
from protocol import segment_file

folder, rng = Path(sys.argv[1]), random.Random(5)

def write_until_killed(turn, first_is_complete):
    for number in range(1_000_000):
        key = turn.to_bytes(2) + number.to_bytes(14)
        file = segment_file.create(folder, segment_file.SegmentHeader(
            version=segment_file.VERSION, space=bytes(16), key=key, tokens=1))
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
        read(path)


def test_swap_files_have_the_same_format(tmp_path: Path) -> None:
    file = RecordWriter(tmp_path / "a.swap", sync=False)
    for record in RECORDS:
        file.add(record)
    file.finish()
    assert [bytes(one) for one in record_file.read_records(tmp_path / "a.swap")] == list(RECORDS)
