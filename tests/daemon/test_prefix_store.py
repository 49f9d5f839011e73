"""Files and index of the prefix store: killed at any point, damaged, or among other files."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import shutil
import sqlite3
import stat
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.machines import prefix_store_events as ev
from actors.machines.prefix_store import PrefixStore
from actors.machines.segment_index import Segment
from kvd.daemon.prefix_store.disk import StoreDisk
from kvd.daemon.prefix_store.folder import SegmentFolder
from kvd.daemon.prefix_store.index_file import IndexFile
from kvd.daemon.prefix_store.thread import DiskThread
from protocol import worker as wire
from protocol.key_file import create_key
from protocol.segments import segment_path
from tests.sim.segment_disk import KIB, SPACE, info, key, stored_files, write_file

NOW = 2e9
LIMITS = ev.StoreLimits(limit_bytes=600 * KIB, daily_bytes=10**12, keep_free_bytes=0)


def disk_of(root: Path, key_file: Path | None = None) -> StoreDisk:
    return StoreDisk(SegmentFolder(root), key_file)


def opened(
    root: Path, key_file: Path | None = None, *, writing=frozenset()
) -> tuple[StoreDisk, ev.StoreOpened]:
    disk = disk_of(root, key_file)
    found = disk.run(ev.OpenStore(1, writing, NOW))
    assert isinstance(found, ev.StoreOpened)
    return disk, found


def segment(number: int, nbytes: int, *, base: int | None = None, tokens: int = 256) -> Segment:
    return Segment(
        key=key(number),
        space=SPACE,
        base=None if base is None else key(base),
        tokens=tokens,
        nbytes=nbytes,
        created=100.0,
        used=200.0,
        hits=3,
        saved_s=1.5,
    )


class Killed(BaseException):
    """The daemon is killed here."""


class CrashingStore(RuleBasedStateMachine):
    """A store whose daemon is killed between any two operations on files and index."""

    def __init__(self):
        super().__init__()
        self.root = Path(tempfile.mkdtemp()) / "prefixes"
        self.now = 10**9
        self.keys = 0
        self.key_file: Path | None = None
        self.start()

    def teardown(self):
        self.disk.close()
        shutil.rmtree(self.root.parent, ignore_errors=True)

    def start(self, kill_at=None):
        self.steps_left: int | None = kill_at
        self.machine, self.life = PrefixStore(), 1
        self.disk = disk_of(self.root, self.key_file)
        self.feed(ev.LimitsChanged(LIMITS))
        self.feed(ev.Reported("a", 1, wire.SegmentsOpened(space=SPACE)))
        assert self.machine.state == "on"
        recorded = sqlite3.connect(self.root / "index.sqlite")
        in_index = dict(recorded.execute("SELECT key, nbytes FROM segments"))
        recorded.close()
        files = stored_files(self.root)
        in_memory = {it.key: it.nbytes for it in self.machine.index.segments.values()}
        assert in_memory == in_index == files, "index and folder differ after a start"
        assert not list(self.root.glob("??/*.part")), "an incomplete file is left"

    def feed(self, event):
        events = [event]
        while events:
            for command in self.machine.handle(events.pop(0), self.now):
                if isinstance(command, ev.DiskCommand):
                    self.step()
                    answer = self.run(command)
                    self.step()
                    if answer is not None:
                        events.append(answer)
        self.machine.check()

    def run(self, command):
        """Run a command; within it, the daemon may die after any file or before the commit."""
        folder = self.disk._folder
        delete = SegmentFolder.delete.__get__(folder)
        folder.delete = lambda key: (self.step(), delete(key), self.step())
        return self.disk.run(command)

    def step(self):
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                raise Killed

    def allowed(self, number):
        found = self.machine.writes.permissions.get(key(number))
        return found is not None and found.allowed

    @rule(size=st.integers(1, 200), on_base=st.booleans(), kill_at=st.none() | st.integers(0, 8))
    def write(self, size, on_base, kill_at):
        self.now += 100
        self.keys += 1
        bases = [it for it in self.machine.index.segments.values() if it.tokens < 2000]
        base = bases[-1] if on_base and bases else None
        tokens = 256 + (base.tokens if base else 0)
        number = None if base is None else int.from_bytes(base.key, "big")
        offered = info(self.keys, tokens, base=number, nbytes=size * KIB)
        self.steps_left = kill_at
        try:
            self.feed(ev.Reported("a", 1, wire.SegmentOffered(segment=offered)))
            if self.allowed(self.keys):
                part = segment_path(self.root, offered.key).with_suffix(".part")
                part.write_bytes(b"begun")
                self.step()
                written = write_file(self.root, offered, form=self.disk._folder.form)
                self.step()
                self.feed(ev.Reported("a", 1, wire.SegmentWritten(segment=written, seconds=0.1)))
        except Killed:
            self.restart()
        self.steps_left = None

    @rule(kill_at=st.none() | st.integers(0, 8))
    def drop_old_ones(self, kill_at):
        self.now += 100
        self.steps_left = kill_at
        try:
            self.feed(ev.DropRequested(1, None, 500.0))
        except Killed:
            self.restart()
        self.steps_left = None

    @precondition(lambda self: len(self.machine.index))
    @rule(kill_at=st.none() | st.integers(0, 8))
    def damage(self, kill_at):
        damaged = next(iter(self.machine.index.segments))
        self.steps_left = kill_at
        try:
            self.feed(ev.Reported("a", 1, wire.SegmentDamaged(key=damaged, reason="test")))
        except Killed:
            self.restart()
        self.steps_left = None

    @rule()
    def restart(self):
        self.disk.close()
        self.start()

    @rule(name=st.sampled_from([None, "a.key", "b.key"]), kill_at=st.none() | st.integers(0, 4))
    def restart_with_another_key(self, name, kill_at):
        before, old = stored_files(self.root), self.key_file
        self.disk.close()
        self.key_file = None if name is None else self.root.with_name(name)
        if self.key_file is not None:
            create_key(self.key_file)
        try:
            self.start(kill_at)
        except Killed:
            self.disk.close()
            self.start()
        self.steps_left = None
        expected = before if self.key_file == old else {}
        assert stored_files(self.root) == expected, "segments of another key are left"

    @precondition(lambda self: stored_files(self.root))
    @rule(what=st.sampled_from(["cut", "gone", "foreign"]))
    def restart_with_a_changed_file(self, what):
        self.disk.close()
        path = segment_path(self.root, next(iter(stored_files(self.root))))
        if what == "cut":
            path.write_bytes(path.read_bytes()[:-1])
        elif what == "foreign":
            path.write_bytes(b"something else")
        else:
            path.unlink()
        self.start()

    @rule(what=st.sampled_from(["gone", "zeros", "cut", "text", "old wal"]))
    def restart_with_a_damaged_index(self, what):
        self.disk.close()
        before = stored_files(self.root)
        index = self.root / "index.sqlite"
        data = index.read_bytes()
        if what == "gone":
            index.unlink()
        elif what == "old wal":
            index.with_name("index.sqlite-wal").write_bytes(b"not a log" * 1000)
        else:
            damaged = {"zeros": bytes(len(data)), "cut": data[:5000], "text": b"x" * 5000}
            index.write_bytes(damaged[what])
        self.start()
        assert stored_files(self.root) == before, "a damaged index costs segments"

    @invariant()
    def bytes_are_counted(self):
        files = stored_files(self.root)
        assert self.machine.stored_bytes == sum(files.values())
        assert self.machine.stored_bytes <= LIMITS.limit_bytes


CrashingStore.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
TestCrashingStore = CrashingStore.TestCase


def test_uses_are_kept_across_restarts(tmp_path):
    disk, _ = opened(tmp_path / "p")
    written = write_file(tmp_path / "p", info(1))
    stored = segment(1, written.nbytes)
    disk.run(ev.RecordWritten(7, 1000, stored))
    disk.run(ev.RecordWritten(7, 500))
    disk.run(ev.RecordModel(SPACE, "a"))
    stored.used, stored.hits = 300.0, 4
    disk.run(ev.Synchronize([stored]))
    disk.close()
    _, found = opened(tmp_path / "p")
    assert found.index.segments == {stored.key: stored}
    assert (found.written, found.models) == ({7: 1500}, {SPACE: ["a"]})


def test_files_and_folders_are_private_and_other_files_stay(tmp_path):
    root = tmp_path / "p"
    disk, _ = opened(root)
    disk.run(ev.MakeRoom(key(1), []))
    written = write_file(root, info(1))
    disk.run(ev.RecordWritten(0, 1, segment(1, written.nbytes)))
    modes = {stat.S_IMODE(path.stat().st_mode) for path in root.rglob("*") if path.is_file()}
    assert modes == {0o600}
    assert stat.S_IMODE(root.stat().st_mode) == stat.S_IMODE((root / "00").stat().st_mode) == 0o700
    disk.close()

    other = [root / "README", root / "00" / "notes.txt", root / "00" / f"{key(9).hex()}.kvs.bak"]
    for path in other:
        path.write_text("mine")
    (root / "00" / f"{key(8).hex()}.kvs").symlink_to(other[0])
    (root / "00" / f"{key(7).hex()}.part").write_text("begun")
    (root / "00" / f"{key(6).hex()}.part").write_text("being written")
    _, found = opened(root, writing=frozenset([key(6)]))
    assert list(found.index.segments) == [key(1)]
    assert all(path.read_text() == "mine" for path in other)
    assert {path.stem for path in root.glob("00/*.part")} == {key(6).hex()}


def test_a_database_of_another_program_is_set_aside(tmp_path):
    root = tmp_path / "p"
    root.mkdir()
    other = sqlite3.connect(root / "index.sqlite")
    other.execute("CREATE TABLE segments (mine)")
    other.commit()
    other.close()
    write_file(root, info(1))
    _, found = opened(root)
    assert list(found.index.segments) == [key(1)]
    assert (root / "index.damaged").exists()


def test_an_index_is_not_damaged_if_the_process_has_too_many_open_files(tmp_path):
    path = tmp_path / "index.sqlite"
    index = IndexFile(path)
    index.add_model(b"s", "m")
    index.close()
    next_fd = os.open(os.devnull, os.O_RDONLY)
    os.close(next_fd)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd + 1, hard))
    try:
        with pytest.raises(sqlite3.OperationalError, match="unable to open"):
            IndexFile(path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    index = IndexFile(path)
    assert index.models() == {b"s": ["m"]}
    index.close()


def test_segments_of_another_key_are_deleted_and_uses_are_kept_with_the_same(tmp_path):
    root, key_file = tmp_path / "p", tmp_path / "prefixes.key"
    create_key(key_file)
    disk, _ = opened(root, key_file)
    written = write_file(root, info(1), form=disk._folder.form)
    stored = segment(1, written.nbytes)
    disk.run(ev.RecordWritten(7, 1000, stored))
    disk.close()
    disk, found = opened(root, key_file)
    assert found.index.segments == {key(1): stored}
    disk.close()
    (root / "index.sqlite").unlink()
    disk, found = opened(root, key_file)
    assert list(found.index.segments) == [key(1)], "a lost index costs segments"
    disk.close()

    key_file.unlink()
    create_key(key_file)
    disk, found = opened(root, key_file)
    assert not found.index.segments
    assert len(found.damaged) == 1
    assert stored_files(root) == {}
    disk.close()


@pytest.mark.parametrize("problem", ["missing", "shared", "short"])
def test_without_a_usable_key_the_store_stays_off_and_nothing_is_deleted(tmp_path, problem):
    root, key_file = tmp_path / "p", tmp_path / "prefixes.key"
    create_key(key_file)
    disk, _ = opened(root, key_file)
    write_file(root, info(1), form=disk._folder.form)
    disk.close()
    content = key_file.read_bytes()
    if problem == "missing":
        key_file.unlink()
    elif problem == "shared":
        key_file.chmod(0o644)
    else:
        key_file.write_bytes(content[:8])
    for _ in range(2):
        with pytest.raises(OSError, match=str(key_file)):
            opened(root, key_file)
    key_file.write_bytes(content)
    key_file.chmod(0o600)
    _, found = opened(root, key_file)
    assert list(found.index.segments) == [key(1)]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_an_error(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OSError, match="Permission denied"):
        opened(tmp_path / "p")


def test_a_file_in_place_of_the_folder_is_an_error_for_the_store_only(tmp_path):
    (tmp_path / "p").write_text("a file")

    async def main() -> list[ev.DiskEvent]:
        answers: asyncio.Queue[ev.DiskEvent] = asyncio.Queue()
        thread = DiskThread(tmp_path / "p")
        thread.submit(ev.OpenStore(1, frozenset(), NOW), answers.put_nowait)
        thread.submit(ev.Synchronize([]), answers.put_nowait)
        found = [await answers.get(), await answers.get()]
        thread.close()
        return found

    first, _ = asyncio.run(main())
    assert isinstance(first, ev.DiskFailed)
    assert os.strerror(errno.EEXIST) in first.reason


def test_bytes_of_a_write_that_a_killed_daemon_left_incomplete_count_as_written(tmp_path):
    disk, _ = opened(tmp_path / "p")
    disk.run(ev.MakeRoom(key(1), []))
    disk.close()
    part = tmp_path / "p" / "00" / f"{key(1).hex()}.part"
    part.write_bytes(bytes(3000))
    os.utime(part, (86_400 * 7 + 5, 86_400 * 7 + 5))
    _, found = opened(tmp_path / "p")
    assert not part.exists()
    assert found.written == {7: 3000}
