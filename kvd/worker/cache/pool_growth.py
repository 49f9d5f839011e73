"""Growing pools ahead of need, a piece at a time, so that no flush has to copy all of them at once.

A pool grows by a copy. Done at the flush that lacks room it would take every layer of a level in
one step: 4.2 median steps, measured on 8 rows of 8192 tokens. Here the keys or the values of one
layer are copied between two steps, from when the next flush may lack room until it comes.
"""

from __future__ import annotations

from collections.abc import Callable

from kvd.worker.cache.pages import PageAllocator
from kvd.worker.cache.store import KVStore


def make_room(store: KVStore, seconds: float, clock: Callable[[], float]) -> None:
    """Grow pools whose room the rows' next flush may exceed, for about ``seconds``.

    At least one piece is done, if there is one. The device must be idle, and no step-down under
    way: it sizes the pools itself. What pools are growing to is charged at once.
    """
    end = clock() + seconds
    for allocator in store.allocators:
        while _lacks_room(store, allocator):
            _piece(store, allocator)
            if clock() >= end:
                return


def lacks_room(store: KVStore) -> bool:
    """Return whether `make_room` would do something."""
    return any(_lacks_room(store, allocator) for allocator in store.allocators)


def _lacks_room(store: KVStore, allocator: PageAllocator) -> bool:
    coming = sum(row.level == allocator.level and not row.early for row in store.rows)
    if allocator.free >= coming:
        return False
    return allocator.level in store.goals or store.ahead(allocator) > allocator.capacity


def _piece(store: KVStore, allocator: PageAllocator) -> None:
    level = allocator.level
    goal = store.goals.setdefault(level, store.ahead(allocator))
    for layer in store.layers:
        pool = layer.pools[level]
        for side, capacity in enumerate(pool.capacities):
            if capacity < goal:
                pool.resize(side, goal)
                return
    allocator.grow(goal)
    del store.goals[level]
