"""The routes and their handlers, which raise a `Refusal` or a protocol error."""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

import kvd
from kvd.http import embeddings, errors, models, reading
from kvd.http.answer import Head, Wanted
from kvd.http.bodies import expect_later
from kvd.http.formats import ChatFormat, Format, TextFormat
from kvd.http.messages_api import models as anthropic_models
from kvd.http.queries import read_query
from kvd.http.requests import ChatRequest, CompletionRequest
from kvd.http.streamed_answer import StreamedAnswer
from kvd.http.tokenizing import TokenizeReply, TokenizeRequest
from kvd.http.ui import files
from kvd.http.ui.routes import wants_page
from kvd.http.whole_answer import WholeAnswer
from protocol.model_source import unknown_model

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvd.http.backend import Backend, Metrics
    from kvd.http.bodies import Bodies
    from kvd.http.delivery import Delivery
    from kvd.http.unknown_fields import Ignore, UnknownFields

_JSON = "application/json"
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
EMBEDDINGS, TOKENIZE = "/v1/embeddings", "/v1/tokenize"
OPEN_PATHS = frozenset({"/", "/healthz", "/health", "/readyz", "/ready"}) | files.PATHS
"""Health checks and the page's files, which need no API key."""


@dataclass(frozen=True)
class Routes:
    """The handlers, with the objects that they use."""

    backend: Backend
    bodies: Bodies
    metrics: Metrics | None
    starting: Callable[[], bool]
    delivery: Delivery
    unknown: UnknownFields
    started_at: int
    page: bool
    """Whether browsers get the page at ``/``."""

    def table(self) -> list[web.RouteDef]:
        return [
            web.get("/", self.root),
            web.get("/healthz", self.healthz),
            web.get("/health", self.healthz),
            web.get("/readyz", self.readyz),
            web.get("/ready", self.readyz),
            web.get("/metrics", self.exposition),
            web.get("/v1/models", self.list_models),
            web.get(r"/v1/models/{id:.+}", self.show_model),
            web.post(CHATS, self.chat, expect_handler=expect_later),
            web.post(COMPLETIONS, self.complete, expect_handler=expect_later),
            web.post(EMBEDDINGS, self.embed, expect_handler=expect_later),
            web.post(TOKENIZE, self.tokenize, expect_handler=expect_later),
            web.post("/tokenize", self.tokenize, expect_handler=expect_later),
        ]

    async def root(self, request: web.Request) -> web.Response:
        if self.page and wants_page(request):
            return files.answer(request, files.INDEX)
        return web.Response(
            headers={"Vary": "Accept"},
            text=f"kvd {kvd.__version__} is running; OpenAI's API is at /v1\n"
            "Ollama is running: kvd serves its API at /api\n",  # what its clients look for
        )

    async def healthz(self, _: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def readyz(self, _: web.Request) -> web.Response:
        ready, body = models.readiness(self.backend.status(), starting=self.starting())
        return _json(body, status=200 if ready else 503)

    async def exposition(self, request: web.Request) -> web.Response:
        if self.metrics is None:
            raise errors.plain(404, "this daemon exports no metrics")
        accept = ",".join(request.headers.getall("Accept", ()))
        body, kind = await self.metrics(accept)
        return web.Response(body=body, headers={"Content-Type": kind})

    async def list_models(self, request: web.Request) -> web.Response:
        listed = models.listed(self.backend.status(), self.started_at)
        if anthropic_models.VERSION_HEADER not in request.headers:
            return _json(listed)
        page = read_query(request.query, anthropic_models.Page)
        return _json(anthropic_models.listed(listed.data, page))

    async def show_model(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        status = self.backend.status()
        for model in models.listed(status, self.started_at).data:
            if model.id == name:
                by_anthropic = anthropic_models.VERSION_HEADER in request.headers
                return _json(anthropic_models.described(model) if by_anthropic else model)
        raise unknown_model(name, [model.name for model in status.models], status.unloaded)

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, CHATS, ChatRequest, ChatFormat())

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, COMPLETIONS, CompletionRequest, TextFormat())

    async def embed(self, request: web.Request) -> web.Response:
        ignore = self.unknown.at(EMBEDDINGS)
        asked = reading.decode(await self.bodies.read(request), embeddings.EmbeddingRequest, ignore)
        as_base64 = asked.encoding_format == "base64"
        vectors = await embeddings.embed(self.backend, asked.calls, as_base64=as_base64)
        return web.Response(body=embeddings.body(asked.model, vectors), content_type=_JSON)

    async def tokenize(self, request: web.Request) -> web.Response:
        ignore = self.unknown.at(TOKENIZE)
        asked = reading.decode(await self.bodies.read(request), TokenizeRequest, ignore)
        found = await self.backend.tokenize(asked.call)
        models_ = self.backend.status().models
        infos = [model.info for model in models_ if model.name == asked.model]
        return _json(
            TokenizeReply(
                count=found.count,
                max_model_len=infos[0].context_length if infos and infos[0] else None,
                tokens=found.tokens,
                token_strs=found.texts if asked.return_token_strs else None,
            )
        )

    async def _answer(
        self, request: web.Request, path: str, kind: type[reading.R], format_: Format
    ) -> web.StreamResponse:
        # No variable keeps the body in memory while the answer runs.
        ignore = self.unknown.at(path)
        head, wanted = _parsed(await self.bodies.read(request), kind, format_, ignore)
        now = asyncio.get_running_loop().time()
        if wanted.stream:
            streamed = StreamedAnswer(head, wanted, now)
            return await self.delivery.stream(request, wanted.calls, streamed)
        return await self.delivery.whole(request, wanted.calls, WholeAnswer(head, wanted, now))


def _parsed(
    body: bytearray, kind: type[reading.R], format_: Format, ignore: Ignore
) -> tuple[Head, Wanted]:
    request = reading.read(body, kind, ignore)
    options = request.stream_options
    wanted = Wanted(
        calls=reading.calls(request),
        n=request.n or 1,
        echo=reading.echoes(request),
        include_usage=options is not None and bool(options.include_usage),
        stream=bool(request.stream),
        prompt_only=reading.is_prompt_only(request),
        hides_reasoning=reading.hides_reasoning(request),
    )
    return Head(secrets.token_hex(12), int(time.time()), request.model, format_), wanted


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type=_JSON)
