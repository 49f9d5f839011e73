"""The routes of Anthropic's Messages API."""

from __future__ import annotations

import asyncio
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from kvd.http.bodies import expect_later
from kvd.http.messages_api import reading
from kvd.http.messages_api.answers import Head, StreamedMessage, WholeMessage
from kvd.http.messages_api.requests import MessagesRequest
from kvd.http.reading import decode
from kvd.http.request_keys import REQUEST_ID

if TYPE_CHECKING:
    from kvd.http.backend import Backend
    from kvd.http.bodies import Bodies
    from kvd.http.delivery import Delivery
    from kvd.http.unknown_fields import UnknownFields

PATH = "/v1/messages"
COUNT_PATH = f"{PATH}/count_tokens"


@dataclass(frozen=True)
class MessagesRoutes:
    """The handlers, with the objects that they use."""

    backend: Backend
    bodies: Bodies
    delivery: Delivery
    unknown: UnknownFields

    def table(self) -> list[web.RouteDef]:
        return [
            web.post(PATH, self.create, expect_handler=expect_later),
            web.post(COUNT_PATH, self.count, expect_handler=expect_later),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        # No variable keeps the body in memory while the answer runs.
        wanted = reading.wanted(await self._read(request, PATH))
        head = Head(f"msg_{secrets.token_hex(12)}", wanted.call.model, request[REQUEST_ID])
        now = asyncio.get_running_loop().time()
        if wanted.stream:
            streamed = StreamedMessage(head, wanted, now)
            return await self.delivery.stream(request, [wanted.call], streamed)
        return await self.delivery.whole(request, [wanted.call], WholeMessage(head, wanted, now))

    async def count(self, request: web.Request) -> web.Response:
        text = reading.text_to_count(await self._read(request, COUNT_PATH))
        tokenized = await self.backend.tokenize(text)
        body = msgspec.json.encode({"input_tokens": tokenized.count})
        return web.Response(body=body, content_type="application/json")

    async def _read(self, request: web.Request, path: str) -> MessagesRequest:
        return decode(await self.bodies.read(request), MessagesRequest, self.unknown.at(path))
