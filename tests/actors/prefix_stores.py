"""A prefix store between simulated workers and real files."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

from actors.machines.prefix_store_events import StoreLimits
from actors.system import Settings
from protocol import worker as wire
from tests.sim.loop import until
from tests.sim.segment_disk import SPACE, SimDisk, write_file
from tests.sim.world import world

MB = 10**6
LIMITS = StoreLimits(limit_bytes=4 * MB, daily_bytes=1000 * MB, keep_free_bytes=0)


@asynccontextmanager
async def store(tmp_path, *, load=("a", "b"), limits=LIMITS, opened=True, faults=False):
    """A world with a prefix store, whose models have the same weights."""
    disk = SimDisk(tmp_path / "prefixes")
    settings = Settings(segments_folder=str(disk.root), prefix_store=limits)
    async with world(load=load, settings=settings, segment_disk=disk, faults=faults) as it:
        it.disk = disk
        for name in load if opened else ():
            it.spawn.last(name).report(wire.SegmentsOpened(space=SPACE))
        await asyncio.sleep(0.5)
        yield it


def answers(process, kind):
    return [command for command in process.commands if isinstance(command, kind)]


async def offer(it, name, segment, hits=0):
    """Let a worker offer a segment; return whether it may write it."""
    process = it.spawn.last(name)
    before = len(answers(process, wire.SegmentAllowed))
    process.report(wire.SegmentOffered(segment=segment, hits=hits))
    await until(lambda: len(answers(process, wire.SegmentAllowed)) > before)
    return answers(process, wire.SegmentAllowed)[-1].allowed


async def write(it, name, segment, hits=0, space=SPACE):
    assert await offer(it, name, segment, hits)
    written = write_file(it.disk.root, segment, space)
    it.spawn.last(name).report(wire.SegmentWritten(segment=written, seconds=0.1))
    await asyncio.sleep(0.1)
    return written


def damage_of(it):
    return [one for one in it.system.events.records if one.kind == "segment_damaged"]


def known(process):
    """Return the keys of the segments that a worker knows of."""
    found = set()
    for change in answers(process, wire.SegmentsChanged):
        found |= {segment.key for segment in change.added}
        found -= set(change.removed)
    return found
