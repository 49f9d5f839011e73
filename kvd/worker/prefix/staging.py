"""A bounded queue between the engine and a thread that does I/O."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Staging(Generic[T]):
    """A queue of items of at most ``limit_bytes`` together.

    An item counts until the next one is taken, because its taker still uses it. An item above the
    limit is accepted only while nothing else counts, and an item without bytes always. The engine
    calls the methods that return at once (`offer`, `poll`, `release`, `close`), the thread those
    that wait (`wait_for_room`, `take`). No method holds the lock while it waits, and none does I/O.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._items: deque[tuple[T, int]] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._taken_bytes = 0
        """Bytes of the item that was taken last."""
        self.held_bytes = 0
        """Bytes of all items that count."""

    def offer(self, item: T, nbytes: int) -> bool:
        """Add an item if it fits; return whether it did. A closed queue drops it."""
        with self._changed:
            if self._closed:
                return True
            if not self._fits(nbytes):
                return False
            self._items.append((item, nbytes))
            self.held_bytes += nbytes
            self._changed.notify_all()
            return True

    def wait_for_room(self, nbytes: int) -> bool:
        """Wait until an item of this size fits; return False if the queue is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._fits(nbytes))
            return not self._closed

    def poll(self) -> T | None:
        """Take the next item; None: there is none now."""
        with self._changed:
            return self._take()

    def take(self) -> T | None:
        """Wait for the next item and take it; None: the queue is closed."""
        with self._changed:
            self._release()
            self._changed.wait_for(lambda: self._closed or self._items)
            return self._take()

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Drop all items, and end all waiting."""
        with self._changed:
            self._closed = True
            self._items.clear()
            self.held_bytes = self._taken_bytes = 0
            self._changed.notify_all()

    def release(self) -> bool:
        """Stop counting the item that was taken last; return whether `poll` would return one."""
        with self._changed:
            self._release()
            return bool(self._items)

    def fits(self, nbytes: int) -> bool:
        """Return whether `offer` would accept an item of this size."""
        with self._changed:
            return self._closed or self._fits(nbytes)

    def _fits(self, nbytes: int) -> bool:
        return not (nbytes and self.held_bytes) or self.held_bytes + nbytes <= self._limit_bytes

    def _release(self) -> None:
        self.held_bytes -= self._taken_bytes
        self._taken_bytes = 0
        self._changed.notify_all()

    def _take(self) -> T | None:
        self._release()
        if not self._items:
            return None
        item, self._taken_bytes = self._items.popleft()
        return item
