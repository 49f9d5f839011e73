"""This process's footprint: the memory that its exit would free.

Proportional set size on Linux, ``phys_footprint`` on macOS. Resident size is misleading on both.
`kvd.host.memory` reads other processes' footprints; a worker must not depend on the daemon's code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

MIN_INTERVAL_S = 0.25
MAX_SHARE = 0.02
"""Share of the time that readings may take.

For each reading the kernel walks all page tables (measured: 25 ms per GiB of small pages).
"""

_ROLLUP = Path("/proc/self/smaps_rollup")
_STATM = Path("/proc/self/statm")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Reading:
    """A value that is read again only when it is due."""

    def __init__(self, read: Callable[[], int], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._due = -float("inf")
        self._value = 0
        self._thread = ThreadPoolExecutor(1, "footprint")
        self._under_way: Future[int] | None = None

    def latest(self) -> int:
        """Return the value of the last reading. If the next one is due, a thread begins it."""
        if not self._value:
            return self.read_now()
        is_idle = self._under_way is None or self._under_way.done()
        if is_idle and self._clock() >= self._due:
            self._under_way = self._thread.submit(self.read_now)
        return self._value

    def newest(self) -> int:
        return self._value if self._clock() < self._due else self.read_now()

    def read_now(self) -> int:
        start = self._clock()
        self._value = self._read()
        took = self._clock() - start
        self._due = start + max(MIN_INTERVAL_S, took / MAX_SHARE)
        return self._value


def _read_linux() -> int:
    with contextlib.suppress(OSError):
        for line in _ROLLUP.read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    # Fall back to resident pages: old kernels lack smaps_rollup, and sandboxes may hide it.
    return _statm()[1]


class _RUsageInfoV4(ctypes.Structure):
    """The footprint in ``struct rusage_info_v4`` of <sys/resource.h>, between other fields."""

    _fields_ = (
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("_counters_before", ctypes.c_uint64 * 7),
        ("ri_phys_footprint", ctypes.c_uint64),
        ("_counters_after", ctypes.c_uint64 * 27),
    )


def _read_macos() -> int:
    info = _RUsageInfoV4()
    flavor = 4  # RUSAGE_INFO_V4
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.proc_pid_rusage(os.getpid(), flavor, ctypes.byref(info)) != 0:
        raise OSError(ctypes.get_errno(), "proc_pid_rusage failed")
    return int(info.ri_phys_footprint)


footprint_reading = Reading(
    _read_macos if sys.platform == "darwin" else _read_linux, time.monotonic
)


footprint = footprint_reading.newest
"""Returns this process's footprint in bytes. It may be old, to keep readings cheap."""
footprint_now = footprint_reading.read_now


def private() -> int:
    """Return the bytes that only this process holds, less than the footprint; takes 20 us."""
    if sys.platform == "darwin":
        return _read_macos()
    _, resident, shared, *_ = _statm()
    return resident - shared


def reserved() -> int:
    """Return the private writable memory of this process, touched or not, on Linux; else 0."""
    return 0 if sys.platform == "darwin" else _statm()[5]


def _statm() -> list[int]:
    """Return the fields of ``/proc/self/statm``, in bytes."""
    return [int(field) * _PAGE_BYTES for field in _STATM.read_text().split()]


def trim_malloc() -> None:
    """Return to the system the freed memory that malloc keeps, if malloc can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
