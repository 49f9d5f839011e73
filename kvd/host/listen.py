"""The Unix socket: lock, bind, accept, and transfer bytes between clients and the actors.

The lock is taken first, because binding alone would silently replace a live daemon's socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import select
import socket
import stat
import struct
import sys
from typing import TYPE_CHECKING, Protocol

import structlog

from kvd.host.home import check_socket_path, unusable
from protocol.errors import AlreadyRunning, ConfigError, PermissionDenied
from protocol.framing import encode_line
from protocol.messages import Error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvd.host.home import Home

BACKLOG = 512
"""Connections that may wait for accept. Clients on asyncio do not notice that the queue is full."""
_HALF_CLOSED_S = 0.5
"""Seconds to answer a client that has closed its writing side (`nc -N`)."""
_LINGER_S = 2.0
"""Seconds for a client to read the last lines after the daemon closes the connection."""


@contextlib.contextmanager
def hold_lock(home: Home) -> Iterator[None]:
    """Lock the home for this process, or raise `AlreadyRunning` with the holder's pid."""
    _check_lock(home.lock)
    try:
        fd = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise unusable(home.lock, error) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
            raise AlreadyRunning(
                f"a daemon (pid {holder}) already serves {home.root}; stop it with "
                "`kvctl shutdown`, or choose another home with --home",
                pid=holder,
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(fd)


def _check_lock(path: Path) -> None:
    """Raise `ConfigError` if writing the lock file would change another file."""
    with contextlib.suppress(FileNotFoundError):
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            raise ConfigError(
                f"cannot use {path}: it is a link or no file, and the daemon would write its pid "
                "there; move it away",
                key="home",
            )


def holder(home: Home) -> int | None:
    """Return the pid of the process that holds the lock (0 if unknown), or None."""
    try:
        # Without O_NONBLOCK, opening a FIFO would block.
        flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(home.lock, flags), "rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = lock.read(32).strip()
                return int(pid) if pid.isdigit() else 0
    except OSError:
        pass
    return None


def bind(path: Path) -> socket.socket:
    """Return a listening socket with mode 0600. The caller holds the home's lock.

    An existing socket therefore belongs to a dead daemon, or to the service manager.
    """
    check_socket_path(path)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} exists and is not a socket; move it away", key="home")
        if _is_open(path):
            raise ConfigError(
                f"another process listens on {path}, such as the service manager of this home; "
                "run `kvctl service stop` first",
                key="home",
            )
        path.unlink()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(path))
    except BaseException:
        listener.close()
        raise
    finally:
        os.umask(before)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


def _is_open(path: Path) -> bool:
    """Return whether a process has this socket open, without activating its service.

    It connects with the wrong socket type. The kernel looks for a listener before it checks the
    type, so `EPROTOTYPE` means that there is one.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        try:
            other.connect(str(path))
        except OSError as error:
            return error.errno == errno.EPROTOTYPE
    return True


def peer_uid(peer: socket.socket) -> int:
    """Return the peer's user id from the kernel.

    Raises `ConnectionError` on macOS if the peer has disconnected; Linux still returns the id.
    """
    if sys.platform == "darwin":
        # struct xucred: version, uid, count of groups and 16 groups; LOCAL_PEERCRED of SOL_LOCAL.
        try:
            credentials = peer.getsockopt(0, 1, 76)
        except OSError as error:  # ENOTCONN
            raise ConnectionResetError("the client has disconnected") from error
        return int(struct.unpack_from("II", credentials)[1])
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def is_ours(uid: int) -> bool:
    """Return whether this uid may connect: the daemon's own user, or root, which can become it."""
    return uid in {os.geteuid(), 0}


def hung_up(peer: socket.socket) -> bool:
    """Return whether the peer has closed the connection, not only its writing side."""
    poll = select.poll()
    poll.register(peer.fileno(), 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


class Connection(Protocol):
    """A client's connection to the actors: `actors.system.Connection`."""

    def receive(self, data: bytes) -> None: ...

    def closed(self) -> None:
        """Handle the client's disconnect."""


class Connect(Protocol):
    """`actors.system.System.connect`."""

    def __call__(
        self,
        *,
        write: Callable[[bytes], None],
        close: Callable[[], None],
        backlog: Callable[[], int],
    ) -> Connection: ...


async def serve(listener: socket.socket, connect: Connect) -> asyncio.Server:
    """Accept clients of the protocol until the server is closed."""
    return await accept(listener, lambda: ClientProtocol(connect))


async def accept(
    listener: socket.socket, connected: Callable[[], asyncio.BaseProtocol]
) -> asyncio.Server:
    """Accept connections. Closing keeps the socket's path, which may be the service manager's."""
    loop = asyncio.get_running_loop()
    if listener.family != socket.AF_UNIX:
        return await loop.create_server(connected, sock=listener, backlog=BACKLOG)
    if sys.version_info >= (3, 13):
        return await loop.create_unix_server(
            connected, sock=listener, backlog=BACKLOG, cleanup_socket=False
        )
    return await loop.create_unix_server(connected, sock=listener, backlog=BACKLOG)


class ClientProtocol(asyncio.Protocol):
    """One client of the protocol."""

    def __init__(self, connect: Connect, uid_of: Callable[[socket.socket], int] = peer_uid) -> None:
        self._connect = connect
        self._uid_of = uid_of
        self._connection: Connection | None = None
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        try:
            uid = self._uid_of(transport.get_extra_info("socket"))
        except ConnectionError:
            transport.abort()
            return
        if is_ours(uid):
            self._connection = self._connect(
                write=self.write, close=self.close, backlog=transport.get_write_buffer_size
            )
            return
        structlog.get_logger("kvd.host.listen").warning(
            "refused a connection of another user", uid=uid
        )
        refusal = PermissionDenied("this daemon serves another user", uid=uid)
        self.write(encode_line(Error(id="", error=refusal.info())))
        self.close()

    def data_received(self, data: bytes) -> None:
        """Pass bytes to the actors; after `close`, read and drop them to notice the disconnect."""
        if self._connection is not None and not self._closing:
            self._connection.receive(data)

    def eof_received(self) -> bool:
        """Keep a half-closed connection for a moment, so that its answers are sent."""
        if self._closing or hung_up(self._transport.get_extra_info("socket")):
            return False
        self._call_later(_HALF_CLOSED_S, self._close_half_closed)
        return True

    def _close_half_closed(self) -> None:
        """Close the connection; abort it later if the client does not read."""
        self._transport.close()
        self._call_later(_LINGER_S, self._transport.abort)

    def _call_later(self, seconds: float, work: Callable[[], None]) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, work)

    def connection_lost(self, _: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.closed()

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """Close the connection after the client has read all buffered bytes, or `_LINGER_S`."""
        if self._closing or self._transport.is_closing():
            return
        self._closing = True
        # Closing at once would reset a client that still sends, and lose the buffered bytes.
        self._transport.write_eof()
        self._call_later(_LINGER_S, self._transport.abort)
