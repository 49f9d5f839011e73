"""Counters of a model's whole cache, for statistics and for the growth of its pools."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.worker.cache.page_store import growth_pages
from kvd.worker.cache.pages import PageAllocator
from kvd.worker.cache.recurrent_states import StateStore
from kvd.worker.cache.store import KVStore
from protocol.pages import SLAB_PAGES


class CacheUsage:
    """What a model's stores and states hold now."""

    def __init__(self, stores: Sequence[KVStore], states: StateStore, levels: int) -> None:
        self._stores = stores
        self._states = states
        self._levels = levels

    @property
    def pages_bytes(self) -> int:
        return sum(store.pages.nbytes for store in self._stores)

    @property
    def used_bytes(self) -> int:
        return sum(store.pages.used_bytes for store in self._stores)

    @property
    def level_bytes(self) -> tuple[int, ...]:
        """`used_bytes` by precision level. Dense pages count as level 0."""
        found = [0] * self._levels
        for store in self._stores:
            dense_levels = len(store.schemes) - self._levels
            for allocator in store.pages.allocators:
                level = max(0, allocator.level - dense_levels)
                found[level] += allocator.used * store.pages.page_bytes(allocator.level)
        return tuple(found)

    @property
    def tails_bytes(self) -> int:
        return sum(store.tails.nbytes for store in self._stores) + self._states.nbytes

    @property
    def pages_idle(self) -> int:
        return sum(one.idle for store in self._stores for one in store.pages.allocators)

    @property
    def pages_used(self) -> int:
        return sum(one.used for store in self._stores for one in store.pages.allocators)

    @property
    def unbounded_pages_used(self) -> int:
        """Most pages of level 0 that one kind without a window or chunk uses."""
        return max((one.used for one in self._unbounded()), default=0)

    @property
    def pool_growth_pages(self) -> int:
        """Pages by which the largest nearly full pool grows next; 0 if that is at most a slab.

        With less memory it would grow by a few pages, and copy all pages each time.
        """
        full = [one for one in self._unbounded() if one.free < max(SLAB_PAGES, one.capacity // 16)]
        growth = max((growth_pages(one.capacity) for one in full), default=0)
        return growth if growth > SLAB_PAGES else 0

    def _unbounded(self) -> list[PageAllocator]:
        """Return the allocators of level 0 of kinds without a window or chunk."""
        return [one.pages.allocators[0] for one in self._stores if not one.kind.bounded]

    @property
    def pages_total(self) -> int:
        return sum(one.capacity for store in self._stores for one in store.pages.allocators)

    @property
    def flushes(self) -> int:
        return max((store.flushes for store in self._stores), default=0)
