"""The server: connections on the doors, the guard before the routes, one form for all errors."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from functools import partial
from typing import TYPE_CHECKING

import structlog
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

import kvd
from kvd.host import files, listen
from kvd.http import errors
from kvd.http.bodies import Bodies
from kvd.http.guard import Guard
from kvd.http.progress import watched
from kvd.http.routes import OPEN_PATHS, Routes
from protocol.errors import InternalError, KvdError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvd.config.http import HttpSettings
    from kvd.http.listeners import Door
    from kvd.http.port import Answered, Backend, Metrics

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MOST_CONNECTIONS = 2048
"""By each door, so that strangers at one do not close the other; each takes some 20 KiB."""
_SHARE_OF_FILES = 4
"""And at most a fourth of the files that the daemon may open: its other sockets need some too."""
_COMING_S = 1.0
"""How long an accepted connection may take to be known; it may also be gone by then."""
_FAREWELL_S = 1.0
"""How long the last answers may take to be written when the daemon ends."""
_LINGER_S = 2.0
"""How long a client that is still sending may take to read why it was refused."""
_LONGEST_ECHO = 100
"""Characters of a path that an error shows."""
_ID = "x-request-id"
_NUMBER = web.RequestKey("number", str)
"""What the answer and the log call a request by."""
_PAGE = web.RequestKey("page", str)
"""The origin whose page may read the answer, if one asks."""
_OWNER = web.RequestKey("owner", str)
"""The name of its API key."""
_BEGUN = web.RequestKey("begun", bool)
"""The answer's status line is written: no other answer can follow."""

_log = structlog.get_logger("kvd.http")


class Server:
    """HTTP on some doors: `start`, and `close` when the daemon's actors have ended."""

    def __init__(
        self,
        backend: Backend,
        settings: HttpSettings,
        doors: Sequence[Door],
        *,
        unread_limit: int,
        metrics: Metrics | None = None,
        answered: Answered = lambda _path, _status: None,
        starting: Callable[[], bool] = lambda: False,
        uid_of: Callable[[socket.socket], int] = listen.peer_uid,
    ) -> None:
        self._settings = settings
        self._doors = doors
        self._guard = Guard(settings)
        self._uid_of = uid_of
        self._answered = answered
        bodies = Bodies(settings.body_bytes, settings.idle_timeout_s)
        routes = Routes(
            backend, bodies, metrics, starting, unread_limit, started_at=int(time.time())
        )
        app = web.Application(middlewares=[self._deliver, self._answer_for, self._admit])
        app.add_routes(routes.table())
        app.on_response_prepare.append(_complete)
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            access_log=None,
            logger=_Faults(),
            handler_cancellation=True,
            keepalive_timeout=settings.idle_timeout_s,
            lingering_time=_LINGER_S,
            shutdown_timeout=_FAREWELL_S / 2,  # the library waits for it twice
            auto_decompress=False,  # nobody would count what comes out
        )
        self._servers: list[asyncio.Server] = []
        self._coming: list[tuple[float, Door, asyncio.BaseProtocol]] = []
        """Connections that were accepted, when and by which door."""

    async def start(self) -> None:
        """Accept clients."""
        await self._runner.setup()
        for door in self._doors:
            connected = partial(self._connected, door)
            self._servers.append(await listen.accept(door.listener, connected))

    def admit(self, settings: HttpSettings) -> None:
        """Let its keys, hosts and origins hold for the next requests."""
        self._guard = Guard(settings)

    async def close(self) -> None:
        """Accept nobody, let the last answers go out for a moment, and end all connections."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()

    def _connected(self, door: Door) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None, "start first"
        most = min(MOST_CONNECTIONS, files.limit() // _SHARE_OF_FILES)
        known = server.connections
        coming = self._coming_by(door, known)
        if len(known) + coming >= most:
            here = _place(door.listener.getsockname())
            if sum(_place(other.sockname) == here for other in known) + coming >= most:
                _log.warning("too many connections", most=most, address=door.address)
                return _Full()
        protocol = server()
        self._coming.append((time.monotonic(), door, protocol))
        return protocol

    def _coming_by(self, door: Door, known: list[web.RequestHandler]) -> int:
        """Return how many were accepted and are not known yet: many may come at once."""
        there, now = set(map(id, known)), time.monotonic()
        self._coming = [
            one for one in self._coming if id(one[2]) not in there and now - one[0] < _COMING_S
        ]
        return sum(one[1] is door for one in self._coming)

    # -- around every handler ---------------------------------------------------------------------

    @web.middleware
    async def _deliver(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """See to it that the client takes its answer."""
        with watched(request, self._settings.idle_timeout_s):
            response = await handler(request)
            await response.prepare(request)
            await response.write_eof()
        return response

    @web.middleware
    async def _answer_for(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answer errors in OpenAI's form, and note what was asked."""
        number = request[_NUMBER] = f"req_{secrets.token_hex(8)}"
        began = time.monotonic()
        try:
            response = await handler(request)
        except errors.Refusal as refusal:
            response = _refused(refusal)
        except KvdError as error:
            response = _refused(errors.of(error.info()))
        except web.HTTPException as found:
            response = _refused(errors.plain(found.status, _explained(request, found)))
            if "Allow" in found.headers:
                response.headers["Allow"] = found.headers["Allow"]
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001 - a bug costs the request that found it
            _log.exception("a handler failed", path=request.path, request=number)
            if request.get(_BEGUN):
                raise ConnectionResetError("the stream cannot go on") from None
            failed = InternalError("kvd failed in this request; its log has the reason")
            response = _refused(errors.of(failed.info()))
        self._answered(_path(request), response.status)
        _log.debug(
            "http",
            method=request.method,
            path=request.path,
            status=response.status,
            key=request.get(_OWNER),
            seconds=round(time.monotonic() - began, 3),
        )
        return response

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Let in whom the guard lets in; by the Unix socket the kernel says who it is."""
        uid = self._uid(request)
        if uid is not None:
            if not listen.is_ours(uid):
                _log.warning("another user was refused", uid=uid)
                raise errors.forbidden("this daemon serves another user", "permission_denied")
            return await handler(request)
        host = request.headers.get("Host")
        self._guard.check_host(host)
        page = self._guard.check_origin(request.headers.get("Origin"), host)
        if page is not None:
            request[_PAGE] = page
        if request.method == "OPTIONS" and page is not None:
            return _preflight(request)
        if request.path not in OPEN_PATHS:
            owner = self._guard.check_key(request.headers.get("Authorization"))
            if owner is not None:
                request[_OWNER] = owner
        return await handler(request)

    def _uid(self, request: web.Request) -> int | None:
        """Return the user on the other end, or None where it came by TCP."""
        transport = request.transport
        peer = None if transport is None else transport.get_extra_info("socket")
        if peer is None:
            raise ConnectionResetError("the client is gone")
        return self._uid_of(peer) if peer.family == socket.AF_UNIX else None


def _place(name: tuple[str, int] | tuple[str, int, int, int] | str | None) -> str | int | None:
    """Return which door a socket's own name is of: a path, or a port."""
    return name[1] if isinstance(name, tuple) else name


