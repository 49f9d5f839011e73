"""Ports for tests whose processes bind them seconds later."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

_FIRST, _STEP, _SETS = 20_000, 700, 16
"""Below the ports that systems choose themselves: from 32768 on Linux, 49152 on macOS."""
_numbers = itertools.count(os.getpid())


def free_addresses(count: int) -> list[str]:
    """Return addresses, as ``host:port``, that no other of up to 16 test processes chooses.

    Tests run in parallel, and a gang binds its ports only after seconds of imports.
    """
    first = _FIRST + int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % _SETS * _STEP
    found: list[str] = []
    while len(found) < count:
        port = first + next(_numbers) % _STEP
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.append(f"127.0.0.1:{port}")
    return found
