"""How much of some files is in the page cache."""

from __future__ import annotations

import itertools
import os
from pathlib import Path

import pytest

from kvd.worker.prefix import page_cache
from kvd.worker.prefix.page_cache import SAMPLES, cached_share

MIB = 1 << 20


def file_of(folder: Path, name: str, nbytes: int) -> Path:
    path = folder / name
    path.write_bytes(os.urandom(nbytes))
    return path


def drop(path: Path) -> None:
    """Remove a file from the page cache; skip the test if its folder is in memory."""
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    at = max((where for where, _ in mounts if path.is_relative_to(where)), key=len)
    if any(kind == "tmpfs" for where, kind in mounts if where == at):
        pytest.skip("the folder is in memory")
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 65536, 65537, 3 * MIB + 1])
def test_a_file_that_was_just_written_is_in_the_page_cache(tmp_path: Path, nbytes: int) -> None:
    assert cached_share([file_of(tmp_path, "file", nbytes)]) == 1.0


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be emptied")
def test_the_check_does_not_read_a_file_that_is_only_on_disk(tmp_path: Path) -> None:
    path = file_of(tmp_path, "file", 16 * MIB)
    drop(path)
    assert cached_share([path]) < 0.05
    assert cached_share([path]) < 0.05


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be emptied")
def test_files_count_by_their_bytes(tmp_path: Path) -> None:
    large, small = file_of(tmp_path, "large", 12 * MIB), file_of(tmp_path, "small", 4 * MIB)
    drop(large)
    assert cached_share([large, small]) == pytest.approx(0.25, abs=0.05)
    assert cached_share([small]) == 1.0


def test_missing_empty_and_irregular_files_do_not_count(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "empty").touch()
    (tmp_path / "link").symlink_to(file_of(tmp_path, "target", 5))
    paths = [tmp_path / name for name in ("pipe", "empty", "link", "missing", ".")]
    assert cached_share(paths) == 1.0


def test_places_are_spread_over_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        page_cache, "_resident", lambda at, length: looked.append((at, length)) or 0
    )
    files = [file_of(tmp_path, str(number), nbytes) for number, nbytes in enumerate([64, 16 * MIB])]
    assert cached_share(files) == 0.0
    (small,), large = [one for one in looked if one[1] == 64], looked[1:]
    assert small[0] % 4096 == 0
    assert len(large) == SAMPLES
    starts = sorted(at for at, _ in large)
    assert starts[-1] + 65536 - starts[0] == pytest.approx(16 * MIB, abs=4096)
    assert max(b - a for a, b in itertools.pairwise(starts)) < 2 * 16 * MIB / SAMPLES


def test_without_mincore_all_files_count_as_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> object:
        raise AttributeError

    monkeypatch.setattr(page_cache, "_library", fail)
    assert cached_share([file_of(tmp_path, "file", 100)]) == 1.0


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the page cache cannot be emptied")
def test_only_the_needed_part_counts(tmp_path: Path) -> None:
    path = file_of(tmp_path, "file", 16 * MIB)
    drop(path)
    fd = os.open(path, os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)  # the system reads nothing ahead
    for start in range(0, 4 * MIB, MIB):
        os.pread(fd, MIB, start)
    os.close(fd)
    assert cached_share([path], [(0.0, 0.25)]) > 0.9
    assert cached_share([path], [(0.5, 1.0)]) < 0.1
    assert cached_share([path]) == pytest.approx(0.25, abs=0.1)
    assert cached_share([path, path], [(0.0, 0.0), (0.5, 1.0)]) < 0.1
    assert cached_share([path], [(0.0, 0.0)]) == 1.0