def _path(request: web.Request) -> str:
    """Return the path of a request's route, which are few; clients may ask for any."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


async def _complete(request: web.Request, response: web.StreamResponse) -> None:
    """Add what every answer has, also a stream, before its headers go out."""
    request[_BEGUN] = True
    if (number := request.get(_NUMBER)) is not None:  # else the library refused it by itself
        response.headers[_ID] = number
    response.headers["Server"] = f"kvd/{kvd.__version__}"
    if (page := request.get(_PAGE)) is not None:
        response.headers["Access-Control-Allow-Origin"] = page
        response.headers["Access-Control-Expose-Headers"] = _ID
        response.headers["Vary"] = "Origin"


def _explained(request: web.Request, found: web.HTTPException) -> str:
    """Return what somebody who mistook the address should read."""
    path = request.path[:_LONGEST_ECHO]
    if found.status == 405:
        return f"{request.method} is not for {path}; {found.headers.get('Allow', 'nothing')} is"
    if found.status != 404:
        return found.reason
    known = {route.resource.canonical for route in request.app.router.routes() if route.resource}
    hint = f"did you mean /v1{path}?" if f"/v1{path}" in known else "OpenAI's API is at /v1"
    return f"there is nothing at {path}; {hint}"


def _refused(refusal: errors.Refusal) -> web.Response:
    response = web.Response(
        body=refusal.encoded(),
        status=refusal.status,
        headers=refusal.headers,
        content_type="application/json",
    )
    if refusal.final:
        response.force_close()
    return response


def _preflight(request: web.Request) -> web.Response:
    """Let a page that may use us send what it is about to send."""
    wanted = request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type")
    headers = {
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": wanted,
        "Access-Control-Max-Age": "600",
    }
    if "Access-Control-Request-Private-Network" in request.headers:  # a public page asks a local us
        headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)


class _Full(asyncio.Protocol):
    """Turns a connection away."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Say so, and close."""
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n")
        transport.write(b"Connection: close\r\nContent-Length: 0\r\n\r\n")
        transport.close()


class _Faults:
    """The library's log: what strangers send is no fault of ours."""

    def exception(self, message: str, *arguments: object, exc_info: object = None) -> None:
        """Log a fault; what clients do to themselves only for those who look closely."""
        if isinstance(exc_info, HttpProcessingError):
            _log.debug("not HTTP", reason=exc_info.message)
        elif isinstance(exc_info, ConnectionError):
            _log.debug("a client went away", reason=str(exc_info))
        else:
            _log.error(message % arguments, exc_info=exc_info)

    def debug(self, message: str, *arguments: object, exc_info: object = None) -> None:
        """Log what is of interest to the library's own people: not at all."""

    warning = debug
