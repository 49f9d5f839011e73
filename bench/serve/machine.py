"""CPU time that programs outside of the comparison take.

The readings come from /proc/stat, which counts the whole machine, or the whole virtual machine. On
systems without it they are nan.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from pathlib import Path

from kvd.bench.processes import PROC

_BUSY = slice(1, 9)
"""Columns of proc(5) /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal."""
_WAITING = (3, 4)
"""Positions of idle and iowait among them."""
_LOOK_S = 0.4
_PATIENCE_S = 30.0
"""Longest wait for a quiet machine before a run."""


def busy_s(proc: Path = PROC) -> float:
    """Return the CPU seconds of all processors for any program, with time that a host took."""
    try:
        columns = (proc / "stat").read_text().split("\n", 1)[0].split()[_BUSY]
    except OSError:
        return math.nan
    ticks = [int(one) for at, one in enumerate(columns) if at not in _WAITING]
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


async def quiet(share: float, patience_s: float = _PATIENCE_S) -> None:
    """Wait until less than ``share`` of a core is in use, at most ``patience_s`` seconds."""
    until = time.monotonic() + patience_s
    while time.monotonic() < until:
        before, started = busy_s(), time.monotonic()
        await asyncio.sleep(_LOOK_S)
        if not (busy_s() - before) / (time.monotonic() - started) >= share:
            return
