"""A bounded queue between the engine and threads that do I/O."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

from kvd.worker.prefix.record_memory import RecordMemory

T = TypeVar("T")


@dataclass(eq=False)
class Place(Generic[T]):
    """A place in the queue. ``item`` None: it is not there yet, or the queue's items end."""

    nbytes: int
    item: T | None = None
    is_filled: bool = False
    memory: memoryview | None = None
    """``nbytes`` bytes of the queue's memory for the item; None: they are not from there."""


class Staging(Generic[T]):
    """A queue of items of at most ``limit_bytes`` together.

    A place can be reserved before its item exists. The items behind it wait for that one.

    An item counts until ``in_use`` others are taken or `release` is called, because its taker still
    uses it. An item above the limit is accepted only while nothing else counts, and an item without
    bytes always. The engine calls `offer`, `poll`, `release` and `close`, which return at once, and
    `wait_for_item`, which has a time limit. Threads call `reserve` and `take`, which wait. No
    method holds the lock while it waits, and none does I/O.

    ``memory``: gives each reserved place its bytes, which are valid as long as the item counts. An
    item that is larger than all of it has none.
    """

    def __init__(
        self, limit_bytes: int, memory: RecordMemory | None = None, in_use: int = 1
    ) -> None:
        self._limit_bytes = limit_bytes
        self._memory = memory
        self._places: deque[Place[T]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._in_use = in_use
        self._taken: deque[Place[T]] = deque()
        """The items that were taken and still count, the oldest first."""
        self.held_bytes = 0
        """Bytes of all items that count."""

    def offer(self, item: T, nbytes: int) -> bool:
        """Add an item if it fits; return whether it did. A closed queue drops it."""
        with self._changed:
            if self._closed:
                return True
            if not self._fits(nbytes):
                return False
            self._add(Place(nbytes, item, is_filled=True))
            return True

    def reserve(self, nbytes: int) -> Place[T] | None:
        """Wait for room and return a place without an item; None: the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room(nbytes))
            if self._closed:
                return None
            memory = self._memory_for(nbytes)
            return self._add(Place(nbytes, memory=None if memory is None else memory.take(nbytes)))

    def fill(self, place: Place[T], item: T) -> None:
        """Put the item of a reserved place there."""
        with self._changed:
            place.item, place.is_filled = item, True
            self._changed.notify_all()

    def wait_for_item(self, seconds: float) -> None:
        """Wait until `poll` would return an item, the queue is closed, or the time is over.

        Items that were taken no longer count, as after `release`.
        """
        with self._changed:
            self._release(0)
            self._changed.wait_for(lambda: self._closed or self._has_item, seconds)

    def poll(self) -> T | None:
        """Take the next item; None: there is none now."""
        with self._changed:
            return self._take()

    def take(self) -> T | None:
        """Wait for the next item and take it; None: the queue is closed."""
        with self._changed:
            self._release(0)
            self._changed.wait_for(lambda: self._closed or self._has_item)
            return self._take()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Drop all items, and end all waiting."""
        with self._changed:
            self._closed = True
            self._places.clear()
            self._taken.clear()
            self.held_bytes = 0
            self._changed.notify_all()

    def release(self) -> bool:
        """Stop counting the items that were taken; return whether `poll` would return one."""
        with self._changed:
            self._release(0)
            return self._has_item

    def fits(self, nbytes: int) -> bool:
        """Return whether `offer` would accept an item of this size."""
        with self._changed:
            return self._closed or self._fits(nbytes)

    @property
    def _has_item(self) -> bool:
        return bool(self._places) and self._places[0].is_filled

    def _add(self, place: Place[T]) -> Place[T]:
        self._places.append(place)
        self.held_bytes += place.nbytes
        self._changed.notify_all()
        return place

    def _fits(self, nbytes: int) -> bool:
        return not (nbytes and self.held_bytes) or self.held_bytes + nbytes <= self._limit_bytes

    def _has_room(self, nbytes: int) -> bool:
        memory = self._memory_for(nbytes)
        return self._fits(nbytes) and (memory is None or memory.has_room(nbytes))

    def _memory_for(self, nbytes: int) -> RecordMemory | None:
        """Return the memory of an item of this size; None: it has none."""
        return self._memory if self._memory and 0 < nbytes <= self._memory.nbytes else None

    def _release(self, kept: int) -> None:
        """Stop counting taken items, except the ``kept`` newest ones."""
        while len(self._taken) > kept:
            taken = self._taken.popleft()
            self.held_bytes -= taken.nbytes
            if self._memory is not None and taken.memory is not None:
                self._memory.free_oldest()
            self._changed.notify_all()

    def _take(self) -> T | None:
        self._release(self._in_use - 1)
        if not self._has_item:
            return None
        place = self._places.popleft()
        self._taken.append(place)
        return place.item
