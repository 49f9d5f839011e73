"""Reads the processes of a server from /proc: their pids, CPU time and resident memory.

On systems without /proc the results are empty. A process's resident memory includes pages that it
shares with other processes, such as libraries. `counted_again` returns how many bytes are counted
more than once if several processes' memory is summed.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_RESET_PEAK = "5"
"""proc(5), clear_refs: set the resident high-water mark to what is resident now."""
_PRESENT, _OF_FILE = 1 << 63, 1 << 61
"""proc(5), pagemap. A private mapping's page loses `_OF_FILE` when it is written to."""


@dataclass(frozen=True)
class Reading:
    """CPU time and memory of one process."""

    pid: int
    name: str
    cpu_s: float
    """User and system time of all threads."""
    peak_bytes: int
    """Most resident bytes since the start, or since `reset_peaks`."""


def tree(pid: int, proc: Path = PROC) -> list[int]:
    """Return the pids of a process and its descendants, parents first; none if it has exited."""
    found = [pid] if (proc / str(pid)).is_dir() else []
    for parent in found:
        for task in (proc / str(parent) / "task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, task.read_text().split())
    return found


def read(pids: list[int], proc: Path = PROC) -> list[Reading]:
    """Read processes; those that have exited are left out."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            found.append(_read(pid, proc))
    return found


def _read(pid: int, proc: Path) -> Reading:
    # The command is in parentheses and may contain any character: split after the last ")".
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
    """Return the module after ``-m``, or else the program's name."""
    words = cmdline.read_text().split("\0")
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    return Path(words[0]).name


def reset_peaks(pids: list[int], proc: Path = PROC) -> None:
    """Reset high-water marks, if the system allows it."""
    for pid in pids:
        with contextlib.suppress(OSError):
            (proc / str(pid) / "clear_refs").write_text(_RESET_PEAK)


def counted_again(pids: list[int], proc: Path = PROC) -> int:
    """Return the bytes of file pages that the sum of resident memory counts more than once.

    The sum minus this value counts every page once. Sharing with processes that are not in ``pids``
    does not matter.
    """
    size = os.sysconf("SC_PAGE_SIZE")
    seen: set[tuple[str, int]] = set()
    again = 0
    for pid in pids:
        mine: set[tuple[str, int]] = set()
        with contextlib.suppress(OSError):
            mine.update(_file_pages(proc / str(pid), size))
        again += size * len(seen & mine)
        seen |= mine
    return again


def _file_pages(process: Path, size: int) -> Iterator[tuple[str, int]]:
    """Yield the resident file pages, each as its file and its number in the file."""
    with (process / "pagemap").open("rb", buffering=0) as pagemap:
        for line in (process / "maps").read_text().splitlines():
            where, _, offset, device, inode = line.split()[:5]
            if inode == "0":
                continue
            start, end = (int(one, 16) // size for one in where.split("-"))
            pagemap.seek(8 * start)
            words = array("Q", pagemap.read(8 * (end - start)))
            first = int(offset, 16) // size
            for page, word in enumerate(words, first):
                if word & _PRESENT and word & _OF_FILE:
                    yield f"{device} {inode}", page
