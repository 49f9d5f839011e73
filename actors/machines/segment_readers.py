"""Which workers know of which segments: all those of their space. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from actors.machines.prefix_store_events import SendToWorker
from actors.machines.segment_index import Segment
from protocol.worker import SegmentsChanged

MAX_LISTED = 4096
"""Segments in one list for a worker, so that no frame is large."""


class Reader(msgspec.Struct, frozen=True):
    """A worker's process that can use segments."""

    model: str
    space: bytes


class SegmentReaders:
    """The processes by number, and the names of all models that ever used a space."""

    def __init__(self) -> None:
        self.workers: dict[int, Reader] = {}
        self.models: dict[bytes, set[str]] = {}
        """Names by space, also of models that are not loaded."""

    def open(self, life: int, model: str, space: bytes) -> bool:
        """Add a process; return whether its model is new in the space."""
        self.workers[life] = Reader(model, space)
        names = self.models.setdefault(space, set())
        new = model not in names
        names.add(model)
        return new

    def add_models(self, models: dict[bytes, list[str]]) -> list[tuple[bytes, str]]:
        """Add names from the disk; return those that are not on it yet, with their spaces."""
        new = [
            (space, name)
            for space, names in self.models.items()
            for name in names.difference(models.get(space, ()))
        ]
        for space, found in models.items():
            self.models.setdefault(space, set()).update(found)
        return new

    def knows(self, model: str) -> bool:
        return any(model in names for names in self.models.values())

    def list_all(self, life: int, segments: Iterable[Segment]) -> Iterator[SendToWorker]:
        """Send the segments of its space to a process: one command at least."""
        space = self.workers[life].space
        added = [it.info for it in segments if it.space == space]
        for start in range(0, len(added) or 1, MAX_LISTED):
            part = added[start : start + MAX_LISTED]
            yield SendToWorker(life, SegmentsChanged(added=part))

    def send_changes(
        self,
        added: Iterable[Segment],
        removed: Iterable[Segment] = (),
        except_life: int | None = None,
    ) -> Iterator[SendToWorker]:
        added, removed = list(added), list(removed)
        for life, worker in self.workers.items():
            new = [it.info for it in added if it.space == worker.space]
            gone = [it.key for it in removed if it.space == worker.space]
            if (new or gone) and life != except_life:
                yield SendToWorker(life, SegmentsChanged(added=new, removed=gone))
