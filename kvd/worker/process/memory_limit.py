"""Ends the worker, or fails one allocation, before the process holds much more than its grant.

Model folders and chat templates come from anywhere and may need any amount of memory. Two limits
apply from `MemoryLimit.start` on. Both follow the grant (`protocol.memory_bounds.limit_bytes`):

* A thread reads the process's memory, every 50 ms while it changes. Above the limit it writes one
  line to the log and ends the process with status `OVER_MEMORY_LIMIT`.
* The thread does not run while another one holds the GIL, for example in ``'x' * 10**10``. On Linux
  the kernel therefore refuses allocations further above the limit (``RLIMIT_DATA``): Python raises
  ``MemoryError``, and other code ends the process. macOS has no such limit. There, the daemon ends
  the worker (`actors.readings`).

`kvd.worker.__main__` enables the limits. Without that, all methods do nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from kvd.worker.process import memory
from protocol.memory_bounds import limit_bytes
from protocol.worker import OVER_MEMORY_LIMIT

MIN_INTERVAL_S = 0.05
MAX_INTERVAL_S = 0.25
_CHANGE_BYTES = 1024 * 1024
"""A smaller change of the process's memory doubles the interval, up to `MAX_INTERVAL_S`."""
_RESERVED_BYTES = 256 * 1024 * 1024
_RESERVED_PER_PROCESSOR = 64 * 1024 * 1024
"""RLIMIT_DATA counts private memory that is reserved and not touched, such as threads' stacks and
the buffers of BLAS. So much may be reserved later (measured with two processors: 190 MiB)."""


class MemoryLimit:
    """The limits of this process. Call `start` once the process reads files of the model."""

    def __init__(
        self,
        private: Callable[[], int] = memory.private,
        end: Callable[[int], object] = os._exit,
        *,
        enabled: bool = False,
    ) -> None:
        """``private``: returns the bytes to limit. ``end``: ends the process with a status."""
        self.enabled = enabled
        self._private = private
        self._end = end
        self._granted = 0
        self._started = False
        self._narrowing = threading.Lock()

    @property
    def nbytes(self) -> int:
        return limit_bytes(self._granted)

    def room(self) -> int:
        """Return the bytes by which the process may grow before it is ended; takes 20 us."""
        return self.nbytes - self._private() if self._started else 1 << 62

    @property
    def refuses_allocations(self) -> bool:
        """Whether allocations may fail because of this limit, and not for lack of memory."""
        return self._started and sys.platform == "linux"

    def start(self) -> None:
        if self.enabled and not self._started:
            self._started = True
            threading.Thread(target=self._watch, name="memory limit", daemon=True).start()
            self._apply()

    def allow(self, granted_bytes: int) -> None:
        """Note the bytes that the worker may hold from now on."""
        self._granted = granted_bytes
        if self._started:
            self._apply()

    @contextlib.contextmanager
    def narrow(self, nbytes: int) -> Iterator[None]:
        """Allow this block only ``nbytes`` more than the process has now, where the system can.

        Beyond them, Python raises ``MemoryError``. For code in Python alone: allocations that fail
        elsewhere may end the process. Threads whose code is not Python use `never_narrow`.
        """
        with self._narrowing:
            if self._started:
                _set_data_limit(memory.reserved() + nbytes)
            try:
                yield
            finally:
                if self._started:
                    self._apply()

    @contextlib.contextmanager
    def never_narrow(self) -> Iterator[None]:
        """Let `narrow` wait until this block ends. For a thread."""
        with self._narrowing:
            yield

    def _apply(self) -> None:
        room = max(0, self.nbytes - self._private()) + _RESERVED_BYTES
        _set_data_limit(memory.reserved() + room + _RESERVED_PER_PROCESSOR * (os.cpu_count() or 1))

    def _watch(self) -> None:
        interval_s, before = MIN_INTERVAL_S, 0
        while True:
            try:
                if self.check():
                    return
                now = self._private()
            except MemoryError:  # the kernel refuses allocations while the process is at its limit
                time.sleep(MIN_INTERVAL_S)
                continue
            steady = abs(now - before) < _CHANGE_BYTES
            interval_s = min(MAX_INTERVAL_S, 2 * interval_s) if steady else MIN_INTERVAL_S
            before = now
            time.sleep(interval_s)

    def check(self) -> bool:
        """End the process if it is above its limit; return whether it was."""
        held = self._private()
        if held <= self.nbytes:
            return False
        text = (
            f"the worker holds {held >> 20} MiB, above its limit of {self.nbytes >> 20} MiB"
            f" ({self._granted >> 20} MiB granted): it ends itself\n"
        )
        os.write(2, text.encode())  # logging may wait for a lock that another thread holds
        self._end(OVER_MEMORY_LIMIT)
        return True


def _set_data_limit(nbytes: int) -> None:
    if sys.platform != "linux":
        return
    import resource  # noqa: PLC0415 - not on every system

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    soft = nbytes if hard == resource.RLIM_INFINITY else min(nbytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


limit = MemoryLimit()
"""The limits of the process that runs this code."""
