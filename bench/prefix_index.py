"""What the prefix store costs the daemon's event loop with many segments.

Fills a folder and its index, opens it through the store's thread, and feeds the state machine. It
prints the most CPU time of each kind of event, in which the event loop does nothing else. For the
start it prints how late a timer of 1 ms was, which depends on the machine's other work too.

    python -m bench.prefix_index --segments 100000 --json bench/results/…
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from actors.machines import prefix_store_events as ev
from actors.machines.prefix_store import PrefixStore
from actors.machines.segment_index import Segment, SegmentIndex
from kvd.cli.cache import page
from kvd.daemon.prefix_store.index_file import IndexFile
from kvd.daemon.prefix_store.thread import DiskThread
from protocol import worker as wire
from protocol.prefix_messages import CacheReply
from protocol.segments import PrefixSpace, PrefixStoreStatus, SegmentInfo, segment_path

NOW = 2e9
SPACES = 5
SEGMENT_BYTES = 200_000
CHAIN = 8
"""Segments of one conversation."""


def key(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def fill(root: Path, count: int) -> int:
    """Write an index and sparse files; return the bytes of all."""
    for first in range(256):
        (root / f"{first:02x}").mkdir(parents=True)
    index, rng, above = IndexFile(root / "index.sqlite"), random.Random(1), 0
    index.set_key_id(b"")  # not encrypted
    with index.transaction():
        for number in range(count):
            above = above + 1024 if number % CHAIN else 1024
            segment = Segment(
                key=key(number),
                space=bytes([number // CHAIN % SPACES]) * 16,
                base=key(number - 1) if number % CHAIN else None,
                tokens=above,
                nbytes=SEGMENT_BYTES,
                created=NOW - 1e6,
                used=NOW - rng.uniform(100, 1e6),
            )
            index.add(segment)
            with segment_path(root, segment.key).open("wb") as file:
                file.truncate(SEGMENT_BYTES)
    index.close()
    return count * SEGMENT_BYTES


class Load:
    """The state machine, and the CPU time of its events."""

    def __init__(self, thread: DiskThread, limit_bytes: int) -> None:
        self.machine = PrefixStore()
        self.thread = thread
        self.limit_bytes = limit_bytes
        self.longest_ms: dict[str, float] = {}

    def feed(self, name: str, event: ev.Event) -> list[ev.Command]:
        start = time.thread_time()
        commands = self.machine.handle(event, NOW)
        taken = 1000 * (time.thread_time() - start)
        self.longest_ms[name] = round(max(taken, self.longest_ms.get(name, 0.0)), 2)
        return commands

    async def disk(self, command: ev.DiskCommand) -> ev.DiskEvent:
        answer: asyncio.Future[ev.DiskEvent] = asyncio.get_running_loop().create_future()
        self.thread.submit(command, answer.set_result)
        return await answer

    async def start(self) -> dict[str, float]:
        """Open the store; return the seconds, and how late a timer was meanwhile."""
        late, over = [], asyncio.Event()

        async def tick() -> None:
            while not over.is_set():
                start = time.perf_counter()
                await asyncio.sleep(0.001)
                late.append(1000 * (time.perf_counter() - start) - 1)

        ticking, begun = asyncio.create_task(tick()), time.perf_counter()
        (command,) = self.feed(
            "start", ev.LimitsChanged(ev.StoreLimits(self.limit_bytes, 2**60, 0))
        )
        assert isinstance(command, ev.OpenStore)
        opened = await self.disk(command)
        seconds = time.perf_counter() - begun
        over.set()
        await ticking
        self.feed("opened", opened)
        late.sort()
        return {
            "seconds": round(seconds, 2),
            "late_ms_median": round(statistics.median(late), 2),
            "late_ms_p99": round(late[int(0.99 * len(late))], 2),
            "late_ms_most": round(late[-1], 2),
        }

    def list_space(self) -> None:
        space = bytes(16)
        commands = self.feed("list", ev.Reported("m", 1, wire.SegmentsOpened(space=space)))
        while any(isinstance(it, ev.Continue) for it in commands):
            commands = self.feed("list", ev.Continued(1))

    def offers(self, count: int) -> None:
        first = len(self.machine.index)
        for number in range(first, first + count):
            segment = SegmentInfo(key=key(number), tokens=1024, nbytes=SEGMENT_BYTES)
            commands = self.feed("offer to a full store", _offer(segment))
            (room,) = [it for it in commands if isinstance(it, ev.MakeRoom)]
            self.feed("room made", ev.RoomMade(room.key, room.evicted, 2**60))
            self.feed(
                "written", ev.Reported("m", 1, wire.SegmentWritten(segment=segment, seconds=0))
            )

    def shrink(self) -> None:
        limit = self.machine.index.nbytes // 2
        limits = ev.StoreLimits(limit, 2**60, 0)
        commands = self.feed("lower the limit", ev.LimitsChanged(limits))
        while (deleted := _deleted(commands)) is not None:
            commands = self.feed("lower the limit", deleted)

    def drop(self) -> None:
        commands = self.feed("drop all", ev.DropRequested(1))
        while (deleted := _deleted(commands)) is not None:
            commands = self.feed("drop all", deleted)
        assert not self.machine.index.segments


def _offer(segment: SegmentInfo) -> ev.Reported:
    return ev.Reported("m", 1, wire.SegmentOffered(segment=segment, hits=1))


def _deleted(commands: list[ev.Command]) -> ev.SegmentsDeleted | None:
    found = [it for it in commands if isinstance(it, ev.DeleteSegments)]
    return ev.SegmentsDeleted(found[0].keys, found[0].ticket) if found else None


def _page(index: SegmentIndex) -> float:
    """Return the milliseconds of `kvctl cache`'s page."""
    start = time.perf_counter()
    spaces = [
        PrefixSpace(models=["m"], segments=len(it.segments), tokens=it.tokens, nbytes=it.nbytes)
        for it in index.spaces.values()
    ]
    store = PrefixStoreStatus(
        state="on",
        limit_bytes=1,
        daily_bytes=1,
        keep_free_bytes=0,
        segments=len(index),
        stored_bytes=index.nbytes,
        written_today_bytes=0,
        written_bytes=0,
    )
    page(CacheReply(id="", store=store, spaces=spaces), NOW)
    return round(1000 * (time.perf_counter() - start), 2)


async def measure(count: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "prefixes"
        load = Load(DiskThread(root), fill(root, count))
        start = await load.start()
        load.list_space()
        listed = _page(load.machine.index)
        load.offers(50)
        load.shrink()
        load.drop()
        load.thread.close()
    return {
        "segments": count,
        "start": start,
        "kvctl_cache_ms": listed,
        "longest_ms": load.longest_ms,
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prefix_index")
    parser.add_argument("--segments", type=int, default=100_000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    text = json.dumps(asyncio.run(measure(given.segments)), indent=1)
    print(text)
    if given.json is not None:
        given.json.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
