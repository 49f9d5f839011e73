"""This process's memory as the system counts it: what nobody else would give back at its exit.

On Linux the proportional set size, on macOS ``phys_footprint``: resident size misleads on both.
`kvd.host.memory` reads other processes' for the daemon; a worker must not depend on the daemon's code.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

MIN_INTERVAL_S = 0.25
MAX_SHARE = 0.02
"""Of the time that readings may take: the kernel walks all page tables for one, which was measured
at 25 ms for each GiB of small pages, and the loop that reads it has tokens to make."""

_ROLLUP = Path("/proc/self/smaps_rollup")


class _Reading:
    """A reading that is taken anew only when it is due."""

    def __init__(self, read: Callable[[], int], clock: Callable[[], float]) -> None:
        self._read = read
        self._clock = clock
        self._due = -float("inf")
        self._value = 0

    def newest(self) -> int:
        """Return the value, read again if that is due."""
        start = self._clock()
        return self._value if start < self._due else self._take(start)

    def anew(self) -> int:
        """Return the value, read again."""
        return self._take(self._clock())

    def _take(self, start: float) -> int:
        self._value = self._read()
        took = self._clock() - start
        self._due = start + max(MIN_INTERVAL_S, took / MAX_SHARE)
        return self._value


def _read_linux() -> int:
    try:
        for line in _ROLLUP.read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    # Kernels without smaps_rollup, and sandboxes that hide it: resident pages.
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return resident * os.sysconf("SC_PAGE_SIZE")


class _RUsageInfoV4(ctypes.Structure):
    """``struct rusage_info_v4`` of <sys/resource.h>, up to its footprint, and room for the rest."""

    _fields_ = (
        ("ri_uuid", ctypes.c_uint8 * 16),
        ("ri_user_time", ctypes.c_uint64),
        ("ri_system_time", ctypes.c_uint64),
        ("ri_pkg_idle_wkups", ctypes.c_uint64),
        ("ri_interrupt_wkups", ctypes.c_uint64),
        ("ri_pageins", ctypes.c_uint64),
        ("ri_wired_size", ctypes.c_uint64),
        ("ri_resident_size", ctypes.c_uint64),
        ("ri_phys_footprint", ctypes.c_uint64),
        ("_rest", ctypes.c_uint64 * 27),
    )


_RUSAGE_INFO_V4 = 4


def _read_macos() -> int:
    info = _RUsageInfoV4()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.proc_pid_rusage(os.getpid(), _RUSAGE_INFO_V4, ctypes.byref(info)) != 0:
        raise OSError(ctypes.get_errno(), "proc_pid_rusage failed")
    return int(info.ri_phys_footprint)


_reading = _Reading(_read_macos if sys.platform == "darwin" else _read_linux, time.monotonic)


def footprint() -> int:
    """Return this process's footprint in bytes, as new as is cheap."""
    return _reading.newest()


def measured() -> int:
    """Return this process's footprint in bytes, read now."""
    return _reading.anew()


def give_back() -> None:
    """Return to the system what malloc keeps of freed memory, where malloc can (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
