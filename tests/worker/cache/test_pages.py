"""Page allocator: free lists and reference counts."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.worker.cache.pages import PageAllocator, PageId
from tests.worker.cache.invariants import check_allocator


class Allocation(RuleBasedStateMachine):
    """Compares the allocator with a dictionary of references."""

    @initialize(capacity=st.integers(0, 8))
    def start(self, capacity: int) -> None:
        self.pages = PageAllocator(0, capacity)
        self.held: dict[PageId, int] = {}
        self.snapshot: dict[PageId, int] = {}

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        if not self.pages.can_take(count):
            with pytest.raises(ValueError, match="cannot take"):
                self.pages.take(count)
            return
        for page in self.pages.take(count):
            assert page not in self.held
            self.held[page] = 1

    @precondition(lambda self: self.held)
    @rule(data=st.data(), snapshot=st.booleans())
    def retain(self, data: st.DataObject, snapshot: bool) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        self.pages.retain(page, snapshot=snapshot)
        self.held[page] += 1
        self.snapshot[page] = self.snapshot.get(page, 0) + snapshot

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.held)))
        cold = self.snapshot.get(page, 0)
        snapshot = data.draw(st.booleans()) if 0 < cold < self.held[page] else cold > 0
        self.pages.release(page, snapshot=snapshot)
        self.held[page] -= 1
        self.snapshot[page] = cold - snapshot
        if not self.held[page]:
            del self.held[page]

    @rule()
    def pack(self) -> None:
        moves = self.pages.packing()
        self.pages.moved(moves)
        for counts in (self.held, self.snapshot):
            for old, new in moves.items():
                counts[PageId(0, new)] = counts.pop(PageId(0, old), 0)
        self.pages.cut(self.pages.used)
        assert self.pages.capacity == len(self.held)

    @rule(more=st.integers(0, 5))
    def grow(self, more: int) -> None:
        self.pages.grow(self.pages.capacity + more)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pages"):
            return
        check_allocator(self.pages)
        assert self.pages.used == len(self.held)
        assert self.pages.free == self.pages.capacity - len(self.held)
        idle = 0
        for page, count in self.held.items():
            assert self.pages.references.get(page.slot, 0) == count
            idle += self.snapshot.get(page, 0) == count
        assert self.pages.idle == idle


TestAllocation = Allocation.TestCase
TestAllocation.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_lowest_slots_first() -> None:
    pages = PageAllocator(0, 4)
    first = pages.take(3)
    pages.release(first[0])

    assert [page.slot for page in pages.take(2)] == [0, 3]


def test_pages_in_use_are_not_cut_off() -> None:
    pages = PageAllocator(0, 2)
    pages.take(2)

    with pytest.raises(ValueError, match="in use"):
        pages.cut(1)
