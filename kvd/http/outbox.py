"""What a stream's client has not been sent yet: bounded bytes between the actors and a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Outbox:
    """Takes bytes at any time, gives them out together; too many unread ones end it.

    `behind` tells the bytes that the socket has and the kernel has not taken; `cut` ends the
    client's connection.
    """

    def __init__(self, limit: int, behind: Callable[[], int], cut: Callable[[], None]) -> None:
        self._limit = limit
        self._behind = behind
        self._cut = cut
        self._bytes = bytearray()
        self._news = asyncio.Event()
        self.over = False
        """Nothing more is put in."""

    @property
    def empty(self) -> bool:
        """Whether nothing waits."""
        return not self._bytes

    def put(self, data: bytes, *, last: bool = False) -> bool:
        """Add bytes; return false when the client reads so slowly that it was cut off."""
        self._bytes += data
        self._news.set()
        self.over = self.over or last
        if len(self._bytes) + self._behind() <= self._limit:
            return True
        self._bytes.clear()
        self.close()
        self._cut()
        return False

    def close(self) -> None:
        """Say that nothing more is put in."""
        self.over = True
        self._news.set()

    async def take(self, patience_s: float) -> bytes:
        """Return all that waits; nothing if nothing came for so long, or it is over."""
        if not self._bytes and not self.over:
            self._news.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._news.wait()
            except TimeoutError:
                return b""
        data = bytes(self._bytes)
        self._bytes.clear()
        return data
