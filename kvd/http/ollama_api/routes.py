"""The routes of Ollama's API."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

import kvd
from kvd.http import embeddings, errors, keep_alive, reading
from kvd.http.bodies import expect_later
from kvd.http.ollama_api import answers, models
from kvd.http.ollama_api import reading as ollama_reading
from kvd.http.ollama_api.requests import (
    ChatRequest,
    EmbeddingsRequest,
    EmbedRequest,
    GenerateRequest,
    NamedModel,
)
from protocol.errors import InvalidRequest
from protocol.messages import Tokenize

if TYPE_CHECKING:
    from kvd.http.backend import Backend
    from kvd.http.bodies import Bodies
    from kvd.http.delivery import Delivery
    from kvd.http.unknown_fields import UnknownFields
    from protocol.embedding import Embed

VERSION = "0.12.6"
"""Version of Ollama whose API this is: clients refuse older ones than they know."""
LINES = "application/x-ndjson"
_JSON = "application/json"
_REFUSED = {
    "push": "kvd does not publish models",
    "create": "kvd makes no models; convert one with mlx_lm.convert, then kvctl load its folder",
    "copy": "models have one name; give another with kvctl load SOURCE --alias NAME",
    "delete": "no HTTP request deletes files; use: kvctl rm NAME",
    "blobs": "kvd takes no files; kvctl load SOURCE loads a folder or a model of the Hub",
}
"""Operations that are refused, with advice."""


@dataclass(frozen=True)
class OllamaRoutes:
    """The handlers, with the objects that they use."""

    backend: Backend
    bodies: Bodies
    delivery: Delivery
    unknown: UnknownFields
    started_at: int

    def table(self) -> list[web.RouteDef]:
        return [
            web.get("/api/version", self.version),
            web.get("/api/tags", self.tags),
            web.get("/api/ps", self.running),
            *(
                web.post(f"/api/{name}", handler, expect_handler=expect_later)
                for name, handler in {
                    "chat": self.chat,
                    "generate": self.generate,
                    "show": self.show,
                    "embed": self.embed,
                    "embeddings": self.embed_one,
                    "pull": self.pull,
                    "push": self.refuse,
                    "create": self.refuse,
                    "copy": self.refuse,
                }.items()
            ),
            web.delete("/api/delete", self.refuse),
            web.post("/api/blobs/{digest}", self.refuse, expect_handler=expect_later),
        ]

    async def version(self, _: web.Request) -> web.Response:
        return _reply({"version": VERSION, "kvd": kvd.__version__})

    async def tags(self, _: web.Request) -> web.Response:
        return _reply(models.tags(self.backend.status(), self.started_at))

    async def running(self, _: web.Request) -> web.Response:
        return _reply(models.running(self.backend.status(), self.started_at, time.time()))

    async def show(self, request: web.Request) -> web.Response:
        name = self._known(_named(await self._decode(request, NamedModel)))
        return _reply(models.shown(name, self.backend.status(), self.started_at))

    async def pull(self, request: web.Request) -> web.Response:
        """Succeed for a known model: some clients pull what they are about to use."""
        asked = await self._decode(request, NamedModel)
        name, status = self._known(_named(asked)), self.backend.status()
        if name in status.unloaded or any(model.name == name for model in status.models):
            return _reply({"status": "success"}, _JSON if asked.stream is False else LINES)
        raise errors.plain(
            501,
            f"no HTTP request downloads a model; use: kvctl pull {name} (owner/name of the Hub)",
        )

    async def refuse(self, request: web.Request) -> web.Response:
        operation = request.path.split("/")[2]
        raise errors.plain(501, f"/api/{operation} is not supported: {_REFUSED[operation]}")

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, await self._decode(request, ChatRequest))

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, await self._decode(request, GenerateRequest))

    async def _answer(
        self, request: web.Request, asked: ChatRequest | GenerateRequest
    ) -> web.StreamResponse:
        name = self._known(asked.model)
        head = answers.Head(asked.model, isinstance(asked, ChatRequest))
        call = ollama_reading.call(asked, name)
        now = asyncio.get_running_loop().time()
        if call is None:
            return await self._load(name, head, asked)
        if asked.stream is False:
            return await self.delivery.whole(request, [call], answers.WholeAnswer(head, now))
        streamed = answers.StreamedAnswer(head, now)
        return await self.delivery.stream(request, [call], streamed, LINES)

    async def _load(
        self, name: str, head: answers.Head, asked: ChatRequest | GenerateRequest
    ) -> web.Response:
        """Load a model without a prompt, or with ``keep_alive`` 0 unload it after its requests."""
        seconds = keep_alive.seconds(asked.keep_alive)
        unload = seconds == 0
        if not unload:
            await self.backend.tokenize(Tokenize(id="http", model=name, prompt="a", limit=0))
        if seconds is not None:
            self.backend.keep_loaded(name, seconds)
        line = head.line(answers.Piece(), done=True, done_reason="unload" if unload else "load")
        return _reply(line, _JSON if asked.stream is False else LINES)

    async def embed(self, request: web.Request) -> web.Response:
        asked, began = await self._decode(request, EmbedRequest), _now()
        texts = [asked.input] if isinstance(asked.input, str) else asked.input
        limit = keep_alive.seconds(asked.keep_alive)
        name, options = self._known(asked.model), {"dimensions": asked.dimensions}
        calls = (
            embeddings.calls(name, texts, "input", keep_alive_s=limit, **options) if texts else []
        )
        found = await self._vectors(calls)
        return _reply(
            {
                "model": asked.model,
                "embeddings": found.encoded,
                "total_duration": answers.nanoseconds(_now() - began),
                "load_duration": 0,
                "prompt_eval_count": found.prompt_tokens,
            }
        )

    async def embed_one(self, request: web.Request) -> web.Response:
        asked = await self._decode(request, EmbeddingsRequest)
        name, limit = self._known(asked.model), keep_alive.seconds(asked.keep_alive)
        calls = embeddings.calls(name, asked.prompt, "prompt", keep_alive_s=limit)
        return _reply({"embedding": (await self._vectors(calls)).encoded[0]})

    async def _vectors(self, calls: list[Embed]) -> embeddings.Vectors:
        return await embeddings.embed(self.backend, calls, as_base64=False)

    async def _decode(self, request: web.Request, kind: type[reading.D]) -> reading.D:
        ignore = self.unknown.at(request.path)
        return reading.decode(await self.bodies.read(request), kind, ignore)

    def _known(self, name: str) -> str:
        return models.known_name(name, self.backend.status())


def _named(asked: NamedModel) -> str:
    name = asked.model or asked.name
    if name is None:
        raise InvalidRequest("model is missing", field="model")
    return name


def _now() -> float:
    return asyncio.get_running_loop().time()


def _reply(value: Any, kind: str = _JSON) -> web.Response:
    ending = b"\n" if kind == LINES else b""
    return web.Response(body=msgspec.json.encode(value) + ending, content_type=kind)
