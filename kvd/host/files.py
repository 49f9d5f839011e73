"""The limit on open files; each connection and each worker needs one.

The default soft limit is 256 (macOS) or 1024 (Linux), for programs that use `select`.
"""

from __future__ import annotations

import contextlib
import resource

WANTED = 8192


def raise_limit() -> None:
    """Raise the soft limit to `WANTED`, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # macOS has a second, lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft
