"""The routes of the page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from aiohttp import hdrs, web

from kvd.http import errors, reading
from kvd.http.bodies import expect_later
from kvd.http.guard import is_own_origin, single
from kvd.http.ui import files
from kvd.http.ui.operations import Operation, perform

if TYPE_CHECKING:
    from kvd.http.bodies import Bodies
    from kvd.http.ui.control import Control
    from kvd.http.ui.stream import Streams


@dataclass(frozen=True)
class UiRoutes:
    """The handlers, with the objects that they use."""

    control: Control
    bodies: Bodies
    streams: Streams

    def table(self) -> list[web.RouteDef]:
        return [
            *(web.get(path, self.file) for path in sorted(files.PATHS)),
            web.post("/ui/stream", self.stream, expect_handler=expect_later),
            web.post("/ui/operations", self.operate, expect_handler=expect_later),
        ]

    async def file(self, request: web.Request) -> web.Response:
        return files.answer(request, request.path)

    async def stream(self, request: web.Request) -> web.StreamResponse:
        _check_own_page(request)
        return await self.streams.serve(request)

    async def operate(self, request: web.Request) -> web.Response:
        _check_own_page(request)
        body = await self.bodies.read(request)
        operation: Operation = reading.decode(body, Operation)  # type: ignore[arg-type]
        done = await perform(self.control, operation)
        return web.Response(body=msgspec.json.encode(done), content_type="application/json")


def wants_page(request: web.Request) -> bool:
    """Return whether a client asks for HTML, as browsers do for an address that is entered."""
    return "text/html" in request.headers.get(hdrs.ACCEPT, "")


def _check_own_page(request: web.Request) -> None:
    """Refuse requests that do not come from kvd's own page, not even from allowed origins.

    A form of another page cannot send JSON, and a script of another page has another origin.
    """
    if request.content_type != "application/json":
        kind = request.headers.get(hdrs.CONTENT_TYPE, "none")
        raise errors.plain(415, f"the content type is {kind}; send application/json")
    origin, host = single(request.headers, "Origin"), single(request.headers, "Host")
    if origin is None or not is_own_origin(origin, host):
        raise errors.forbidden(
            f"the origin is {origin or 'missing'}; only kvd's own page may use {request.path}",
            "origin_not_allowed",
        )
