"""The HTTP server: accepts connections, checks access before the routes, and encodes all errors."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from functools import partial
from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from kvd.host import files, listen
from kvd.http import errors
from kvd.http.bodies import Bodies
from kvd.http.connection import SERVER, Connection, FullConnection, refused
from kvd.http.delivery import Delivery
from kvd.http.error_forms import form_path
from kvd.http.guard import Guard, single
from kvd.http.messages_api.fitting import Fitting
from kvd.http.messages_api.routes import MessagesRoutes
from kvd.http.ollama_api.routes import OllamaRoutes
from kvd.http.request_keys import OWNER, REQUEST_ID
from kvd.http.responses_api.routes import ResponsesRoutes
from kvd.http.responses_api.store import Store
from kvd.http.routes import OPEN_PATHS, Routes
from kvd.http.stalled import aborted_if_stalled
from kvd.http.ui.routes import UiRoutes
from kvd.http.ui.stream import Streams
from kvd.http.unknown_fields import UnknownFields
from protocol.errors import InternalError, KvdError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvd.config.http import HttpSettings
    from kvd.http.backend import Answered, Backend, Ignored, Metrics
    from kvd.http.listeners import Listener
    from kvd.http.ui.control import Control

    Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MOST_CONNECTIONS = 2048
"""Limit per listener, so that a flood on one does not block the other; 20 KiB per connection."""
_SHARE_OF_FILES = 4
"""Connections use at most a fourth of the daemon's file limit, which its other sockets share."""
_OPENING_S = 1.0
"""Seconds until an accepted connection appears in aiohttp's list, or has already ended."""
_SHUTDOWN_S = 1.0
"""Seconds to send the last answers when the daemon ends."""
_ID_HEADERS = ("x-request-id", "request-id")
"""Headers with the request's id, of OpenAI's and of Anthropic's clients."""
_ORIGIN = web.RequestKey("origin", str)
"""The foreign origin whose page may read the answer."""
_BEGUN = web.RequestKey("begun", bool)
"""The status line is sent, so no other answer can follow."""

_log = structlog.get_logger("kvd.http")


