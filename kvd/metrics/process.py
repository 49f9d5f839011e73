"""CPU time and open files of the daemon's process."""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass

_DESCRIPTORS = "/dev/fd"
"""A folder with an entry per open file, on Linux and macOS."""


@dataclass(frozen=True)
class Process:
    """One reading."""

    cpu_s: float
    open_files: int
    most_files: int | None


def read() -> Process:
    """Take a reading, in about 20 microseconds."""
    with os.scandir(_DESCRIPTORS) as found:
        count = sum(1 for _ in found) - 1  # the scan opens one itself
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Process(time.process_time(), count, None if most == resource.RLIM_INFINITY else most)
