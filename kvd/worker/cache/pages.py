"""Page allocation and reference counts: integers only.

A page has the same slot in every layer: slot 17 of level 1 is place 17 in each layer's pool of
level 1. Rows that share a prefix reference the same page; it is free when nothing references it.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple


class PageId(NamedTuple):
    """A page's place: its precision level, and its slot in that level's pools."""

    level: int
    slot: int


class PageAllocator:
    """Free list and reference counts of one level.

    The lowest slots are given out first, so that the end of a pool becomes free and can be cut off.
    References are from running rows or from snapshots. A page that only snapshots reference is
    *idle*.
    """

    def __init__(self, level: int, capacity: int = 0) -> None:
        self.level = level
        self.capacity = capacity
        self._free = list(range(capacity))
        self.references: dict[int, int] = {}
        """By slot, without free pages; only this class changes them."""
        self.snapshot_references: dict[int, int] = {}
        """Those of `references` that are from snapshots, without zeros."""
        self.idle = 0

    @property
    def used(self) -> int:
        return len(self.references)

    @property
    def free(self) -> int:
        return len(self._free)

    def grow(self, capacity: int) -> None:
        if capacity < self.capacity:
            raise ValueError(f"cannot grow from {self.capacity} to {capacity} pages")
        for slot in range(self.capacity, capacity):
            heapq.heappush(self._free, slot)
        self.capacity = capacity

    def packing(self) -> dict[int, int]:
        """Return the moves, old slot to new, after which the pages in use come first."""
        used = len(self.references)
        high = sorted(slot for slot in self.references if slot >= used)
        low = sorted(slot for slot in self._free if slot < used)
        return dict(zip(high, low, strict=True))

    def moved(self, moves: dict[int, int]) -> None:
        for old, new in moves.items():
            self.references[new] = self.references.pop(old)
            if old in self.snapshot_references:
                self.snapshot_references[new] = self.snapshot_references.pop(old)
        self._free = [slot for slot in range(self.capacity) if slot not in self.references]

    def cut(self, capacity: int) -> None:
        """Remove the slots from ``capacity`` on. Raises ``ValueError`` if one is in use."""
        if any(slot >= capacity for slot in self.references):
            raise ValueError(f"a page in use lies at or beyond slot {capacity}")
        self._free = [slot for slot in self._free if slot < capacity]
        heapq.heapify(self._free)
        self.capacity = capacity

    def can_take(self, count: int) -> bool:
        return count <= len(self._free)

    def take(self, count: int) -> list[PageId]:
        """Take ``count`` free pages, each with one reference."""
        if not self.can_take(count):
            raise ValueError(f"cannot take {count} pages: {self.free} of {self.capacity} are free")
        slots = [heapq.heappop(self._free) for _ in range(count)]
        for slot in slots:
            self.references[slot] = 1
        return [PageId(self.level, slot) for slot in slots]

    def retain(self, page: PageId, *, snapshot: bool = False) -> None:
        self._count(page.slot, 1, snapshot=snapshot)

    def release(self, page: PageId, *, snapshot: bool = False) -> None:
        """Remove a reference of the kind that was added. The last one frees the page."""
        self._count(page.slot, -1, snapshot=snapshot)
        if not self.references[page.slot]:
            del self.references[page.slot]
            heapq.heappush(self._free, page.slot)

    def release_running(self) -> None:
        """Remove all references except those of snapshots.

        This includes references to pages that a failed step had not yet given to a row.
        """
        for slot in list(self.references):
            for _ in range(self.references[slot] - self.snapshot_references.get(slot, 0)):
                self.release(PageId(self.level, slot))

    def _count(self, slot: int, change: int, *, snapshot: bool) -> None:
        before, snapshots_before = self.references[slot], self.snapshot_references.get(slot, 0)
        after, snapshots_after = before + change, snapshots_before + change * snapshot
        self.references[slot] = after
        if snapshot:
            self.snapshot_references[slot] = snapshots_after
        if not snapshots_after:
            self.snapshot_references.pop(slot, None)
        self.idle += (after == snapshots_after > 0) - (before == snapshots_before > 0)
