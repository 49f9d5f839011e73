"""The prefix store between simulated workers and real files."""

from __future__ import annotations

import asyncio
import errno

import pytest

from actors.machines.prefix_store import MAX_DELETED
from actors.machines.prefix_store_events import DeleteSegments, StoreLimits
from actors.machines.segment_index import Segment
from actors.machines.segment_readers import MAX_LISTED
from actors.system import Settings
from protocol import worker as wire
from protocol.errors import InvalidRequest
from protocol.prefix_messages import Cache, CacheDrop
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
from tests.sim.segment_disk import KIB, SPACE, SimDisk, info, key, stored_files, write_file
from tests.sim.world import world


@simulated
async def test_a_written_segment_reaches_the_other_workers_of_its_space(tmp_path):
    async with store(tmp_path, load=("a", "b", "c"), opened=False) as it:
        for name, space in (("a", SPACE), ("b", SPACE), ("c", b"another space!!!")):
            it.spawn.last(name).report(wire.SegmentsOpened(space=space))
        await asyncio.sleep(0.1)
        written = await write(it, "a", info(1))

        assert answers(it.spawn.last("b"), wire.SegmentsChanged)[-1].added == [written]
        assert known(it.spawn.last("c")) == known(it.spawn.last("a")) == set()
        load = answers(it.spawn.last("a"), wire.LoadModel)[0]
        assert load.segments_folder == str(it.disk.root)


@simulated
async def test_segments_outlive_the_daemon(tmp_path):
    async with store(tmp_path) as it:
        written = [await write(it, "a", info(1)), await write(it, "a", info(2, 512, base=1))]
    async with store(tmp_path) as it:
        assert answers(it.spawn.last("b"), wire.SegmentsChanged)[-1].added == written
        assert it.system.prefix_store.spaces()[0].models == ["a", "b"]


@simulated
async def test_a_worker_that_opened_before_the_index_was_read_gets_the_list_later(tmp_path):
    async with store(tmp_path) as it:
        await write(it, "a", info(1))
    disk = SimDisk(tmp_path / "prefixes", delay_s=60.0)
    settings = Settings(segments_folder=str(disk.root), prefix_store=LIMITS)
    async with world(load=("a",), settings=settings, segment_disk=disk) as it:
        it.spawn.last("a").report(wire.SegmentsOpened(space=SPACE))
        assert not await offer(it, "a", info(2))
        await until(lambda: known(it.spawn.last("a")) == {key(1)})


@simulated
async def test_evicted_segments_are_deleted_before_the_permission(tmp_path):
    limits = StoreLimits(limit_bytes=1 * MB, daily_bytes=1000 * MB, keep_free_bytes=0)
    async with store(tmp_path, limits=limits) as it:
        for number in range(1, 8):
            await write(it, "a", info(number, nbytes=200 * KIB))
            await asyncio.sleep(20)
            assert sum(stored_files(it.disk.root).values()) <= limits.limit_bytes
        files = stored_files(it.disk.root)
        assert key(7) in files
        assert key(1) not in files
        assert known(it.spawn.last("b")) == files.keys()

        it.disk.hangs = True
        it.spawn.last("a").report(wire.SegmentOffered(segment=info(9, nbytes=200 * KIB)))
        await asyncio.sleep(100)
        allowed = [command.key for command in answers(it.spawn.last("a"), wire.SegmentAllowed)]
        assert key(9) not in allowed, "allowed before the disk had deleted anything"
        it.disk.proceed()
        await until(lambda: answers(it.spawn.last("a"), wire.SegmentAllowed)[-1].key == key(9))


@simulated
async def test_a_damaged_segment_and_all_that_continue_it_are_deleted(tmp_path):
    async with store(tmp_path) as it:
        for number in (1, 2, 3):
            await write(it, "a", info(number, 256 * number, base=number - 1 or None))
        it.spawn.last("b").report(wire.SegmentDamaged(key=key(2), reason="checksum"))
        await asyncio.sleep(1)
        assert stored_files(it.disk.root).keys() == {key(1)}
        assert known(it.spawn.last("b")) == {key(1)}
        (event,) = damage_of(it)
        assert event.model == "b"
        assert key(2).hex() in event.reason


@simulated
async def test_the_store_can_be_turned_off_and_on(tmp_path):
    async with store(tmp_path) as it:
        await write(it, "a", info(1))
        it.system.limit_prefix_store(StoreLimits())
        await asyncio.sleep(1)
        assert known(it.spawn.last("b")) == set()
        assert not await offer(it, "a", info(2))
        assert it.system.status().problems == []
        it.system.limit_prefix_store(LIMITS)
        await asyncio.sleep(1)
        assert known(it.spawn.last("b")) == {key(1)}


