"""Growth of pools ahead of need, one piece at a time, so that no flush copies all of them at once.

A pool grows by a copy. A flush that lacked room would copy every layer of a level in one step,
which takes as long as 4.2 median steps (measured on 8 rows of 8192 tokens). Instead, the keys or
values of one layer are copied between two steps, as soon as the next flush may lack room.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from kvd.worker.cache.pages import PageAllocator
from kvd.worker.cache.store import KVStore


def make_room(store: KVStore, seconds: float, clock: Callable[[], float]) -> None:
    """Grow pools in which the next flush may lack room, for about ``seconds``.

    Grows at least the keys or values of one layer, if any must grow. The device must be idle. No
    step-down may be under way, because step-downs resize pools themselves. The capacity that pools
    grow to is charged when their growth begins.
    """
    end = clock() + seconds
    pages = store.pages
    for allocator in pages.allocators:
        while _lacks_room(store, allocator):
            goal = pages.goals.setdefault(allocator.level, pages.capacity_ahead(allocator))
            if pages.grow_piece(allocator.level, goal):
                del pages.goals[allocator.level]
            if clock() >= end:
                return


def make_room_for(store: KVStore, level: int, count: int) -> Iterator[None]:
    """Grow the pools of a level until ``count`` pages can be taken; yield after each piece.

    The device must be idle. Raises MLX's errors if memory is short.
    """
    pages = store.pages
    allocator = pages.allocators[level]
    while not allocator.can_take(count):
        goal = pages.goals.get(level) or pages.capacity_ahead(allocator)
        goal = pages.goals[level] = max(goal, allocator.used + count)
        if pages.grow_piece(level, goal):
            del pages.goals[level]
        yield


def lacks_room(store: KVStore) -> bool:
    return any(_lacks_room(store, allocator) for allocator in store.pages.allocators)


def _lacks_room(store: KVStore, allocator: PageAllocator) -> bool:
    pages = store.pages
    due = sum(row.level == allocator.level and not row.written_ahead for row in store.rows)
    if allocator.free >= due:
        return False
    return allocator.level in pages.goals or pages.capacity_ahead(allocator) > allocator.capacity
