"""Bytes of a stream that are not sent yet, bounded, between the actors and a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class SendBuffer:
    """Takes bytes at any time and returns them joined; too many unsent bytes end the stream.

    The limit excludes the largest piece: one piece can repeat the whole request or the whole
    answer, and a client that reads quickly has had no time for it yet. ``socket_backlog`` returns
    the bytes in the transport; ``abort`` closes the connection.
    """

    def __init__(
        self, limit: int, socket_backlog: Callable[[], int], abort: Callable[[], None]
    ) -> None:
        self._limit = limit
        self._largest = 0
        """Bytes of the largest piece so far."""
        self._socket_backlog = socket_backlog
        self._abort = abort
        self._bytes = bytearray()
        self._changed = asyncio.Event()
        self.over = False
        """No more bytes follow."""

    @property
    def empty(self) -> bool:
        return not self._bytes

    def put(self, data: bytes, *, last: bool = False) -> bool:
        """Add bytes; return False if the client read too slowly and was disconnected."""
        self._bytes += data
        self._changed.set()
        self.over = self.over or last
        self._largest = max(self._largest, len(data))
        if len(self._bytes) + self._socket_backlog() <= self._limit + self._largest:
            return True
        self._bytes.clear()
        self.close()
        self._abort()
        return False

    def close(self) -> None:
        self.over = True
        self._changed.set()

    async def take(self, timeout_s: float) -> bytes:
        """Return all waiting bytes; empty after the timeout or the end."""
        if not self._bytes and not self.over:
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                return b""
        data = bytes(self._bytes)
        self._bytes.clear()
        return data