@simulated
async def test_a_loaded_model_uses_a_store_that_is_turned_on_later(tmp_path):
    async with store(tmp_path, limits=StoreLimits(), opened=False) as it:
        worker = it.spawn.last("a")
        load = answers(worker, wire.LoadModel)[0]
        assert (load.segments_folder, load.prefix_store_on) == (str(it.disk.root), False)
        worker.report(wire.SegmentsOpened(space=SPACE))
        await asyncio.sleep(1)
        assert answers(worker, wire.SegmentsChanged) == []
        it.system.limit_prefix_store(LIMITS)
        await asyncio.sleep(1)
        assert answers(worker, wire.SegmentsChanged) == [wire.SegmentsChanged()]
        await write(it, "a", info(1))
        assert it.system.prefix_store.machine.index.segments.keys() == {key(1)}


@simulated
async def test_a_lower_limit_deletes_segments(tmp_path):
    async with store(tmp_path) as it:
        for number in range(1, 6):
            await write(it, "a", info(number, nbytes=500 * KIB))
        await asyncio.sleep(20)
        it.system.limit_prefix_store(StoreLimits(limit_bytes=MB, keep_free_bytes=0))
        await asyncio.sleep(1)
        assert len(stored_files(it.disk.root)) == 1


@simulated
async def test_without_a_store_reports_are_answered(tmp_path):
    async with world(load=("a",)) as it:
        assert answers(it.spawn.last("a"), wire.LoadModel)[0].segments_folder is None
        it.spawn.last("a").report(wire.SegmentsOpened(space=SPACE))
        assert not await offer(it, "a", info(1))


@simulated
async def test_a_client_sees_and_drops_what_is_stored(tmp_path):
    async with store(tmp_path, load=("a", "b", "c"), opened=False) as it:
        spaces = {"a": SPACE, "b": SPACE, "c": b"another space!!!"}
        for name, space in spaces.items():
            it.spawn.last(name).report(wire.SegmentsOpened(space=space))
        await asyncio.sleep(0.1)
        for number, (name, base) in enumerate([("a", None), ("a", 1), ("b", None), ("c", None)], 1):
            await write(it, name, info(number, 256 * number, base=base), space=spaces[name])
        used = wire.SegmentUsed(key=key(2), tokens=512, seconds=0.5, prefill_s=3.0)
        it.spawn.last("b").report(used)
        await asyncio.sleep(0.1)
        client = it.client()
        reply = await client.ask(Cache)
        assert [(one.models, one.segments) for one in reply.spaces] == [(["a", "b"], 3), (["c"], 1)]
        assert (reply.spaces[0].hits, reply.spaces[0].saved_s) == (1, 2.5)
        assert reply.spaces[0].tokens == 256 + 256 + 768
        assert reply.store.stored_bytes == sum(stored_files(it.disk.root).values())
        assert it.system.status().prefix_store == reply.store

        stored = it.system.prefix_store.stored_for("b")
        assert stored == reply.spaces[0]

        with pytest.raises(InvalidRequest, match="nothing of 'd'"):
            await client.ask(CacheDrop, model="d")
        size = stored_files(it.disk.root)[key(4)]
        dropped = await client.ask(CacheDrop, model="c")
        assert (dropped.segments, dropped.freed_bytes) == (1, size)
        assert key(4) not in stored_files(it.disk.root)

        await asyncio.sleep(100)
        it.spawn.last("b").report(used)
        await asyncio.sleep(1)
        assert (await client.ask(CacheDrop, unused_s=50.0)).segments == 1
        assert stored_files(it.disk.root).keys() == {key(1), key(2)}, "a base counts as used"
        assert (await client.ask(CacheDrop)).segments == 2
        assert stored_files(it.disk.root) == {}

        it.disk.broken = OSError(errno.EIO, "Input/output error")
        assert not await offer(it, "a", info(9))
        with pytest.raises(InvalidRequest, match="Input/output error"):
            await client.ask(CacheDrop)


@simulated
async def test_metrics_count_what_the_store_does(tmp_path):
    async with store(tmp_path) as it:
        written = await write(it, "a", info(1))
        assert not await offer(it, "b", info(1))
        used = wire.SegmentUsed(key=key(1), tokens=256, seconds=0.5, prefill_s=3.0, nbytes=777)
        it.spawn.last("b").report(used)
        await asyncio.sleep(1)
        text = await it.metrics.text()
        for line in (
            f'kvd_prefix_store_written_bytes_total{{model="a"}} {written.nbytes}',
            'kvd_prefix_store_refused_total{model="b",reason="stored"} 1',
            'kvd_prefix_store_hit_tokens_total{model="b"} 256',
            'kvd_prefix_store_saved_seconds_total{model="b"} 2.5',
            'kvd_prefix_store_read_bytes_total{model="b"} 777',
            f"kvd_prefix_store_written_today_bytes {written.nbytes}",
            "kvd_prefix_store_evictions_total 0",
            f"kvd_prefix_store_bytes {written.nbytes}",
            "kvd_prefix_store_on 1",
        ):
            assert line in text, line


