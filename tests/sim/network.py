"""Connections without sockets: bytes arrive late, in pieces, or not at all, but always in order."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

PEER, _OTHER_END = socket.socketpair(socket.AF_UNIX)
"""A connected socket that answers questions about the peer; nothing is sent through it."""


class Link:
    """One connection: a server's protocol at one end, a client at the other.

    ``received`` gets the server's bytes, and ``ended`` the end of the connection. The client may
    stop reading (`reads`), and cut the connection at any byte (`reset`).
    """

    def __init__(
        self,
        draw: random.Random,
        delay_s: Callable[[], float],
        protocol: asyncio.BaseProtocol,
        received: Callable[[bytes], None],
        ended: Callable[[], None],
    ) -> None:
        self._draw, self._delay_s = draw, delay_s
        self._loop = asyncio.get_running_loop()
        self._protocol: Any = protocol
        self._received, self._ended = received, ended
        self._reads = self.always_read = True
        self._arriving: deque[bytes] = deque()
        self._due = self._loop.time()
        """When the newest bytes from the client arrive."""
        self._buffer = bytearray()
        self.max_unread = 0
        """The most bytes that the client has left unread."""
        self._flushing: asyncio.TimerHandle | None = None
        self.open = True
        self.ended_well = False
        """Whether the server closed the connection and the client has read everything."""
        self.transport = SimTransport(self)
        protocol.connection_made(self.transport)

    # The client's end.

    def send(self, data: bytes) -> None:
        while data and self.open:
            size = len(data) if self._draw.random() < 0.8 else self._draw.randint(1, len(data))
            self._due = max(self._due, self._loop.time() + self._delay_s())
            self._arriving.append(data[:size])
            self._loop.call_at(self._due, self._arrive)
            data = data[size:]

    def reset(self) -> None:
        """End the connection. The client gets nothing more; the server notices later."""
        if self.open:
            self.open = False
            self._stop_flushing()
            self._loop.call_later(self._delay_s(), self._lose, ConnectionResetError("reset"))

    def read(self, *, on: bool) -> None:
        self._reads = on
        self.always_read = self.always_read and on
        self._schedule()

    def _arrive(self) -> None:
        # Timers of the same time fire in any order, but bytes must not change theirs.
        data = self._arriving.popleft()
        if self.open and not self.transport.is_closing():
            self._protocol.data_received(data)

    # The server's end.

    def write(self, data: bytes) -> None:
        self._buffer += data
        self.max_unread = max(self.max_unread, len(self._buffer))
        self._schedule()

    @property
    def unread(self) -> int:
        return len(self._buffer)

    def abort(self) -> None:
        """End the connection from the server's side; unread bytes are lost."""
        if self.open:
            self.open = False
            self._stop_flushing()
            self._loop.call_soon(self._lose, None)
            self._loop.call_soon(self._ended)

    def _stop_flushing(self) -> None:
        self._buffer.clear()
        if self._flushing is not None:
            self._flushing.cancel()
            self._flushing = None

    def _schedule(self) -> None:
        wanted = self._reads and (self._buffer or self.transport.ending)
        if wanted and self.open and self._flushing is None:
            self._flushing = self._loop.call_later(self._delay_s(), self._flush)

    def _flush(self) -> None:
        self._flushing = None
        if not self._reads:
            return
        size = len(self._buffer)
        if size and self._draw.random() < 0.2:
            size = self._draw.randint(1, size)
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        if data:
            self._received(data)
        self.transport.drained(len(self._buffer))
        if not self._buffer and self.transport.ending and self.open:
            self.open, self.ended_well = False, True
            self._ended()
            self._lose(None)
        self._schedule()

    def _lose(self, error: Exception | None) -> None:
        self.transport.closed = True
        self._protocol.connection_lost(error)


class SimTransport(asyncio.Transport):
    """The server's end of a `Link`."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link
        self._high = 64 * 1024
        self._paused = False
        self._reading = True
        self.ending = False
        """Whether the connection ends when the client has read everything."""
        self.closed = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return PEER if name == "socket" else default

    def is_closing(self) -> bool:
        return self.ending or self.closed or not self._link.open

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._link.open and not self.ending:
            self._link.write(bytes(data))
            if self._link.unread > self._high and not self._paused:
                self._paused = True
                self._link._protocol.pause_writing()

    def drained(self, left: int) -> None:
        if self._paused and left <= self._high // 4:
            self._paused = False
            self._link._protocol.resume_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def write_eof(self) -> None:
        self.close()

    def can_write_eof(self) -> bool:
        return True

    def close(self) -> None:
        if not self.ending:
            self.ending = True
            self._link._schedule()

    def abort(self) -> None:
        self._link.abort()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * 1024 if high is None else high

    def get_write_buffer_size(self) -> int:
        return self._link.unread

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True

    def is_reading(self) -> bool:
        return self._reading

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._link._protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._link._protocol


def same_user(_: object) -> int:
    """Return the user id of every peer."""
    return os.geteuid()
