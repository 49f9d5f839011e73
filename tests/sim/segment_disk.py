"""The real disk commands of the prefix store, in simulated time and with faults."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

from actors.machines import prefix_store_events as ev
from kvd.daemon.prefix_store.disk import StoreDisk
from kvd.daemon.prefix_store.folder import SegmentFolder
from protocol import segment_file
from protocol.record_format import PLAIN, RecordFormat
from protocol.segments import SegmentInfo

SPACE = bytes(16)
KIB = 1024


class SimDisk:
    """Runs commands on real files, one after the other, each after ``delay_s``."""

    def __init__(self, root: Path, delay_s: float = 0.01) -> None:
        self.disk = StoreDisk(SegmentFolder(root))
        self.root = root
        self.delay_s = delay_s
        self.hangs = False
        self.broken: OSError | None = None
        self.commands: list[ev.DiskCommand] = []
        self._queue: list[tuple[ev.DiskCommand, Callable[[ev.DiskEvent], None]]] = []

    def submit(self, command: ev.DiskCommand, done: Callable[[ev.DiskEvent], None]) -> None:
        self.commands.append(command)
        self._queue.append((command, done))
        asyncio.get_running_loop().call_later(self.delay_s, self._work)

    def proceed(self) -> None:
        """End a hang."""
        self.hangs = False
        while self._queue:
            self._work()

    def _work(self) -> None:
        if self.hangs or not self._queue:
            return
        command, done = self._queue.pop(0)
        try:
            if self.broken is not None:
                raise self.broken
            answer = self.disk.run(command)
        except (OSError, sqlite3.Error) as error:
            answer = ev.DiskFailed(str(error))
        if answer is not None:
            done(answer)


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def info(
    number: int, tokens: int = 256, *, base: int | None = None, nbytes: int = 100 * KIB
) -> SegmentInfo:
    return SegmentInfo(
        key=key(number),
        base=None if base is None else key(base),
        tokens=tokens,
        nbytes=nbytes,
    )


def write_file(
    root: Path, segment: SegmentInfo, space: bytes = SPACE, form: RecordFormat = PLAIN
) -> SegmentInfo:
    """Write a segment's file as a worker does; return it with the size of the file."""
    header = segment_file.SegmentHeader(
        version=segment_file.VERSION,
        space=space,
        key=segment.key,
        base=segment.base,
        tokens=segment.tokens,
    )
    file = segment_file.create(root, header, form)
    file.add(bytes(segment.nbytes))
    return SegmentInfo(
        key=segment.key, base=segment.base, tokens=segment.tokens, nbytes=file.finish()
    )


def stored_files(root: Path) -> dict[bytes, int]:
    return {bytes.fromhex(it.stem): it.stat().st_size for it in root.glob("??/*.kvs")}
