"""The journal's file: any bytes can be read, and intact records are found behind damage."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from actors.request_journal import RequestDropped, RequestReceived
from kvd.host import journal_file
from kvd.host.journal_file import MARKER, Damage, JournalFile, frame
from protocol.types import Sampling
from protocol.worker import Submit
from tests.cpu_time import grows_linearly

encode = msgspec.msgpack.Encoder().encode


def record(number: int, prompt: str = "") -> bytes:
    submit = Submit(rid=str(number), prompt=prompt, sampling=Sampling(seed=1))
    return encode(RequestReceived(str(number), "m", submit))


def read(path: Path) -> tuple[list[str], Damage]:
    damage, file = Damage(), JournalFile(path, os.O_RDONLY)
    try:
        return [found.rid for found, _ in file.records(damage)], damage
    finally:
        file.close()


JUNK = st.one_of(
    st.binary(max_size=60),
    st.sampled_from(
        [MARKER, MARKER[:5], bytes(4096), frame(b""), frame(b"\x81"), b"kvd journal 2\n"]
    ),
    st.builds(lambda data, size: frame(data)[:size], st.binary(max_size=40), st.integers(0, 60)),
)


@settings(max_examples=200, deadline=None)
@example(parts=[frame(bytes(7) + MARKER[:1])[:-1], b"record"], block=64)
@example(parts=[frame(bytes(1) + MARKER[:7])[:-7], b"record"], block=1 << 18)
@given(parts=st.lists(JUNK | st.just(b"record"), max_size=12), block=st.sampled_from([64, 1 << 18]))
def test_records_are_found_between_any_bytes(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], block: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "requests"
    data, rids, nbytes = b"", [], 0
    for number, kind in enumerate(parts):
        part = kind
        if kind == b"record":
            rids.append(str(number))
            part = frame(record(number, "é" * number))
        else:
            nbytes += len(part)
        data += part
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_file, "_BLOCK_BYTES", block)
        found, damage = read(path)
    assert found == rids
    assert damage.nbytes == nbytes
    assert (damage.records > 0) == (nbytes > 0)


def test_a_prompt_that_contains_a_frame_is_not_read_as_one(tmp_path: Path) -> None:
    forged = frame(record(7))
    data = bytearray(frame(record(1, forged.decode("latin-1"))) + frame(record(2)))
    assert data.count(MARKER) == 2
    data[20] ^= 1
    path = tmp_path / "requests"
    path.write_bytes(data)
    assert read(path)[0] == ["2"]


def test_many_damaged_records_take_time_in_proportion_to_the_file(tmp_path: Path) -> None:
    path = tmp_path / "requests"

    def look(count: int) -> None:
        path.write_bytes((MARKER + b"x") * count)
        assert read(path)[1].records == count

    assert grows_linearly(look, 20_000)


def test_a_part_that_cannot_be_read_costs_only_its_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "requests"
    frames = [frame(record(number, "p" * 500)) for number in range(100)]
    path.write_bytes(b"".join(frames))
    size = len(frames[0])
    whole: Callable[[int, int, int], bytes] = os.pread

    def broken(fd: int, length: int, at: int) -> bytes:
        if at < 12288 and at + length > 8192:
            raise OSError(errno.EIO, "Input/output error")
        return whole(fd, length, at)

    monkeypatch.setattr(os, "pread", broken)
    found, damage = read(path)
    lost = {str(at) for at in range(100) if at * size < 12288 and (at + 1) * size > 8192}
    assert set(found) == {str(at) for at in range(100)} - lost
    assert 0 < len(lost) < 12
    assert damage.records > 0


def test_a_write_that_fails_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "requests"
    file = JournalFile(path, os.O_RDWR | os.O_CREAT)
    file.append(frame(record(1)))
    size = path.stat().st_size
    whole: Callable[[int, bytes, int], int] = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: whole(fd, data[:9], at))
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.ENOSPC))):
        file.append(frame(encode(RequestDropped("1"))))
    assert (file.size, path.stat().st_size) == (size, size)
    file.close()