class Server:
    """HTTP on the given listeners: `start` it, and `close` it after the daemon's actors end."""

    def __init__(
        self,
        backend: Backend,
        settings: HttpSettings,
        listeners: Sequence[Listener],
        *,
        unread_limit: int,
        control: Control | None = None,
        metrics: Metrics | None = None,
        answered: Answered = lambda _path, _status: None,
        ignored: Ignored = lambda _path, _what, _count: None,
        record: Callable[[str], None] = lambda _text: None,
        starting: Callable[[], bool] = lambda: False,
        uid_of: Callable[[socket.socket], int] = listen.peer_uid,
    ) -> None:
        """``control``: for the web page; without it, or with ``ui = false``, there is no page.

        ``record`` adds a text about an ignored field to the event log.
        """
        self._settings = settings
        self._listeners = listeners
        self._guard = Guard(settings)
        self._uid_of = uid_of
        self._answered = answered
        bodies = Bodies(settings.body_bytes, settings.idle_timeout_s)
        delivery = Delivery(backend, unread_limit)
        started_at = int(time.time())
        self.ui = None
        if control is not None and settings.ui:
            self.ui = UiRoutes(control, bodies, Streams(control, self._is_allowed))
        page = self.ui is not None
        unknown = UnknownFields(ignored, record)
        routes = Routes(backend, bodies, metrics, starting, delivery, unknown, started_at, page)
        app = web.Application(middlewares=[self._deliver, self._handle_errors, self._check_access])
        app.add_routes(routes.table())
        responses = ResponsesRoutes(bodies, delivery, Store(time.monotonic), ignored, unknown)
        app.add_routes(responses.table())
        fitting = Delivery(Fitting(backend), unread_limit)
        app.add_routes(MessagesRoutes(backend, bodies, fitting, unknown).table())
        app.add_routes(OllamaRoutes(backend, bodies, delivery, unknown, started_at).table())
        if self.ui is not None:
            app.add_routes(self.ui.table())
            app.on_shutdown.append(self.ui.streams.close)
        app.on_response_prepare.append(_add_headers)
        self._runner = web.AppRunner(
            app,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=_SHUTDOWN_S / 2,  # aiohttp waits for it twice
        )
        self._servers: list[asyncio.Server] = []
        self._opening: list[tuple[float, Listener, asyncio.BaseProtocol]] = []
        """Accepted connections that aiohttp may not list yet, with the time and the listener."""

    async def start(self) -> None:
        await self._runner.setup()
        for listener in self._listeners:
            connected = partial(self._connected, listener)
            self._servers.append(await listen.accept(listener.socket, connected))

    def apply(self, settings: HttpSettings) -> None:
        """Use these keys, hosts and origins for all further requests."""
        self._guard = Guard(settings)

    async def close(self) -> None:
        """Stop accepting, send the last answers, and end all connections."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()

    def _connected(self, listener: Listener) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None, "start first"
        most = min(MOST_CONNECTIONS, files.limit() // _SHARE_OF_FILES)
        listed = server.connections
        opening = self._count_opening(listener, listed)
        if len(listed) + opening >= most:
            here = _local_end(listener.socket.getsockname())
            if sum(_local_end(other.sockname) == here for other in listed) + opening >= most:
                _log.warning("too many connections", most=most, address=listener.address)
                return FullConnection()
        protocol = Connection(server, self._settings.idle_timeout_s)
        self._opening.append((time.monotonic(), listener, protocol))
        return protocol

    def _count_opening(self, listener: Listener, listed: list[web.RequestHandler]) -> int:
        """Return how many connections of a listener are accepted and not listed yet."""
        ids, now = set(map(id, listed)), time.monotonic()
        self._opening = [
            (accepted_at, accepted_by, protocol)
            for accepted_at, accepted_by, protocol in self._opening
            if id(protocol) not in ids and now - accepted_at < _OPENING_S
        ]
        return sum(accepted_by is listener for _, accepted_by, _ in self._opening)

    @web.middleware
    async def _deliver(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Send the answer, and abort the connection if the client does not read it."""
        with aborted_if_stalled(request, self._settings.idle_timeout_s):
            response = await handler(request)
            await response.prepare(request)
            await response.write_eof()
        return response

    @web.middleware
    async def _handle_errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn errors into OpenAI's error objects, and log the request."""
        request_id = request[REQUEST_ID] = f"req_{secrets.token_hex(8)}"
        began = time.monotonic()
        path = form_path(request.path, request.headers)
        answer = partial(refused, path=path, request_id=request_id)
        try:
            response = await handler(request)
        except errors.Refusal as refusal:
            response = answer(refusal)
        except KvdError as error:
            response = answer(errors.of(error.info()))
        except web.HTTPException as found:
            response = answer(errors.plain(found.status, _explained(request, found)))
            if "Allow" in found.headers:
                response.headers["Allow"] = found.headers["Allow"]
        except ConnectionError:
            raise
        except Exception:  # noqa: BLE001 - a bug ends only the request that triggers it
            _log.exception("request handler failed", path=request.path, request=request_id)
            if request.get(_BEGUN):
                raise ConnectionResetError("the stream cannot continue") from None
            failed = InternalError("internal error; the daemon's log has the reason")
            response = answer(errors.of(failed.info()))
        self._answered(_route_path(request), response.status)
        _log.debug(
            "http",
            method=request.method,
            path=request.path,
            status=response.status,
            key=request.get(OWNER),
            seconds=round(time.monotonic() - began, 3),
        )
        return response

    @web.middleware
    async def _check_access(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the user on Unix sockets; check host, origin and API key on TCP."""
        uid = self._uid(request)
        if uid is not None:
            if not listen.is_ours(uid):
                _log.warning("refused a connection of another user", uid=uid)
                raise errors.forbidden("this daemon serves another user", "permission_denied")
            return await handler(request)
        host = single(request.headers, "Host")
        self._guard.check_host(host)
        origin = self._guard.check_origin(single(request.headers, "Origin"), host)
        if origin is not None:
            request[_ORIGIN] = origin
        if request.method == "OPTIONS" and origin is not None:
            return _preflight(request)
        if request.path not in OPEN_PATHS:
            owner = self._check_key(request)
            if owner is not None:
                request[OWNER] = owner
        return await handler(request)

    def _check_key(self, request: web.Request) -> str | None:
        keys = [single(request.headers, name) for name in ("Authorization", "x-api-key")]
        return self._guard.check_key(*keys)

    def _is_allowed(self, request: web.Request) -> bool:
        """Return whether a request that was let in would be let in with the present keys."""
        if self._uid(request) is not None:
            return True
        try:
            self._check_key(request)
        except errors.Refusal:
            return False
        return True

    def _uid(self, request: web.Request) -> int | None:
        """Return the user on the other end of a Unix socket; None for TCP."""
        transport = request.transport
        peer = None if transport is None else transport.get_extra_info("socket")
        if peer is None:
            raise ConnectionResetError("the client has disconnected")
        return self._uid_of(peer) if peer.family == socket.AF_UNIX else None


def _local_end(name: tuple[str, int] | tuple[str, int, int, int] | str | None) -> str | int | None:
    """Return what identifies a listener in a socket's own name: its path, or its port."""
    return name[1] if isinstance(name, tuple) else name


def _route_path(request: web.Request) -> str:
    """Return the path of a request's route, since clients can invent any number of paths."""
    resource = request.match_info.route.resource
    return "" if resource is None else resource.canonical


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    request[_BEGUN] = True
    if (request_id := request.get(REQUEST_ID)) is not None:  # absent if aiohttp refused it itself
        response.headers.update(dict.fromkeys(_ID_HEADERS, request_id))
    response.headers["Server"] = SERVER
    if (origin := request.get(_ORIGIN)) is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = ", ".join(_ID_HEADERS)
        response.headers.add("Vary", "Origin")


def _explained(request: web.Request, found: web.HTTPException) -> str:
    path = request.path
    if found.status == 405:
        allowed = found.headers.get("Allow", "none")
        return f"{path} does not support {request.method}; it supports {allowed}"
    if found.status != 404:
        return found.reason
    known = {route.resource.canonical for route in request.app.router.routes() if route.resource}
    hint = f"did you mean /v1{path}?" if f"/v1{path}" in known else "OpenAI's API is at /v1"
    return f"nothing is at {path}; {hint}"


def _preflight(request: web.Request) -> web.Response:
    wanted = request.headers.get("Access-Control-Request-Headers", "Authorization, Content-Type")
    headers = {
        "Access-Control-Allow-Methods": "GET, POST, DELETE",
        "Access-Control-Allow-Headers": wanted,
        "Access-Control-Max-Age": "600",
    }
    # Browsers ask this before a page of a public website may call a local server.
    if "Access-Control-Request-Private-Network" in request.headers:
        headers["Access-Control-Allow-Private-Network"] = "true"
    return web.Response(status=204, headers=headers)
