"""Socket activation: the service manager binds the sockets, and the first client starts the daemon.

Interfaces: sd_listen_fds(3) and launch_activate_socket(3).
"""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import MutableMapping

KVD, HTTP = "kvd", "http"
NAMES = (KVD, HTTP)
"""The names of the protocol's Unix socket and of the HTTP sockets."""
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def take() -> dict[str, list[socket.socket]]:
    """Return the sockets that the manager passed, by name. The second call returns none."""
    return from_launchd() if sys.platform == "darwin" else from_systemd(os.environ)


def from_systemd(
    variables: MutableMapping[str, str], first: int = 3
) -> dict[str, list[socket.socket]]:
    """Return systemd's sockets and remove its variables, which child processes must not see."""
    values = {name: variables.pop(name, "") for name in _VARIABLES}
    if values["LISTEN_PID"] != str(os.getpid()) or not values["LISTEN_FDS"].isdigit():
        return {}
    count = int(values["LISTEN_FDS"])
    names = values["LISTEN_FDNAMES"].split(":") if values["LISTEN_FDNAMES"] else []
    names += [""] * (count - len(names))
    found: dict[str, list[socket.socket]] = {}
    for fd, name in zip(range(first, first + count), names, strict=False):
        if (listener := _listening(fd)) is not None:
            found.setdefault(_known_name(name, listener), []).append(_prepared(listener))
    return found


def from_launchd(libsystem: Any = None) -> dict[str, list[socket.socket]]:
    """Return the sockets of the job's ``Sockets`` under the names in `NAMES`."""
    import ctypes.util  # noqa: PLC0415 - only macOS needs it

    library = libsystem or ctypes.CDLL(ctypes.util.find_library("System"))
    found: dict[str, list[socket.socket]] = {}
    for name in NAMES:
        fds = ctypes.POINTER(ctypes.c_int)()
        count = ctypes.c_size_t(0)
        # ESRCH: launchd did not start this process; ENOENT: the job has no such socket.
        if library.launch_activate_socket(name.encode(), ctypes.byref(fds), ctypes.byref(count)):
            continue
        found[name] = [_prepared(socket.socket(fileno=fds[index])) for index in range(count.value)]
        library.free(fds)
    return {name: sockets for name, sockets in found.items() if sockets}


def _listening(fd: int) -> socket.socket | None:
    """Return the listening socket of a descriptor; close anything else."""
    try:
        os.set_inheritable(fd, False)
    except OSError:  # something between systemd and the daemon has closed it
        return None
    try:
        listener = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return None
    if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return listener
    listener.close()
    return None


def _known_name(name: str, listener: socket.socket) -> str:
    """Return the name in `NAMES` that a socket stands for.

    Without ``FileDescriptorName=``, systemd passes the unit's name or ``unknown``.
    """
    plain = name.removesuffix(".socket").removeprefix("kvd-")
    if plain in NAMES:
        return plain
    return KVD if listener.family == socket.AF_UNIX else HTTP


def _prepared(listener: socket.socket) -> socket.socket:
    listener.set_inheritable(False)
    listener.setblocking(False)
    return listener
