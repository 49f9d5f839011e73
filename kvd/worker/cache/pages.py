"""Which pages are free and who holds the others: integers only.

A page's slot is shared by all layers: slot 17 of level 1 means that place in every layer's pool
of level 1. Rows that share a prefix hold the same page; it is free when nobody holds it.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple


class PageId(NamedTuple):
    """A page's place: its level on the ladder of schemes, and its slot in that level's pools."""

    level: int
    slot: int


class PageAllocator:
    """Free list and reference counts of one level.

    The lowest slots are given out first, so that a pool's end falls free and can be cut off.
    Holders are running rows or ``frozen`` ones; a page that only these hold is *idle*.
    """

    def __init__(self, level: int, capacity: int = 0) -> None:
        self.level = level
        self.capacity = capacity
        self._free = list(range(capacity))
        self._references: dict[int, int] = {}
        self._snapshot: dict[int, int] = {}
        """Of the references, those of frozen rows."""
        self._idle = 0

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return len(self._references)

    @property
    def idle(self) -> int:
        """Pages that only frozen rows hold."""
        return self._idle

    @property
    def free(self) -> int:
        """Pages that nobody holds."""
        return len(self._free)

    def grow(self, capacity: int) -> None:
        """Add the slots up to ``capacity``."""
        if capacity < self.capacity:
            raise ValueError(f"cannot grow from {self.capacity} to {capacity} pages")
        for slot in range(self.capacity, capacity):
            heapq.heappush(self._free, slot)
        self.capacity = capacity

    def packing(self) -> dict[int, int]:
        """Return which slots to move where, so that the pages in use come first: old to new."""
        used = len(self._references)
        high = sorted(slot for slot in self._references if slot >= used)
        low = sorted(slot for slot in self._free if slot < used)
        return dict(zip(high, low, strict=True))

    def moved(self, moves: dict[int, int]) -> None:
        """Note that pages were moved: their holders are those of the new slots."""
        for old, new in moves.items():
            self._references[new] = self._references.pop(old)
            if old in self._snapshot:
                self._snapshot[new] = self._snapshot.pop(old)
        self._free = [slot for slot in range(self.capacity) if slot not in self._references]

    def cut(self, capacity: int) -> None:
        """Drop the free slots from ``capacity`` on; none of them may be held."""
        if any(slot >= capacity for slot in self._references):
            raise ValueError("a page that is held would be cut off")
        self._free = [slot for slot in self._free if slot < capacity]
        heapq.heapify(self._free)
        self.capacity = capacity

    def can_take(self, count: int) -> bool:
        """Return whether ``count`` pages are free."""
        return count <= len(self._free)

    def take(self, count: int) -> list[PageId]:
        """Take ``count`` free pages, each with one holder."""
        if not self.can_take(count):
            raise ValueError(f"{count} pages wanted, {self.free} of {self.capacity} free")
        slots = [heapq.heappop(self._free) for _ in range(count)]
        for slot in slots:
            self._references[slot] = 1
        return [PageId(self.level, slot) for slot in slots]

    def retain(self, page: PageId, *, snapshot: bool = False) -> None:
        """Add a holder to a page that is in use."""
        self._count(page.slot, 1, snapshot=snapshot)

    def release(self, page: PageId, *, snapshot: bool = False) -> None:
        """Take a holder away, of the sort that it was added as; the last one frees the page."""
        self._count(page.slot, -1, snapshot=snapshot)
        if not self._references[page.slot]:
            del self._references[page.slot]
            heapq.heappush(self._free, page.slot)

    def release_running(self) -> None:
        """Take away every holder that is not frozen, also those that no row knows of.

        A flush that failed has taken pages that no row got.
        """
        for slot in list(self._references):
            for _ in range(self._references[slot] - self._snapshot.get(slot, 0)):
                self.release(PageId(self.level, slot))

    def _count(self, slot: int, change: int, *, snapshot: bool) -> None:
        before, cold = self._references[slot], self._snapshot.get(slot, 0)
        after, still = before + change, cold + change * snapshot
        self._references[slot] = after
        if snapshot:
            self._snapshot[slot] = still
        if not still:
            self._snapshot.pop(slot, None)
        self._idle += (after == still > 0) - (before == cold > 0)

    def references(self, page: PageId) -> int:
        """Return how many hold the page; 0 if it is free."""
        return self._references.get(page.slot, 0)

    def check(self) -> None:
        """Assert that every slot is either free or held, and none is both."""
        free = set(self._free)
        held = set(self._references)
        assert len(free) == len(self._free), "a slot stands in the free list twice"
        assert not free & held, f"free and held: {sorted(free & held)}"
        assert free | held == set(range(self.capacity)), "a slot is lost"
        assert all(count > 0 for count in self._references.values()), (
            "a page without holder is held"
        )
        assert all(0 < count <= self._references[slot] for slot, count in self._snapshot.items())
        idle = [slot for slot, count in self._snapshot.items() if count == self._references[slot]]
        assert self._idle == len(idle), "idle pages are miscounted"
