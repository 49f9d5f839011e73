"""Which workers know of which segments: all those of their space. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import msgspec

from actors.machines.prefix_store_events import Command, Continue, SendToWorker
from actors.machines.segment_index import Segment, SegmentIndex
from protocol.worker import SegmentsChanged

MAX_LISTED = 2048
"""Segments in one list for a worker: some milliseconds of work, and a frame of 150 KB."""


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
        self._unlisted: dict[int, list[bytes]] = {}
        """Keys of the segments that are still to be sent to a process."""

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

    def list_later(self, life: int, keys: Iterable[bytes]) -> Continue:
        """Let `list_next` send these segments, too."""
        self._unlisted.setdefault(life, []).extend(keys)
        return Continue(life)

    def list_next(self, life: int, segments: Mapping[bytes, Segment]) -> Iterator[Command]:
        """Send the next segments to a process: an empty list if there are none."""
        left = self._unlisted.get(life, [])
        part, left[:MAX_LISTED] = left[:MAX_LISTED], []
        if life in self.workers:
            added = [segments[key].info for key in part if key in segments]
            yield SendToWorker(life, SegmentsChanged(added=added))
        if left and life in self.workers:
            yield Continue(life)
        else:
            self._unlisted.pop(life, None)

    def close(self, life: int) -> None:
        self.workers.pop(life, None)
        self._unlisted.pop(life, None)

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

    def replace_index(
        self, before: SegmentIndex, after: SegmentIndex, *, opened: bool = False
    ) -> Iterator[Command]:
        """Send what differs between two indexes; with ``opened``, a list even if it is empty."""
        for life, worker in self.workers.items():
            old, new = (index.keys_in(worker.space) for index in (before, after))
            gone = list(old - new)
            for start in range(0, len(gone), MAX_LISTED):
                part = gone[start : start + MAX_LISTED]
                yield SendToWorker(life, SegmentsChanged(removed=part))
            if (added := new - old) or opened:
                yield self.list_later(life, added)
