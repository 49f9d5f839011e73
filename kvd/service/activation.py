"""Sockets that the service manager has bound for us: a client's first word starts the daemon.

systemd passes them as file descriptors from 3 on (sd_listen_fds(3)), with names; launchd hands them
out by name (launch_activate_socket(3)). Does not serve them: that is who asks for them by `NAMES`.
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
"""Of the protocol's Unix socket, and of HTTP's, which may be several."""
_FIRST_FD = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def take() -> dict[str, list[socket.socket]]:
    """Return the listening sockets that we were started with, by name; each can be taken once."""
    if sys.platform == "darwin":
        return from_launchd()
    return from_systemd(os.environ)


def from_systemd(
    variables: MutableMapping[str, str], first: int = _FIRST_FD
) -> dict[str, list[socket.socket]]:
    """Return what the environment names, and take it out of there: it is not for our children."""
    said = {name: variables.pop(name, "") for name in _VARIABLES}
    if said["LISTEN_PID"] != str(os.getpid()) or not said["LISTEN_FDS"].isdigit():
        return {}
    count = int(said["LISTEN_FDS"])
    names = said["LISTEN_FDNAMES"].split(":") if said["LISTEN_FDNAMES"] else []
    names += [""] * (count - len(names))
    found: dict[str, list[socket.socket]] = {}
    for fd, name in zip(range(first, first + count), names, strict=False):
        os.set_inheritable(fd, False)
        if (one := _listening(fd)) is not None:
            found.setdefault(_meant(name, one), []).append(_ours(one))
    return found


def from_launchd(libsystem: Any = None) -> dict[str, list[socket.socket]]:
    """Return those of the job's ``Sockets`` that have a name of ours."""
    import ctypes.util  # noqa: PLC0415 - only macOS needs it

    library = libsystem or ctypes.CDLL(ctypes.util.find_library("System"))
    found: dict[str, list[socket.socket]] = {}
    for name in NAMES:
        fds = ctypes.POINTER(ctypes.c_int)()
        count = ctypes.c_size_t(0)
        # ESRCH: launchd did not start us; ENOENT: there is no such socket in the job.
        if library.launch_activate_socket(name.encode(), ctypes.byref(fds), ctypes.byref(count)):
            continue
        found[name] = [_ours(socket.socket(fileno=fds[index])) for index in range(count.value)]
        library.free(fds)
    return {name: sockets for name, sockets in found.items() if sockets}


def _listening(fd: int) -> socket.socket | None:
    """Return the socket that listens here; anything else is closed."""
    try:
        one = socket.socket(fileno=fd)
    except OSError:
        os.close(fd)
        return None
    if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return one
    one.close()
    return None


def _meant(name: str, one: socket.socket) -> str:
    """Return which of ours it is; a unit that names none has the unit's name, or ``unknown``."""
    plain = name.removesuffix(".socket").removeprefix("kvd-")
    if plain in NAMES:
        return plain
    return KVD if one.family == socket.AF_UNIX else HTTP


def _ours(one: socket.socket) -> socket.socket:
    one.set_inheritable(False)
    one.setblocking(False)
    return one
