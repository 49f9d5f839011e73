"""Entries of the cache: verified when read, bounded, and never an error."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvd.worker.artifacts import entries
from kvd.worker.artifacts.entries import Entries, digest_of


@pytest.fixture
def stored(tmp_path: Path) -> Entries:
    return Entries(tmp_path / "kvd" / "things", 1000)


def test_an_entry_is_read_as_it_was_written_and_belongs_to_the_user_only(stored: Entries) -> None:
    assert stored.get("a") is None
    before = os.umask(0)
    try:
        stored.put("a", b"content")
    finally:
        os.umask(before)
    assert stored.get("a") == b"content"
    assert stored.names() == ["a"]
    assert stored.folder.stat().st_mode & 0o777 == 0o700
    assert (stored.folder / "a").stat().st_mode & 0o777 == 0o600


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _open_to_others(path: Path) -> None:
    path.chmod(0o666)


def _link(path: Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


@pytest.mark.parametrize("damage", [_cut, _flip, _empty, _open_to_others, _link])
def test_what_cannot_be_trusted_is_absent_and_deleted(
    stored: Entries, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    stored.put("a", b"content")
    damage(stored.folder / "a")
    assert stored.get("a") is None
    assert "deleting" in caplog.text
    assert not os.path.lexists(stored.folder / "a")
    stored.put("a", b"content")
    assert stored.get("a") == b"content"


def test_the_least_recently_used_entries_go_first(stored: Entries) -> None:
    for number in range(4):
        stored.put(str(number), bytes(200))
        os.utime(stored.folder / str(number), (number, number))
    assert stored.get("0") is not None
    stored.put("4", bytes(200))
    assert stored.names() == ["0", "2", "3", "4"]


@pytest.mark.parametrize("fault", ["a file", "open to others"])
def test_a_folder_that_cannot_be_used_is_no_error(
    stored: Entries, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    entries._log_once.cache_clear()
    if fault == "a file":
        stored.folder.parent.mkdir()
        stored.folder.write_text("")
    else:
        stored.put("a", b"content")
        stored.folder.chmod(0o777)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            stored.put("a", b"other")
    assert stored.get("a") is None
    assert len(caplog.records) in {1, 2}  # writing and reading may fail for different reasons


def test_entries_are_kept_if_others_of_the_group_could_write_to_the_cache(stored: Entries) -> None:
    """With a umask of 002, whatever creates the cache's folder first gives the group access."""
    stored.folder.parent.mkdir()
    stored.folder.parent.chmod(0o775)
    stored.put("a", b"content")
    assert stored.get("a") == b"content"
    assert stored.folder.parent.stat().st_mode & 0o777 == 0o755


def test_entries_on_a_read_only_disk_are_read(
    stored: Entries, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    stored.put("a", b"content")
    monkeypatch.setattr(os, "utime", refuse)
    assert stored.get("a") == b"content"


def test_writers_of_one_entry_do_not_disturb_each_other(stored: Entries) -> None:
    contents = [bytes([number]) * 100 for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda content: [stored.put("a", content) for _ in range(20)], contents))
        found = stored.get("a")
    assert found in contents
    assert stored.names() == ["a"]


def test_names_differ_if_texts_are_divided_differently() -> None:
    assert len({digest_of("ab", "c"), digest_of("a", "bc"), digest_of("abc")}) == 3
