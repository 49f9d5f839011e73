"""Counters of a model's whole cache, for statistics."""

from __future__ import annotations

from collections.abc import Sequence

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
        """Pages of level 0 that a kind without a window or chunk uses."""
        kept = (store.pages for store in self._stores if not store.kind.bounded)
        return max((pages.allocators[0].used for pages in kept), default=0)

    @property
    def pages_ahead(self) -> int:
        """Pages by which pools should grow soon (`PageStore.capacity_ahead`), if that is many.

        With less room, large pools would copy all their pages again for the next few.
        """
        kept = [store.pages.allocators[0] for store in self._stores if not store.kind.bounded]
        full = [one for one in kept if one.free < max(SLAB_PAGES, one.capacity // 16)]
        most = max((one.capacity // 4 for one in full), default=0)
        return most if most > SLAB_PAGES else 0

    @property
    def pages_total(self) -> int:
        return sum(one.capacity for store in self._stores for one in store.pages.allocators)

    @property
    def flushes(self) -> int:
        return max((store.flushes for store in self._stores), default=0)
