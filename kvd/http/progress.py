"""Clients that take nothing of what was written for them, or are gone without being noticed.

Whether one is gone is not seen while its next request waits unread.
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

_LOOK_S = 1.0
_CLOSED = getattr(select, "POLLRDHUP", 0) | select.POLLHUP  # macOS has one for both
_SO_NWRITE = 0x1024
"""Of macOS."""


@contextlib.contextmanager
def watched(request: web.Request, patience_s: float) -> Iterator[None]:
    """End a request's connection if its client takes nothing of the answer for so long, or is gone.

    Within the block a write waits until the kernel has everything, so that nothing is left behind.
    """
    transport = request.transport
    if transport is None:
        raise ConnectionResetError("the client is gone")
    transport.set_write_buffer_limits(high=0)
    watch = _Watch(request, transport, patience_s)
    try:
        yield
    finally:
        watch.end()


class _Watch:
    def __init__(
        self, request: web.Request, transport: asyncio.Transport, patience_s: float
    ) -> None:
        self._request = request
        self._transport = transport
        self._patience_s = patience_s
        self._loop = asyncio.get_running_loop()
        self._before = (0, 0)
        """Bytes that the kernel had taken at the last look, and those that it still had."""
        self._since = self._loop.time()
        """When that was something else, or nothing waited."""
        self._timer = self._later()

    def end(self) -> None:
        self._timer.cancel()

    def _later(self) -> asyncio.TimerHandle:
        return self._loop.call_later(min(_LOOK_S, self._patience_s / 4), self._look)

    def _look(self) -> None:
        if self._transport.is_closing():
            return
        if not self._transport.is_reading() and _is_gone(self._transport):
            self._transport.abort()
            return
        waiting, now = self._transport.get_write_buffer_size(), self._loop.time()
        coming = _on_its_way(self._transport) if waiting else 0
        state = (self._request.writer.output_size - waiting, coming)
        if not waiting or state != self._before:
            self._before, self._since = state, now
        elif now - self._since >= self._patience_s:
            structlog.get_logger("kvd.http").warning(
                "slow reader: a client took nothing of its answer for too long, which was ended",
                seconds=self._patience_s,
                unread_bytes=waiting,
            )
            self._transport.abort()
            return
        self._timer = self._later()


def _is_gone(transport: asyncio.BaseTransport) -> bool:
    """Return whether the other end is closed, whatever it sent before that is still unread."""
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), _CLOSED)
    return any(events & _CLOSED for _, events in poll.poll(0))


def _on_its_way(transport: asyncio.BaseTransport) -> int:
    """Return how much the kernel has that the other end has not: it takes megabytes at a time."""
    peer: socket.socket = transport.get_extra_info("socket")
    try:
        if sys.platform == "darwin":
            return peer.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        return int(struct.unpack("i", fcntl.ioctl(peer.fileno(), termios.TIOCOUTQ, bytes(4)))[0])
    except OSError:  # it is gone, which the transport is about to notice
        return 0
