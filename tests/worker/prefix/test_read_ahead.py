"""Files that are asked for ahead of their use get into the page cache; nothing else happens."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd.worker.prefix.read_ahead import PIECE_BYTES, ReadAhead

PATIENCE_S = 20.0
NBYTES = 4 * PIECE_BYTES + 5000


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end, "the condition does not become true"
        time.sleep(0.0005)


@pytest.fixture(autouse=True)
def _no_file_stays_open() -> Iterator[None]:
    before = len(list(Path("/dev/fd").iterdir()))
    yield
    until(lambda: len(list(Path("/dev/fd").iterdir())) == before)


def cached_parts(path: Path) -> int:
    """Return how many parts of 64 KiB begin in the page cache."""
    fd = os.open(path, os.O_RDONLY)
    found = 0
    try:
        for start in range(0, NBYTES, 1 << 16):
            with contextlib.suppress(BlockingIOError):
                found += os.preadv(fd, [bytearray(1)], start, os.RWF_NOWAIT)
    finally:
        os.close(fd)
    return found


def uncached_file(path: Path) -> Path:
    path.write_bytes(os.urandom(NBYTES))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return path


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="shows the page cache on Linux only")
def test_files_get_into_the_page_cache(tmp_path: Path) -> None:
    paths = [uncached_file(tmp_path / name) for name in ("a", "b")]
    try:
        before = [cached_parts(path) for path in paths]
    except OSError:
        pytest.skip("this file system does not show what is cached")
    if any(before):
        pytest.skip("this file system is a cache itself")
    ahead = ReadAhead(paths)
    parts = -(-NBYTES // (1 << 16))
    until(lambda: not ahead.working)
    until(lambda: [cached_parts(path) for path in paths] == [parts, parts])


def test_a_missing_file_ends_it(tmp_path: Path) -> None:
    ahead = ReadAhead([tmp_path / "missing"])
    until(lambda: not ahead.working)
    ahead.close()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the call on Linux")
def test_it_ends_after_the_present_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(NBYTES))
    gate, asked = threading.Event(), []

    def advise(fd: int, start: int, *rest: int) -> None:
        asked.append(start)
        assert gate.wait(PATIENCE_S)

    monkeypatch.setattr(os, "posix_fadvise", advise)
    ahead = ReadAhead([path, path])
    until(lambda: asked)
    ahead.close()
    assert ahead.working
    gate.set()
    until(lambda: not ahead.working)
    assert asked == [0]


def test_without_a_thread_nothing_happens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    ahead = ReadAhead([tmp_path / "file"])
    assert not ahead.working
    ahead.close()
