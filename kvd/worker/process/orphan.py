"""Ends the worker when its daemon or another rank of its gang dies, even during a long step.

The loop notices only between steps that the socket was closed; a step, a load or a download may
take long, and a collective waits for a dead rank without end. A separate thread therefore waits
for the hang-up and ends the process. On Linux, the kernel also kills the process
(``PR_SET_PDEATHSIG``), even while another thread holds the GIL.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Sequence

from protocol.gang import PEER_LOST

_CHECK_INTERVAL_MS = 500
"""Milliseconds between checks of the parent, for systems where a hang-up does not wake ``poll``."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(sock: socket.socket, peers: Sequence[socket.socket] = ()) -> None:
    """End this process as soon as the other end of ``sock`` is closed or the parent has exited.

    ``peers``: sockets to other ranks of a gang. If one of them is closed, the process ends with
    status `PEER_LOST`.
    """
    parent = os.getppid()
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        with contextlib.suppress(AttributeError):  # a C library without prctl
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    arguments = (sock, parent, peers)
    threading.Thread(target=_watch, args=arguments, name="orphan", daemon=True).start()


def _watch(sock: socket.socket, parent: int, peers: Sequence[socket.socket]) -> None:
    poll = select.poll()
    for one in (sock, *peers):
        poll.register(one, 0)  # poll always reports hang-ups and errors
    while not (ended := poll.poll(_CHECK_INTERVAL_MS)) and os.getppid() == parent:
        pass
    lost = ended and all(fd != sock.fileno() for fd, _ in ended)
    os._exit(PEER_LOST if lost else 0)
