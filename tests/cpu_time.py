"""The CPU time of calls, measured so that other programs on the machine matter little."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable


def takes_less_than(seconds: float, call: Callable[[], object], attempts: int = 5) -> bool:
    """Return whether one of a few calls needs less CPU time.

    Other processes, and garbage collections over what earlier tests left, make single calls twice
    as long.
    """
    return any(_cpu_seconds(call) < seconds for _ in range(attempts))


def grows_linearly(call: Callable[[int], object], count: int, attempts: int = 5) -> bool:
    """Return whether four times as much takes four times as long; quadratic work takes 16 times.

    ``call`` does the work for a count.
    """
    call(count)
    for _ in range(attempts):
        one, four = (_cpu_seconds(lambda of=of: call(of)) for of in (count, 4 * count))
        if four < 8 * one:
            return True
    return False


def _cpu_seconds(call: Callable[[], object]) -> float:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        began = time.process_time()
        call()
        return time.process_time() - began
    finally:
        if enabled:
            gc.enable()
