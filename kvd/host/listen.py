"""The Unix socket: lock, bind, accept, and bytes between a client and its `Connection`.

The lock comes first and is held for life: binding alone would silently take a live daemon's
socket away. Knows nothing of messages, except for the one that turns another user away.
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
"""Clients that may come at once: asyncio takes a connect that finds no room for one that worked."""
_FAREWELL_S = 0.5
"""How long the answers to a client may take that has said its last word (`nc -N`)."""
_LINGER_S = 2.0
"""How long a connection that we end may take to read its last lines."""


@contextlib.contextmanager
def hold_lock(home: Home) -> Iterator[None]:
    """Hold the home for this process, or raise `AlreadyRunning` with the holder's pid."""
    try:
        fd = os.open(home.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise unusable(home.lock, error) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 32).decode("ascii", "replace").strip() or "unknown"
            raise AlreadyRunning(
                f"a daemon (pid {holder}) already serves {home.root}; stop it with "
                "`kvctl shutdown`, or give this one another home with --home",
                pid=holder,
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"{os.getpid()}\n".encode())
        yield
    finally:
        os.close(fd)


def holder(home: Home) -> int | None:
    """Return who holds the home, None if nobody does."""
    try:
        with home.lock.open("rb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                said = lock.read(32).strip()
                return int(said) if said.isdigit() else 0
    except OSError:
        pass
    return None


def bind(path: Path) -> socket.socket:
    """Return a listening socket, mode 0600. The caller holds the home's lock.

    A socket that lies there is therefore a dead daemon's, or the service manager's own.
    """
    check_socket_path(path)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ConfigError(f"{path} is in the way and no socket; move it", key="home")
        if _is_open(path):
            raise ConfigError(
                f"somebody listens on {path} already: the service manager, if this home has a "
                "service; then `kvctl service stop` comes first",
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
    """Return whether anybody has this socket open, without waking who waits for its clients.

    A connect of another kind never arrives; whether nobody is there is looked at before the kind.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        try:
            other.connect(str(path))
        except OSError as error:
            return error.errno == errno.EPROTOTYPE
    return True


def peer_uid(peer: socket.socket) -> int:
    """Return the user on the other end, as the kernel knows it; `ConnectionError`: nobody is there.

    Linux remembers who it was.
    """
    if sys.platform == "darwin":
        # struct xucred: version, uid, count of groups and 16 groups; LOCAL_PEERCRED of SOL_LOCAL.
        try:
            credentials = peer.getsockopt(0, 1, 76)
        except OSError as error:  # ENOTCONN
            raise ConnectionResetError("the client is gone") from error
        return int(struct.unpack_from("II", credentials)[1])
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[1])


def is_ours(uid: int) -> bool:
    """Return whether this user may talk to the daemon; root could become us anyway."""
    return uid in {os.geteuid(), 0}


def hung_up(peer: socket.socket) -> bool:
    """Return whether the other end is closed for good, and not just for writing."""
    poll = select.poll()
    poll.register(peer.fileno(), 0)
    return any(events & select.POLLHUP for _, events in poll.poll(0))


class Conversation(Protocol):
    """What `actors.system.Connection` is to a socket."""

    def receive(self, data: bytes) -> None:
        """Take bytes that the client sent."""
        ...

    def closed(self) -> None:
        """Take note that the client is gone."""
        ...


class Connect(Protocol):
    """`actors.system.System.connect`."""

    def __call__(
        self,
        *,
        write: Callable[[bytes], None],
        close: Callable[[], None],
        backlog: Callable[[], int],
    ) -> Conversation:
        """Take a new client."""
        ...


async def serve(listener: socket.socket, connect: Connect) -> asyncio.Server:
    """Accept clients until the server is closed."""
    return await accept(listener, lambda: ClientPort(connect))


async def accept(
    listener: socket.socket, connected: Callable[[], asyncio.BaseProtocol]
) -> asyncio.Server:
    """Accept connections; the path of a Unix socket stays: it may be the service manager's."""
    loop = asyncio.get_running_loop()
    if listener.family != socket.AF_UNIX:
        return await loop.create_server(connected, sock=listener, backlog=BACKLOG)
    if sys.version_info >= (3, 13):
        server = await loop.create_unix_server(
            connected, sock=listener, backlog=BACKLOG, cleanup_socket=False
        )
    else:
        server = await loop.create_unix_server(connected, sock=listener, backlog=BACKLOG)
    return server


class ClientPort(asyncio.Protocol):
    """One client's socket."""

    def __init__(self, connect: Connect, uid_of: Callable[[socket.socket], int] = peer_uid) -> None:
        self._connect = connect
        self._uid_of = uid_of
        self._conversation: Conversation | None = None
        self._closing = False
        self._cut: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Check who it is, and hand the client to the actors."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        try:
            uid = self._uid_of(transport.get_extra_info("socket"))
        except ConnectionError:
            transport.abort()
            return
        if is_ours(uid):
            self._conversation = self._connect(
                write=self.write, close=self.close, backlog=transport.get_write_buffer_size
            )
            return
        structlog.get_logger("kvd.host.listen").warning("another user was refused", uid=uid)
        refusal = PermissionDenied("this daemon serves another user", uid=uid)
        self.write(encode_line(Error(id="", error=refusal.info())))
        self.close()

    def data_received(self, data: bytes) -> None:
        """Pass bytes on; those after the end are read and dropped, so that it can be seen."""
        if self._conversation is not None and not self._closing:
            self._conversation.receive(data)

    def eof_received(self) -> bool:
        """Stay for a moment if the client still reads; what it waits for may be on its way."""
        if self._closing or hung_up(self._transport.get_extra_info("socket")):
            return False
        loop = asyncio.get_running_loop()
        self._cut = loop.call_later(_FAREWELL_S, self._part)
        return True

    def _part(self) -> None:
        """End a connection whose client writes no more; it may not read either."""
        self._transport.close()
        loop = asyncio.get_running_loop()
        self._cut = loop.call_later(_LINGER_S, self._transport.abort)

    def connection_lost(self, _: Exception | None) -> None:
        """Tell the actors; also after an end of ours."""
        if self._cut is not None:
            self._cut.cancel()
        if self._conversation is not None:
            self._conversation.closed()

    def write(self, data: bytes) -> None:
        """Buffer bytes for the client."""
        if not self._transport.is_closing():
            self._transport.write(data)

    def close(self) -> None:
        """End the connection once the client has read what is buffered, or after a while."""
        if self._closing or self._transport.is_closing():
            return
        self._closing = True
        # Closing at once would reset a client that is still sending, and lose our last words.
        self._transport.write_eof()
        loop = asyncio.get_running_loop()
        self._cut = loop.call_later(_LINGER_S, self._transport.abort)
