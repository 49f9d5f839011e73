"""The bodies that are being read: each bounded, and all of them together.

A body counts from its headers until it has been read; then it is a request, and those are bounded
by the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from aiohttp import web

from kvd.http import errors
from protocol.errors import Overloaded

if TYPE_CHECKING:
    from collections.abc import Iterator

MOST_BYTES = 128 * 1024 * 1024
"""Of all; a body whose length is not told counts as the longest one."""


class Bodies:
    """Reads bodies; `limit` is that of one, `patience_s` how long it may take to come."""

    def __init__(self, limit: int, patience_s: float) -> None:
        self._limit = limit
        self._patience_s = patience_s
        self._coming = 0

    async def read(self, request: web.Request) -> bytes:
        """Return a request's body; raises `Refusal` or `Overloaded`."""
        told = request.content_length
        if told is not None and told > self._limit:
            raise errors.too_large(self._limit)
        with self._counted(self._limit if told is None else told):
            try:
                async with asyncio.timeout(self._patience_s):
                    return await request.read()
            except web.HTTPRequestEntityTooLarge:
                raise errors.too_large(self._limit) from None
            except TimeoutError:
                raise errors.too_slow(self._patience_s) from None

    @contextlib.contextmanager
    def _counted(self, size: int) -> Iterator[None]:
        if self._coming + size > MOST_BYTES:
            raise Overloaded("too many large requests come in at once", retry_after_s=1.0)
        self._coming += size
        try:
            yield
        finally:
            self._coming -= size
