"""The prefix store with disks, workers and actors that fail, and a clock that is set back."""

from __future__ import annotations

import asyncio
import errno
import shutil
import sqlite3

import pytest

from actors.machines.prefix_store_events import StoreLimits
from kvd.daemon.prefix_store.folder import SegmentFolder
from kvd.daemon.prefix_store.index_file import IndexFile
from protocol import worker as wire
from protocol.prefix_messages import CacheDrop
from protocol.segments import segment_path
from tests.actors.prefix_stores import (
    LIMITS,
    MB,
    answers,
    damage_of,
    known,
    offer,
    store,
    write,
)
from tests.sim.loop import simulated, until
from tests.sim.segment_disk import KIB, info, key, stored_files, write_file


@simulated
async def test_a_hanging_disk_delays_only_the_store(tmp_path):
    async with store(tmp_path) as it:
        it.disk.hangs = True
        it.spawn.last("a").report(wire.SegmentOffered(segment=info(1)))
        client = it.client()
        await client.end(client.generate("a"))
        await asyncio.sleep(1000)
        assert len(it.disk._queue) < 10
        await client.end(client.generate("b"))
        it.disk.proceed()


@pytest.mark.parametrize("complete", [False, True])
@simulated
async def test_a_workers_exit_settles_what_it_was_writing(tmp_path, complete):
    async with store(tmp_path) as it:
        assert await offer(it, "a", info(1))
        part = it.disk.root / "00" / f"{key(1).hex()}.part"
        part.write_bytes(b"x" * 1000)
        if complete:  # the report of a complete file is lost
            write_file(it.disk.root, info(1))
        reserved = it.system.prefix_store.machine.stored_bytes
        assert reserved >= info(1).nbytes

        it.spawn.last("a").die(-9)
        await until(lambda: it.state("a") == "ready" and it.spawn.attempts["a"] == 2)
        files = stored_files(it.disk.root)
        assert not part.exists()
        assert files.keys() == ({key(1)} if complete else set())
        assert it.system.prefix_store.machine.stored_bytes == sum(files.values())
        assert known(it.spawn.last("b")) == files.keys()
        assert await offer(it, "b", info(2))


@simulated
async def test_with_a_broken_disk_the_store_is_off_until_it_works_again(tmp_path):
    async with store(tmp_path) as it:
        await write(it, "a", info(1))
        it.disk.broken = OSError(errno.EROFS, "Read-only file system")
        assert not await offer(it, "a", info(2))
        problem = it.system.status().problems[0]
        assert problem.key == "prefix_store.limit"
        assert "Read-only file system" in problem.observed
        assert not await offer(it, "a", info(3))
        off = [one for one in it.system.events.records if one.kind == "prefix_store_off"]
        assert len(off) == 1
        client = it.client()
        await client.end(client.generate("a"))

        it.disk.broken = None
        await until(lambda: not it.system.status().problems, 200)
        await write(it, "a", info(4))
        assert known(it.spawn.last("b")) == {key(1), key(4)}


@simulated
async def test_a_file_renamed_while_the_store_was_off_is_counted(tmp_path):
    async with store(tmp_path) as it:
        assert await offer(it, "a", info(1))
        assert await offer(it, "a", info(2))
        it.disk.broken = OSError(errno.EIO, "Input/output error")
        assert not await offer(it, "b", info(3))
        for number in (1, 2):
            written = write_file(it.disk.root, info(number))
            if number == 1:
                it.spawn.last("a").report(wire.SegmentWritten(segment=written, seconds=0.1))
        it.disk.broken = None
        await until(lambda: not it.system.status().problems, 200)
        it.spawn.last("a").report(wire.SegmentWritten(segment=written, seconds=0.1))
        await asyncio.sleep(1)
        files = stored_files(it.disk.root)
        assert len(files) == 2
        assert it.system.prefix_store.machine.stored_bytes == sum(files.values())


@simulated
async def test_after_a_failure_of_the_actor_the_store_is_off_for_a_while(tmp_path):
    async with store(tmp_path, load=("a",), faults=True) as it:
        await write(it, "a", info(1))
        await write(it, "a", info(2))
        it.system.prefix_store.machine.index._children[key(1)] = {b"nonsense"}
        it.spawn.last("a").report(wire.SegmentDamaged(key=key(1), reason="test"))
        await until(lambda: it.notices_of("actor_failed"))
        assert it.system.status().problems
        await until(lambda: not it.system.status().problems, 200)
        assert it.system.prefix_store.machine.index.segments.keys() == {key(2)}
        assert it.state("a") == "ready"


@simulated
async def test_damaged_files_that_a_start_finds_are_reported(tmp_path):
    async with store(tmp_path) as it:
        await write(it, "a", info(1))
    path = segment_path(it.disk.root, key(1))
    path.write_bytes(path.read_bytes()[:-1])
    async with store(tmp_path) as it:
        assert stored_files(it.disk.root) == {}
        assert path.name in damage_of(it)[0].reason


@simulated
async def test_uses_before_the_clock_was_set_back_do_not_keep_segments(tmp_path):
    async with store(tmp_path) as it:
        state, clock = it.system.prefix_store, it.system.prefix_store.clock
        state.clock = lambda: clock() + 1e9
        await write(it, "a", info(1, nbytes=900 * KIB))
        state.clock = clock
        await asyncio.sleep(200)
        for number in range(2, 8):
            await write(it, "a", info(number, nbytes=900 * KIB))
            await asyncio.sleep(100)
        assert key(1) not in stored_files(it.disk.root)
        assert len(stored_files(it.disk.root)) == 4


