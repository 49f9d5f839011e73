"""Engines with a prefix store, and a stand-in for the daemon's part of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from protocol.kv import KVSpec
from protocol.segments import SegmentInfo, segment_path
from protocol.worker import (
    SegmentAbandoned,
    SegmentAllowed,
    SegmentDamaged,
    SegmentOffered,
    SegmentsChanged,
    SegmentsOpened,
    SegmentUsed,
    SegmentWritten,
)
from tests.worker import shallow
from tests.worker.core.driver import Driver, Outcome

KV = KVSpec(prefix_cache=1 << 30)


class Clock:
    """Time that stands still until a test changes `now`."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Store:
    """The daemon's part: allows all segments, and remembers those that were written."""

    def __init__(self, folder: Path, key_file: Path | None = None) -> None:
        self.folder = folder
        self.key_file = key_file
        self.segments: dict[bytes, SegmentInfo] = {}
        self.offered: list[SegmentOffered] = []
        self.allows = True
        self.on = True
        self.damaged: list[SegmentDamaged] = []
        self.abandoned: list[SegmentAbandoned] = []
        self.used: list[SegmentUsed] = []
        self.written: list[SegmentWritten] = []

    def serve(self, engine: Driver) -> None:
        reports, engine.segments = engine.segments, []
        for report in reports:
            match report:
                case SegmentsOpened() if not self.on:
                    pass
                case SegmentsOpened():
                    command = SegmentsChanged(added=list(self.segments.values()))
                    engine.engine.segment_command(command)
                case SegmentOffered(segment=segment):
                    self.offered.append(report)
                    command = SegmentAllowed(key=segment.key, allowed=self.allows)
                    engine.engine.segment_command(command)
                case SegmentWritten(segment=segment):
                    path = segment_path(self.folder, segment.key)
                    assert path.stat().st_size == segment.nbytes
                    self.segments[segment.key] = segment
                    self.written.append(report)
                case SegmentDamaged():
                    self.damaged.append(report)
                case SegmentAbandoned():
                    self.abandoned.append(report)
                case SegmentUsed():
                    self.used.append(report)


class Engine(Driver):
    """A driver whose engine uses a store.

    With a `Clock`, prefill has the rate that applies before measurements. Otherwise a short prompt
    is worth no segment on a fast machine.
    """

    def __init__(
        self,
        store: Store,
        kv: KVSpec = KV,
        clock: Callable[[], float] = time.monotonic,
        source: str | None = None,
        **more,
    ) -> None:
        self.store = store
        key_file = None if store.key_file is None else str(store.key_file)
        super().__init__(
            source or shallow.path(),
            kv=kv,
            clock=clock,
            segments_folder=str(store.folder),
            key_file=key_file,
            **more,
        )
        if isinstance(clock, Clock):
            rates = self.engine._rates
            note = rates.note
            rates.note = lambda work, *of: None if work == "prefill" else note(work, *of)
        self.step()

    def step(self) -> None:
        super().step()
        self.store.serve(self)

    def write_all(self) -> None:
        """Let the engine write what is worth it, as a drain does."""
        self.engine.drain(60)
        while self.engine.keeps_worker:
            if self.engine.has_work:
                self.step()
            else:
                assert self.engine.next_deadline is not None
                self.wait_for_disk()
        self.engine._segments._drain_until = None  # so that the engine goes on

    def forget(self) -> None:
        """Drop what is in memory, measured rates too, and take over the store's index."""
        self.engine._prefix_cache.tree.clear()
        self.engine._rates._measured.clear()
        command = SegmentsChanged(added=list(self.store.segments.values()))
        self.engine.segment_command(command)

    def delete_all(self) -> None:
        """Forget everything and delete all files, so that the next test finds an empty store."""
        store = self.store
        removed = list(store.segments)
        for key in removed:
            segment_path(store.folder, key).unlink(missing_ok=True)
        store.segments.clear()
        self.engine.segment_command(SegmentsChanged(removed=removed))
        for reports in (store.offered, store.damaged, store.abandoned, store.used, store.written):
            reports.clear()
        store.allows = True
        self.outcomes.clear()
        self.forget()

    def wait_for_disk(self) -> None:
        """Wait a moment for the thread that writes."""
        time.sleep(0.001)


def alone(driver: Driver, prompt: list[int], **more) -> Outcome:
    """Return the outcome without any checkpoint."""
    driver.engine._prefix_cache.tree.clear()
    return driver.alone(prompt, max_tokens=12, logprobs=2, **more)
