"""The memory that records of stored prefixes are read into.

One block is used again for every record, so a read neither allocates memory nor faults it in. Each
byte is copied once after it is read, from the block to a page. With CUDA the block is page-locked,
so that the device copies at the speed of its bus (`kvd.worker.cache.cuda_driver`).
"""

from __future__ import annotations

import contextlib
import mmap
from collections import deque
from collections.abc import Callable

Lock = Callable[[memoryview], Callable[[], None]]
"""Locks memory for the device; returns what unlocks it."""

_ALIGNMENT = 256
"""Records begin at multiples of this, for the device."""


def _lock_nothing(_memory: memoryview) -> Callable[[], None]:
    return lambda: None


class RecordMemory:
    """One block of memory, whose pieces are taken and freed in the same order.

    The block is allocated by `open` and freed by `close`. One thread at a time may call a method.
    ``lock``: see `Lock`; `open` and `close` call it.
    """

    def __init__(self, nbytes: int, lock: Lock = _lock_nothing) -> None:
        self.nbytes = nbytes
        self._lock = lock
        self._block: memoryview | None = None
        self._unlock: Callable[[], None] | None = None
        self._taken: deque[tuple[int, int]] = deque()
        """Start and end of each taken piece, the oldest first."""

    @property
    def is_open(self) -> bool:
        return self._block is not None

    def open(self) -> None:
        """Allocate the block if it is not allocated, and free all its pieces."""
        self._taken.clear()
        if self._block is None:
            block = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    block.madvise(mmap.MADV_HUGEPAGE)  # 776 instead of 4353 faults for 18 MB
            self._block = memoryview(block)
            self._unlock = self._lock(self._block)

    def close(self) -> None:
        """Free the block. No piece of it may be in use."""
        self._taken.clear()
        if self._unlock is not None:
            self._unlock()
        self._block = self._unlock = None

    def has_room(self, nbytes: int) -> bool:
        """Return whether `take` has a free piece of this size."""
        return self._start_of(nbytes) is not None

    def take(self, nbytes: int) -> memoryview:
        """Return a piece with undefined content. Call it only if `has_room` is true."""
        start = self._start_of(nbytes)
        assert start is not None, "there is room for what is taken"
        assert self._block is not None, "the memory is open"
        self._taken.append((start, start + nbytes))
        return self._block[start : start + nbytes]

    def free_oldest(self) -> None:
        """Free the oldest piece."""
        self._taken.popleft()

    def _start_of(self, nbytes: int) -> int | None:
        """Return the offset of a free piece of this size; None: there is none."""
        if not self._taken:
            return 0 if nbytes <= self.nbytes else None
        first, end = self._taken[0][0], -(-self._taken[-1][1] // _ALIGNMENT) * _ALIGNMENT
        if self._taken[-1][0] < first:  # the newest bytes are before the oldest ones
            return end if end + nbytes <= first else None
        if end + nbytes <= self.nbytes:
            return end
        return 0 if nbytes <= first else None
