"""How many files this process may have open: each connection is one, and each worker.

Systems start a process with a soft limit of 256 (macOS) or 1024 (Linux) for the sake of programs
that are older than `poll`, and leave it to those that need more to ask for it.
"""

from __future__ import annotations

import contextlib
import resource

WANTED = 8192


def raise_limit() -> None:
    """Ask for as many as we may need, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a second limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    """Return how many there may be now."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft
