"""What doctor reports of the prefix store: its folder, its index and the space for it."""

from __future__ import annotations

import pytest

from actors.machines import prefix_store_events as ev
from kvd.daemon.prefix_store.disk import StoreDisk
from kvd.daemon.prefix_store.folder import SegmentFolder
from kvd.doctor import prefixes
from kvd.doctor.scene import Scene
from kvd.host import listen
from kvd.host.home import Home
from protocol.segments import segment_path
from tests.sim.segment_disk import info, key, write_file


@pytest.fixture
def stored(home: Home) -> Home:
    """A home with two stored segments."""
    home.create()
    limit(home, 10**6)
    disk = StoreDisk(SegmentFolder(home.prefixes))
    disk.run(ev.OpenStore(1, frozenset(), 0.0))
    for number in (1, 2):
        write_file(home.prefixes, info(number, nbytes=1000))
    disk.run(ev.OpenStore(2, frozenset(), 0.0))
    disk.close()
    return home


def limit(home: Home, nbytes: int, keep_free: int = 0) -> None:
    home.config.write_text(f"[prefix_store]\nlimit = {nbytes}\nkeep_free = {keep_free}\n")
    home.config.chmod(0o600)


def verdicts(home: Home) -> dict[str, str]:
    return {found.name: found.verdict for found in prefixes.store(Scene(home))}


def test_without_a_store(home: Home):
    home.create()
    assert verdicts(home) == {"prefix store": "skip"}


def test_a_sound_store(stored: Home):
    space, index = prefixes.store(Scene(stored))
    assert (space.verdict, index.verdict) == ("ok", "ok")
    assert index.numbers == {"segments": 2}
    with listen.hold_lock(stored):
        assert verdicts(stored) == {"prefix store": "ok"}, "a running daemon changes the index"


def test_segments_of_a_store_that_is_off(stored: Home):
    limit(stored, 0)
    (found,) = prefixes.store(Scene(stored))
    assert found.verdict == "warn"
    assert "in 2 segments" in found.observed


def test_a_folder_that_others_may_read_or_that_cannot_be_written(stored: Home):
    stored.prefixes.chmod(0o755)
    assert verdicts(stored) == {"prefix store": "warn"}
    stored.prefixes.chmod(0o500)
    assert verdicts(stored) == {"prefix store": "fail"}
    stored.prefixes.chmod(0o700)


def test_too_little_free_space(stored: Home):
    limit(stored, 10**6, keep_free=2**60)
    found = prefixes.store(Scene(stored))[0]
    assert found.verdict == "warn"
    assert "keep_free" in found.observed
    limit(stored, 2**60)
    assert "is not reached" in prefixes.store(Scene(stored))[0].observed


def test_files_that_are_not_in_the_index_and_entries_without_a_file(stored: Home):
    write_file(stored.prefixes, info(3, nbytes=1000))
    segment_path(stored.prefixes, key(1)).unlink()
    found = prefixes.store(Scene(stored))[1]
    assert (found.verdict, found.numbers) == ("warn", {"unknown": 1, "gone": 1})


@pytest.mark.parametrize("content", [b"x" * 5000, b""])
def test_a_damaged_index(stored: Home, content: bytes):
    (stored.prefixes / "index.sqlite").write_bytes(content)
    assert prefixes.store(Scene(stored))[1].verdict == "warn"
    StoreDisk(SegmentFolder(stored.prefixes)).run(ev.OpenStore(1, frozenset(), 0.0))
    copied = bool(content)  # an empty file is a new index
    assert ("prefix index copy" in verdicts(stored)) == copied
