"""Counters of a model's whole cache, for statistics."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.worker.cache.recurrent_states import StateStore
from kvd.worker.cache.store import KVStore


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
    def pages_total(self) -> int:
        return sum(one.capacity for store in self._stores for one in store.pages.allocators)

    @property
    def flushes(self) -> int:
        return max((store.flushes for store in self._stores), default=0)
