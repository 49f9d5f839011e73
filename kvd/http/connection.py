"""HTTP connections, where errors that aiohttp answers by itself become OpenAI's error objects."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

import kvd
from kvd.http import error_forms, errors
from protocol.errors import Overloaded

if TYPE_CHECKING:
    from kvd.http.errors import Refusal

SERVER = f"kvd/{kvd.__version__}"
_JSON = "application/json"
_LINGER_S = 2.0
"""Seconds for a client that still sends to read why it was refused."""

_log = structlog.get_logger("kvd.http")


def refused(refusal: Refusal, path: str = "", request_id: str = "") -> web.Response:
    """Return the answer to a request, in the form of the API to which its path belongs."""
    status, body = error_forms.encoded(refusal, path, request_id)
    response = web.Response(
        body=body,
        status=status,
        headers=refusal.headers,
        content_type=_JSON,
    )
    if refusal.final:
        response.force_close()
    return response


class Connection(web.RequestHandler):
    """A connection whose every error has OpenAI's form.

    No handler sees bytes that aiohttp cannot parse, or an ``Expect`` header that it does not know.
    """

    __slots__ = ()

    def __init__(self, server: web.Server, idle_timeout_s: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # aiohttp checks for it
            logger=_LibraryLog(),  # type: ignore[arg-type]  # has the methods that aiohttp calls
            keepalive_timeout=idle_timeout_s,
            lingering_time=_LINGER_S,
            auto_decompress=False,  # the size after decompression would be unbounded
        )

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if resp.status >= 400 and not resp.prepared and resp.content_type != _JSON:
            text = resp.text if isinstance(resp, web.Response) else None
            reason = " ".join((text or resp.reason).split()).removesuffix(" ^")
            answer = refused(errors.plain(resp.status, f"HTTP error: {reason}"))
            answer.headers["Server"] = SERVER
            answer.force_close()
            resp = answer
        return await super().finish_response(request, resp, start_time)


class FullConnection(asyncio.Protocol):
    """Answers a connection above the limit with 503 and closes it."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        error = Overloaded("too many connections; close some, or retry later")
        body = errors.of(error.info()).encoded()
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
            f"Content-Type: {_JSON}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        transport.write(head.encode() + body)
        transport.close()


class _LibraryLog:
    """aiohttp's log. Errors that clients cause are logged at debug level."""

    def exception(self, message: str, *arguments: object, exc_info: object = None) -> None:
        if isinstance(exc_info, HttpProcessingError):
            _log.debug("malformed HTTP request", reason=exc_info.message)
        elif isinstance(exc_info, ConnectionError):
            _log.debug("client disconnected", reason=str(exc_info))
        else:
            _log.error(message % arguments, exc_info=exc_info)

    def debug(self, message: str, *arguments: object, exc_info: object = None) -> None:
        """Drop messages for aiohttp's own developers."""

    warning = debug
