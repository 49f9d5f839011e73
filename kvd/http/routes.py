"""The paths: what is read from a request, and what is answered.

Each handler raises a `Refusal` or an error of the protocol; `kvd.http.server` turns both into
answers.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

import kvd
from kvd.http import errors, models, reading
from kvd.http.answers import Asked, Head
from kvd.http.outbox import Outbox
from kvd.http.requests import ChatRequest, CompletionRequest
from kvd.http.running import Complete, Stream
from kvd.http.shapes import Chat, Shape, Text
from protocol.errors import UnknownModel

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.http.bodies import Bodies
    from kvd.http.port import Backend, Metrics

_JSON = "application/json"
_STREAM_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would keep what it has until it is a page
}
OPEN_PATHS = frozenset({"/", "/healthz", "/readyz"})
"""For those who only look whether it is there: no key is asked for."""


@dataclass(frozen=True)
class Routes:
    """What the handlers need."""

    backend: Backend
    bodies: Bodies
    metrics: Metrics | None
    starting: Callable[[], bool]
    unread_limit: int
    """Bytes that a stream's client may have left unread before it is cut off."""
    started_at: int
    """Seconds since 1970."""

    def table(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [
            web.get("/", self.root),
            web.get("/healthz", self.healthz),
            web.get("/readyz", self.readyz),
            web.get("/metrics", self.exposition),
            web.get("/v1/models", self.list_models),
            web.get(r"/v1/models/{id:.+}", self.show_model),
            web.post("/v1/chat/completions", self.chat, expect_handler=_later),
            web.post("/v1/completions", self.complete, expect_handler=_later),
        ]

    # -- is it there? -----------------------------------------------------------------------------

    async def root(self, _: web.Request) -> web.Response:
        """Greet whoever opens the address in a browser."""
        return web.Response(text=f"kvd {kvd.__version__} runs; OpenAI's API is at /v1\n")

    async def healthz(self, _: web.Request) -> web.Response:
        """Say that the process answers."""
        return _json({"status": "ok"})

    async def readyz(self, _: web.Request) -> web.Response:
        """Say whether requests should come here."""
        ready, said = models.readiness(self.backend.status(), starting=self.starting())
        return _json(said, status=200 if ready else 503)

    async def exposition(self, request: web.Request) -> web.Response:
        """Tell Prometheus."""
        if self.metrics is None:
            raise errors.plain(404, "this daemon exports no metrics")
        accept = ",".join(request.headers.getall("Accept", ()))
        body, kind = await self.metrics(accept)
        return web.Response(body=body, headers={"Content-Type": kind})

    # -- models -----------------------------------------------------------------------------------

    async def list_models(self, _: web.Request) -> web.Response:
        """List what a request may name."""
        return _json(models.listed(self.backend.status(), self.started_at))

    async def show_model(self, request: web.Request) -> web.Response:
        """Show one of them."""
        name = request.match_info["id"]
        for model in models.listed(self.backend.status(), self.started_at).data:
            if model.id == name:
                return _json(model)
        raise UnknownModel(f"no model {name!r} is known; GET /v1/models lists them", model=name)

    # -- completions ------------------------------------------------------------------------------

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        return await self._answer(
            request, *_understood(await self.bodies.read(request), ChatRequest, Chat())
        )

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Complete a prompt, or several."""
        return await self._answer(
            request, *_understood(await self.bodies.read(request), CompletionRequest, Text())
        )

    async def _answer(self, request: web.Request, head: Head, asked: Asked) -> web.StreamResponse:
        if asked.stream:
            return await self._stream(request, head, asked)
        body = await Complete(self.backend, head, asked).body()
        return web.Response(body=body, content_type=_JSON)

    async def _stream(self, request: web.Request, head: Head, asked: Asked) -> web.StreamResponse:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        outbox = Outbox(self.unread_limit, transport.get_write_buffer_size, transport.abort)
        stream = Stream(self.backend, head, asked, outbox)
        response = web.StreamResponse(headers=_STREAM_HEADERS)
        async with contextlib.aclosing(stream.chunks()) as chunks:
            async for chunk in chunks:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(chunk)
        if not response.prepared:  # cut off before it began
            raise ConnectionResetError("the client is gone")
        await response.write_eof()
        return response


async def _later(_: web.Request) -> None:
    """Let the body come when the client has been let in; see `kvd.http.bodies`."""


def _understood(body: bytearray, kind: type[reading.R], shape: Shape) -> tuple[Head, Asked]:
    """Return what a body asks for; neither it nor what is ignored of it outlives this call."""
    wanted = reading.read(body, kind)
    options = wanted.stream_options
    asked = Asked(
        calls=reading.calls(wanted),
        n=reading.choices(wanted),
        echo=reading.echoes(wanted),
        include_usage=options is not None and bool(options.include_usage),
        stream=bool(wanted.stream),
        prompt_only=reading.is_prompt_only(wanted),
    )
    return Head(secrets.token_hex(12), int(time.time()), wanted.model, shape), asked


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type=_JSON)
