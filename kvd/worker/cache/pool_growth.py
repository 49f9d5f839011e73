"""Growth of pools ahead of need, one piece at a time, so that no flush copies all of them at once.

A pool grows by a copy. A flush that lacked room would copy every layer of a level in one step,
which takes as long as 4.2 median steps (measured on 8 rows of 8192 tokens). Instead, the keys or
values of one layer are copied between two steps, as soon as the next flush may lack room.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import mlx.core as mx

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
        while lacks_room_for(store, allocator):
            goal = pages.goals.setdefault(allocator.level, pages.capacity_ahead(allocator))
            if pages.grow_piece(allocator.level, goal):
                del pages.goals[allocator.level]
            if clock() >= end:
                return


_MEASURED = 2
"""Copies that are waited for, to measure how long they take."""


class GrowthBehindSteps:
    """Grows pools by copies that the device makes behind the steps in flight.

    Such a copy delays steps by the time that it takes, and drains no pipeline. The first two copies
    are waited for: they show how long others take, and the first one may compile. ``scratch``:
    bytes that replaced arrays may take until the copies are made. A larger array is replaced alone.
    """

    def __init__(self, scratch: int) -> None:
        self._scratch = scratch
        self._measured: list[float] = []
        """Seconds per byte of the copies that were waited for."""
        self._replaced_bytes = 0
        """Bytes of the copies that may not be made yet; the arrays they replace are smaller."""
        self._last: list[mx.array] = []

    @property
    def needs_idle_device(self) -> bool:
        """Whether the next copy is waited for."""
        return len(self._measured) < _MEASURED

    def make_room_for(self, store: KVStore, level: int, count: int) -> Iterator[float]:
        """Grow the pools of a level for ``count`` pages and the next flush; yield after each piece.

        The room for the flush depends on the memory that is spare when the growth begins.
        Yields the seconds that the device needs for the piece, or infinity: a step must be launched
        before the next piece, if rows decode. The device must be idle before a piece whenever
        `needs_idle_device` is true. Raises MLX's errors if memory is short.
        """
        pages = store.pages
        allocator = pages.allocators[level]
        grown = False
        while not (grown and allocator.can_take(count)):
            needed = allocator.used + count
            goal = pages.goals.get(level, 0)
            if goal < needed or goal <= allocator.capacity:
                goal = pages.goals[level] = max(pages.capacity_ahead(allocator, count), needed)
            seconds = self._grow_piece(store, level, goal)
            if grown := seconds is None:
                del pages.goals[level]
            yield seconds or 0.0
            if self._replaced_bytes > self._scratch:
                yield math.inf
                self._settle()

    def _grow_piece(self, store: KVStore, level: int, goal: int) -> float | None:
        """Grow keys or values of one layer; return the device's seconds, or None at the end."""
        if (piece := store.pages.next_piece(level, goal)) is None:
            return None
        pool, side = piece
        if self.needs_idle_device:
            start = time.monotonic()
            pool.resize(side, goal)
            self._measured.append((time.monotonic() - start) / max(1, pool.side_bytes[side]))
            return 0.0
        self._last = pool.resize_behind_steps(side, goal)
        nbytes = pool.side_bytes[side]
        self._replaced_bytes += nbytes
        return nbytes * min(self._measured)

    def _settle(self) -> None:
        """Wait until all copies are made. Steps that were launched later are not waited for."""
        mx.eval(self._last)
        self._last, self._replaced_bytes = [], 0


def lacks_room(store: KVStore) -> bool:
    """Return whether pools of any level must grow before the next flush."""
    return any(lacks_room_for(store, allocator) for allocator in store.pages.allocators)


def lacks_room_for(store: KVStore, allocator: PageAllocator, count: int = 0) -> bool:
    """Return whether the pools of a level must grow before ``count`` pages are taken.

    They must also have room for the next flush after that, as far as memory is spare. Otherwise
    they would grow right afterwards, while the device is idle.
    """
    pages = store.pages
    due = sum(row.level == allocator.level and not row.written_ahead for row in store.rows)
    if allocator.can_take(count + due):
        return False
    if not allocator.can_take(count) or allocator.level in pages.goals:
        return True
    return pages.capacity_ahead(allocator, count) > allocator.capacity
