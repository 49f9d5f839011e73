"""What /proc says of a server's processes: who they are, processor time, resident memory.

Linux only; elsewhere there is no such folder, and the readings are absent. Resident memory counts
shared pages (libraries) once in each process.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_RESET_PEAK = "5"
"""proc(5), clear_refs: set the resident high-water mark to what is resident now."""


@dataclass(frozen=True)
class Reading:
    """One process."""

    pid: int
    name: str
    cpu_s: float
    """User and system, all threads."""
    peak_bytes: int
    """Most resident bytes since the start, or since `reset_peaks`."""


def tree(pid: int, proc: Path = PROC) -> list[int]:
    """Return a process and all below it, parents first; nothing if it has gone."""
    found = [pid] if (proc / str(pid)).is_dir() else []
    for parent in found:
        for task in (proc / str(parent) / "task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, task.read_text().split())
    return found


def read(pids: list[int], proc: Path = PROC) -> list[Reading]:
    """Read processes; those that have gone are left out."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(_read(pid, proc))
    return found


def _read(pid: int, proc: Path) -> Reading:
    # The command stands in parentheses and may hold anything: fields count from the last one.
    stat = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
    status = dict(
        line.split(":", 1) for line in (proc / str(pid) / "status").read_text().splitlines()
    )
    return Reading(
        pid=pid,
        name=_name(proc / str(pid) / "cmdline"),
        cpu_s=(int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"),
        peak_bytes=int(status.get("VmHWM", "0 kB").split()[0]) * 1024,
    )


def _name(cmdline: Path) -> str:
    """Return what runs: the module after ``-m``, else the program."""
    words = cmdline.read_text().split("\0")
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return Path(words[0]).name


def reset_peaks(pids: list[int], proc: Path = PROC) -> None:
    """Let high-water marks begin anew, where the system allows it."""
    for pid in pids:
        with contextlib.suppress(OSError):
            (proc / str(pid) / "clear_refs").write_text(_RESET_PEAK)
