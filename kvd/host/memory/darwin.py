"""macOS: phys_footprint, the system's pressure level and Metal's recommended working set.

The working set is computed from sysctl values, because reading it requires opening the device.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from typing import Literal

from kvd.host.memory import in_thread
from protocol.types import HostMemory

_RUSAGE_INFO_V4 = 4
_RUSAGE_WORDS = 64
"""More 64-bit words than `struct rusage_info_v4` has: a uuid of 16 bytes, then 35 counters."""
_PHYS_FOOTPRINT = 9
"""The 64-bit word of ri_phys_footprint: after the uuid (two words), user_time, system_time,
pkg_idle_wkups, interrupt_wkups, pageins, wired_size and resident_size."""
_HOST_VM_INFO64 = 4
_VM_WORDS = 64
"""More 32-bit words than `struct vm_statistics64` has; the kernel returns how many it wrote."""
_FREE, _INACTIVE = 0, 2
"""The 32-bit words of free_count (includes speculative pages) and inactive_count."""

_SMALL, _LARGE = 2 / 3, 3 / 4
"""Metal recommends two thirds of the memory below 36 GiB, and three quarters above."""
_LARGE_FROM = 36 * 2**30


class DarwinMemory:
    """Readings of the running system; tests replace ``libsystem``."""

    def __init__(self, libsystem: ctypes.CDLL | None = None) -> None:
        self._lib = libsystem or ctypes.CDLL(ctypes.util.find_library("System"), use_errno=True)

    def host(self) -> HostMemory:
        total = self._sysctl("hw.memsize", 8)
        wired_mb = self._sysctl("iogpu.wired_limit_mb", 4)
        return HostMemory(
            total=total,
            available=self._available(),
            accelerator_limit=wired_mb * 2**20 if wired_mb else recommended(total),
            pressure=_level(self._sysctl("kern.memorystatus_vm_pressure_level", 4)),
        )

    def footprint(self, pid: int) -> int:
        """Return phys_footprint, the value that the system's own limits use."""
        words = (ctypes.c_uint64 * _RUSAGE_WORDS)()
        failed = self._lib.proc_pid_rusage(pid, _RUSAGE_INFO_V4, ctypes.byref(words))
        return 0 if failed else int(words[_PHYS_FOOTPRINT])

    async def footprints(self, pids: list[int]) -> dict[int, int]:
        return await in_thread.footprints(self.footprint, pids)

    @property
    def separate(self) -> bool:
        return False

    @property
    def devices(self) -> list[str]:
        return []

    def _sysctl(self, name: str, size: int) -> int:
        """Return an integer setting; 0 if this system does not have it."""
        value, length = ctypes.c_uint64(0), ctypes.c_size_t(size)
        failed = self._lib.sysctlbyname(
            name.encode(), ctypes.byref(value), ctypes.byref(length), None, ctypes.c_size_t(0)
        )
        return 0 if failed else int(value.value)

    def _available(self) -> int:
        """Return the bytes that are free or reclaimable without writing to disk."""
        words, count = (ctypes.c_uint32 * _VM_WORDS)(), ctypes.c_uint32(_VM_WORDS)
        host = self._lib.mach_host_self()
        failed = self._lib.host_statistics64(
            host, _HOST_VM_INFO64, ctypes.byref(words), ctypes.byref(count)
        )
        if failed:
            return 0
        pages = words[_FREE] + words[_INACTIVE]
        return int(pages) * self._sysctl("hw.pagesize", 8)


def recommended(total: int) -> int:
    """Return Metal's recommended maximum working set for a machine with this memory."""
    return int(total * (_LARGE if total >= _LARGE_FROM else _SMALL))


def _level(level: int) -> Literal["normal", "warning", "critical"]:
    if level >= 4:
        return "critical"
    return "warning" if level >= 2 else "normal"
