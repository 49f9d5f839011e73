"""No worker outlives its daemon, not even in the middle of a long step.

The loop sees the end of its socket between two steps; a step, a load or a download may take much
longer. So a thread that does nothing else waits for the hang-up and ends the process. On Linux the
kernel is asked as well (``PR_SET_PDEATHSIG``), since that works even while somebody holds the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

_LOOK_AGAIN_MS = 500
"""Between looks at the parent, for systems that do not wake ``poll`` for a hang-up alone."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(sock: socket.socket) -> None:
    """End this process, with status 0, as soon as the other end of ``sock`` is closed."""
    parent = os.getppid()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        with contextlib.suppress(AttributeError):  # a C library without prctl
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    threading.Thread(target=_watch, args=(sock, parent), name="orphan", daemon=True).start()


def _watch(sock: socket.socket, parent: int) -> None:
    poll = select.poll()
    poll.register(sock, 0)  # hang-ups and errors are always told
    while not poll.poll(_LOOK_AGAIN_MS) and os.getppid() == parent:
        pass
    os._exit(0)
