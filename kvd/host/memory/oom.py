"""Detects kills by the kernel's out-of-memory killer, on Linux."""

from __future__ import annotations

from pathlib import Path

VMSTAT = Path("/proc/vmstat")


def kills(vmstat: Path = VMSTAT) -> int:
    """Return the machine's out-of-memory kills since boot; 0 if the system does not count them."""
    try:
        lines = vmstat.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    found = (line.split() for line in lines if line.startswith("oom_kill "))
    return next((int(words[1]) for words in found if words[1].isdigit()), 0)


class OomWatch:
    """Attributes out-of-memory kills to processes."""

    def __init__(self, vmstat: Path = VMSTAT) -> None:
        self._vmstat = vmstat
        self._seen = kills(vmstat)

    def process_started(self) -> None:
        """Ignore all kills so far."""
        self._seen = max(self._seen, kills(self._vmstat))

    def killed_process(self) -> bool:
        """Return whether a dead process may have been killed; each kill counts once."""
        if kills(self._vmstat) <= self._seen:
            return False
        self._seen += 1
        return True
