"""Reads request bodies under two limits: per body, and for all bodies being read.

TCP and `http.sock` have separate limits. The queue bounds complete requests.
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
"""Limit for all bodies being read over one kind of socket, without `FREE_BYTES` of each."""
FREE_BYTES = 64 * 1024
"""The first bytes of each body do not count, so that small requests pass at any load."""


class Bodies:
    """Reads bodies; ``limit`` and ``timeout_s`` apply to each."""

    def __init__(self, limit: int, timeout_s: float) -> None:
        self._limit = limit
        self._timeout_s = timeout_s
        self._held = {True: 0, False: 0}
        """Counted bytes: of Unix sockets (True) and of TCP (False)."""

    async def read(self, request: web.Request) -> bytearray:
        """Return a request's body; raises `Refusal` or `Overloaded`."""
        coding = ", ".join(request.headers.getall("Content-Encoding", ["identity"]))
        if coding.strip().lower() != "identity":
            raise errors.encoded(coding)
        announced = request.content_length
        if announced is not None and announced > self._limit:
            raise errors.too_large(self._limit)
        await _expect(request)
        body = bytearray()
        with self._counted(is_unix=_is_unix(request)) as hold:
            try:
                async with asyncio.timeout(self._timeout_s):
                    while piece := await request.content.readany():
                        body += piece
                        if len(body) > self._limit:
                            raise errors.too_large(self._limit)
                        hold(len(body) - FREE_BYTES)
            except TimeoutError:
                raise errors.too_slow(self._timeout_s) from None
        return body

    @contextlib.contextmanager
    def _counted(self, *, is_unix: bool) -> Iterator[Callable[[int], None]]:
        """Yield a function that sets the counted bytes of one body."""
        counted = 0

        def hold(size: int) -> None:
            nonlocal counted
            more = max(0, size) - counted
            if self._held[is_unix] + more > MOST_BYTES:
                raise Overloaded("too many large requests arrive at once", retry_after_s=1.0)
            self._held[is_unix] += more
            counted += more

        try:
            yield hold
        finally:
            self._held[is_unix] -= counted


async def expect_later(_: web.Request) -> None:
    """Send no ``100 Continue`` before access is checked: a route's ``expect_handler``."""


async def _expect(request: web.Request) -> None:
    """Send ``100 Continue`` if the client waits for it before it sends the body."""
    expected = request.headers.get("Expect", "").strip().lower()
    if expected == "100-continue" and request.version >= HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # aiohttp must not count it as part of the answer


def _is_unix(request: web.Request) -> bool:
    transport = request.transport
    return transport is not None and isinstance(transport.get_extra_info("sockname"), str)