@simulated
async def test_a_permission_is_answered_although_the_clock_was_set_back(tmp_path):
    async with store(tmp_path) as it:
        state, clock = it.system.prefix_store, it.system.prefix_store.clock
        await asyncio.sleep(100)
        it.disk.hangs = True
        process = it.spawn.last("a")
        process.report(wire.SegmentOffered(segment=info(1)))
        state.clock = lambda: clock() - 500
        await asyncio.sleep(20)
        it.disk.proceed()
        await until(lambda: answers(process, wire.SegmentAllowed))
        assert await offer(it, "a", info(2))


@simulated
async def test_a_folder_that_was_deleted_is_created_again(tmp_path):
    async with store(tmp_path) as it:
        await write(it, "a", info(1))
        shutil.rmtree(it.disk.root)
        await until(lambda: it.system.status().problems, 200)
        await until(lambda: not it.system.status().problems, 200)
        assert known(it.spawn.last("b")) == set()
        await write(it, "a", info(2))
        assert stored_files(it.disk.root).keys() == {key(2)}


@simulated
async def test_with_a_locked_index_the_store_is_off_for_a_while(tmp_path):
    async with store(tmp_path) as it:
        await write(it, "a", info(1))
        it.disk.disk._index_file._database.execute("PRAGMA busy_timeout = 1")
        other = sqlite3.connect(it.disk.root / "index.sqlite", isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        await write(it, "a", info(2))
        await until(lambda: it.system.status().problems, 200)
        assert "locked" in it.system.status().problems[0].observed
        other.close()
        await until(lambda: not it.system.status().problems, 200)
        assert known(it.spawn.last("b")) == {key(1), key(2)}


@simulated
async def test_an_index_that_is_damaged_while_it_is_used_is_rebuilt(tmp_path):
    async with store(tmp_path) as it:
        await write(it, "a", info(1))
        for name in ("index.sqlite", "index.sqlite-wal"):
            path = it.disk.root / name
            path.write_bytes(b"x" * path.stat().st_size)
        await write(it, "a", info(2))
        await asyncio.sleep(300)
        assert not it.system.status().problems
        await write(it, "a", info(3))
    async with store(tmp_path) as it:
        assert known(it.spawn.last("b")) == {key(1), key(2), key(3)}


@simulated
async def test_an_offer_is_answered_when_the_actor_fails(tmp_path):
    """Otherwise the worker would wait for ever, and never write again."""
    async with store(tmp_path, load=("a",), faults=True) as it:
        await write(it, "a", info(1))
        it.disk.hangs = True
        it.spawn.last("a").report(wire.SegmentOffered(segment=info(2), hits=0))
        await until(lambda: it.system.prefix_store.machine.writes.permissions)
        it.system.prefix_store.machine.index._children[key(1)] = {b"nonsense"}
        it.spawn.last("a").report(wire.SegmentDamaged(key=key(1), reason="test"))
        await until(lambda: len(answers(it.spawn.last("a"), wire.SegmentAllowed)) == 2, 10)
        assert not answers(it.spawn.last("a"), wire.SegmentAllowed)[-1].allowed


@simulated
async def test_damage_that_is_found_while_the_store_is_off_is_not_forgotten(tmp_path):
    async with store(tmp_path) as it:
        await write(it, "a", info(1))
        it.system.limit_prefix_store(StoreLimits())
        await asyncio.sleep(0.1)
        it.spawn.last("a").report(wire.SegmentDamaged(key=key(1), reason="test"))
        await asyncio.sleep(0.1)
        it.system.limit_prefix_store(LIMITS)
        await asyncio.sleep(0.1)
        assert not it.system.prefix_store.machine.index.segments
        assert not stored_files(it.disk.root)


@simulated
async def test_with_a_full_disk_segments_are_deleted_until_enough_is_free(tmp_path, monkeypatch):
    """The index cannot be written then. The store stays on, or its bytes would stay too."""
    limits = StoreLimits(limit_bytes=4 * MB, daily_bytes=1000 * MB, keep_free_bytes=MB)
    free = [10 * MB]
    monkeypatch.setattr(SegmentFolder, "free_bytes", lambda _: free[0])

    def full(*_):
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    async with store(tmp_path, limits=limits) as it:
        for number in range(3):
            await write(it, "a", info(number))
        monkeypatch.setattr(IndexFile, "record_uses", full)
        monkeypatch.setattr(IndexFile, "remove", full)
        free[0] = MB - 150 * KIB
        used = wire.SegmentUsed(key=key(2), tokens=256, seconds=0.1, prefill_s=1.0)
        it.spawn.last("a").report(used)
        await until(lambda: len(stored_files(it.disk.root)) == 1, 100)
        assert it.system.prefix_store.machine.state == "on"
    monkeypatch.undo()
    async with store(tmp_path) as it:
        assert it.system.prefix_store.machine.index.segments.keys() == {key(2)}


@simulated
async def test_a_store_whose_index_does_not_open_on_a_full_disk_can_be_dropped(
    tmp_path, monkeypatch
):
    async with store(tmp_path) as it:
        await write(it, "a", info(1))
    connect = sqlite3.connect

    def full(path, **options):
        if path != ":memory:":
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error
        return connect(path, **options)

    monkeypatch.setattr(sqlite3, "connect", full)
    monkeypatch.setattr(SegmentFolder, "free_bytes", lambda _: 0)
    async with store(tmp_path) as it:
        assert (await it.client().ask(CacheDrop)).segments == 1
        assert not stored_files(it.disk.root)
