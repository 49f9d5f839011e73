"""Detects clients that stop reading their answer, or disconnect unnoticed.

aiohttp does not notice a disconnect while the client's next request waits unread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import select
import socket
import struct
import sys
import termios
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from collections.abc import Iterator

    from aiohttp import web

_CHECK_EVERY_S = 1.0
_CLOSED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP  # macOS has one flag for both
_SO_NWRITE = 0x1024  # of macOS


@contextlib.contextmanager
def aborted_if_stalled(request: web.Request, timeout_s: float) -> Iterator[None]:
    """Abort a request's connection if its client disconnects, or reads nothing for the timeout.

    Within the block, a write returns only after the kernel has taken all bytes.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client has disconnected")
    transport.set_write_buffer_limits(high=0)
    watch = _Watch(request, transport, timeout_s)
    try:
        yield
    finally:
        watch.timer.cancel()


class _Watch:
    def __init__(
        self, request: web.Request, transport: asyncio.Transport, timeout_s: float
    ) -> None:
        self._request = request
        self._transport = transport
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._progress = (0, 0)
        """At the last check: bytes that the kernel had taken, and those not yet acknowledged."""
        self._since = self._loop.time()
        """When the progress last changed, or nothing was waiting."""
        self.timer = self._schedule()

    def _schedule(self) -> asyncio.TimerHandle:
        return self._loop.call_later(min(_CHECK_EVERY_S, self._timeout_s / 4), self._check)

    def _check(self) -> None:
        if self._transport.is_closing():
            return
        if not self._transport.is_reading() and _is_closed(self._transport):
            self._transport.abort()
            return
        waiting, now = self._transport.get_write_buffer_size(), self._loop.time()
        in_kernel = _unacknowledged(self._transport) if waiting else 0
        progress = (self._request.writer.output_size - waiting, in_kernel)
        if not waiting or progress != self._progress:
            self._progress, self._since = progress, now
        elif now - self._since >= self._timeout_s:
            structlog.get_logger("kvd.http").warning(
                "slow reader: a client stopped reading its answer and was disconnected",
                seconds=self._timeout_s,
                unread_bytes=waiting,
            )
            self._transport.abort()
            return
        self.timer = self._schedule()


def _is_closed(transport: asyncio.BaseTransport) -> bool:
    """Return whether the client has closed the connection, even if its data is unread."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _CLOSED)
    return any(events & _CLOSED for _, events in poll.poll(0))


def _unacknowledged(transport: asyncio.BaseTransport) -> int:
    """Return the bytes in the kernel's send queue, which can hold megabytes."""
    peer: socket.socket = transport.get_extra_info("socket")
    try:
        if sys.platform == "darwin":
            return peer.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        return int(struct.unpack("i", fcntl.ioctl(peer.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:  # disconnected; the transport is about to notice
        return 0
