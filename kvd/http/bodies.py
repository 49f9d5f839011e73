"""The bodies that are being read: each bounded, and all of them together.

A body counts with what has come of it until it has been read; then it is a request, and those are
bounded by the queue. TCP and `http.sock` each have their own bound.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from aiohttp import HttpVersion11

from kvd.http import errors
from protocol.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from aiohttp import web

MOST_BYTES = 128 * 1024 * 1024
"""Of all that come by one kind of door, without what is free."""
FREE_BYTES = 64 * 1024
"""The first ones of each body: a small request is read, however many large ones come in."""


class Bodies:
    """Reads bodies; `limit` is that of one, `patience_s` how long it may take to come."""

    def __init__(self, limit: int, patience_s: float) -> None:
        self._limit = limit
        self._patience_s = patience_s
        self._held = {True: 0, False: 0}
        """Bytes that count, of Unix sockets and of the others."""

    async def read(self, request: web.Request) -> bytearray:
        """Return a request's body; raises `Refusal` or `Overloaded`."""
        coding = request.headers.get("Content-Encoding", "identity")
        if coding.strip().lower() != "identity":
            raise errors.encoded(coding)
        told = request.content_length
        if told is not None and told > self._limit:
            raise errors.too_large(self._limit)
        await _expect(request)
        body = bytearray()
        with self._counted(is_unix=_is_unix(request)) as hold:
            try:
                async with asyncio.timeout(self._patience_s):
                    while piece := await request.content.readany():
                        body += piece
                        if len(body) > self._limit:
                            raise errors.too_large(self._limit)
                        hold(len(body) - FREE_BYTES)
            except TimeoutError:
                raise errors.too_slow(self._patience_s) from None
        return body

    @contextlib.contextmanager
    def _counted(self, *, is_unix: bool) -> Iterator[Callable[[int], None]]:
        """Give what to call with the bytes that one body holds by now."""
        mine = 0

        def hold(size: int) -> None:
            nonlocal mine
            more = max(0, size) - mine
            if self._held[is_unix] + more > MOST_BYTES:
                raise Overloaded("too many large requests come in at once", retry_after_s=1.0)
            self._held[is_unix] += more
            mine += more

        try:
            yield hold
        finally:
            self._held[is_unix] -= mine


async def _expect(request: web.Request) -> None:
    """Tell a client that waits for the word to send its body; nothing else can be expected."""
    expected = request.headers.get("Expect", "").strip().lower()
    if expected == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # for the library nothing is sent yet


def _is_unix(request: web.Request) -> bool:
    transport = request.transport
    return transport is not None and isinstance(transport.get_extra_info("sockname"), str)