@simulated
async def test_a_segment_that_was_deleted_while_it_was_read_is_no_damage(tmp_path):
    async with store(tmp_path) as it:
        await write(it, "a", info(1))
        await it.client().ask(CacheDrop)
        it.spawn.last("b").report(wire.SegmentDamaged(key=key(1), reason="No such file"))
        await asyncio.sleep(1)
        assert damage_of(it) == []


@simulated
async def test_a_lower_limit_deletes_segments_that_were_just_used_a_little_later(tmp_path):
    async with store(tmp_path) as it:
        for number in range(1, 6):
            await write(it, "a", info(number, nbytes=500 * KIB))
        it.system.limit_prefix_store(StoreLimits(limit_bytes=MB, keep_free_bytes=0))
        await asyncio.sleep(1)
        assert len(stored_files(it.disk.root)) == 5, "a worker may be reading them"
        await asyncio.sleep(120)
        assert len(stored_files(it.disk.root)) == 1


@simulated
async def test_a_worker_forgets_what_it_wrote_on_a_base_that_was_deleted(tmp_path):
    async with store(tmp_path) as it:
        await write(it, "a", info(1))
        assert await offer(it, "a", info(2, 512, base=1))
        await it.client().ask(CacheDrop)
        written = write_file(it.disk.root, info(2, 512, base=1))
        process = it.spawn.last("a")
        process.report(wire.SegmentWritten(segment=written, seconds=0.1))
        await asyncio.sleep(1)
        assert stored_files(it.disk.root) == {}
        assert key(2) in answers(process, wire.SegmentsChanged)[-1].removed


@simulated
async def test_many_segments_are_listed_and_dropped_in_parts(tmp_path):
    count = 3 * MAX_LISTED // 2
    async with store(tmp_path, opened=False) as it:
        index = it.system.prefix_store.machine.index
        index.add_all(
            Segment(
                key=key(number),
                space=SPACE,
                base=None,
                tokens=256,
                nbytes=1000,
                created=0.0,
                used=0.0,
            )
            for number in range(count)
        )
        process = it.spawn.last("a")
        process.report(wire.SegmentsOpened(space=SPACE))
        await until(lambda: len(known(process)) == count)
        parts = answers(process, wire.SegmentsChanged)
        assert max(len(part.added) for part in parts) <= MAX_LISTED
        dropped = await it.client().ask(CacheDrop)
        assert (dropped.segments, dropped.freed_bytes) == (count, 1000 * count)
        assert known(process) == set()
        deleted = [len(one.keys) for one in it.disk.commands if isinstance(one, DeleteSegments)]
        assert max(deleted) <= MAX_DELETED
        assert sum(deleted) == count


@simulated
async def test_two_workers_of_one_space_do_not_write_the_same_segment(tmp_path):
    async with store(tmp_path) as it:
        assert await offer(it, "a", info(1))
        assert not await offer(it, "b", info(1))
        written = write_file(it.disk.root, info(1))
        it.spawn.last("b").report(wire.SegmentWritten(segment=written, seconds=0.1))
        await asyncio.sleep(0.1)
        assert not it.system.prefix_store.machine.index.segments, "b has no permission"
        it.spawn.last("a").report(wire.SegmentWritten(segment=written, seconds=0.1))
        await until(lambda: known(it.spawn.last("b")) == {key(1)})
        assert not await offer(it, "b", info(1))


@simulated
async def test_a_drop_also_deletes_what_is_being_written(tmp_path):
    async with store(tmp_path) as it:
        assert await offer(it, "a", info(1))
        await it.client().ask(CacheDrop, model="b")
        written = write_file(it.disk.root, info(1))
        it.spawn.last("a").report(wire.SegmentWritten(segment=written, seconds=0.1))
        await asyncio.sleep(0.1)
        assert not it.system.prefix_store.machine.index.segments
        assert not stored_files(it.disk.root)


@simulated
async def test_only_what_was_written_before_it_was_abandoned_counts(tmp_path):
    async with store(tmp_path) as it:
        for number, nbytes in enumerate((0, 5000)):
            assert await offer(it, "a", info(number))
            it.spawn.last("a").report(
                wire.SegmentAbandoned(key=key(number), reason="test", nbytes=nbytes)
            )
            await asyncio.sleep(0.1)
        assert it.system.prefix_store.status().written_today_bytes == 5000
