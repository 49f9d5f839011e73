"""Whether it was the kernel that killed a process, for want of memory. Linux says so; macOS not."""

from __future__ import annotations

from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def kills(vmstat: Path = VMSTAT) -> int:
    """Return how many processes the kernel has killed for want of memory since it was started.

    0 where it does not say. In a container too it counts all of the machine.
    """
    try:
        lines = vmstat.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = (line.split() for line in lines if line.startswith("oom_kill "))
    return next((int(words[1]) for words in found if words[1].isdigit()), 0)


class OomWatch:
    """Tells kills for want of memory from others, for several processes."""

    def __init__(self, vmstat: Path = VMSTAT) -> None:
        self._vmstat = vmstat
        self._seen = kills(vmstat)

    def began(self) -> None:
        """Note that a process starts: what was killed before was not it."""
        self._seen = max(self._seen, kills(self._vmstat))

    def took(self) -> bool:
        """Return whether a process that has just been killed may have been the kernel's choice."""
        if kills(self._vmstat) <= self._seen:
            return False
        self._seen += 1
        return True
