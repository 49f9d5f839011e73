"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from kvd.http.bodies import expect_later
from kvd.http.errors import INVALID, Refusal
from kvd.http.request_keys import OWNER
from kvd.http.responses_api import reading
from kvd.http.responses_api.answer import ResponseAnswer, WholeResponse

if TYPE_CHECKING:
    from kvd.http.backend import Ignored
    from kvd.http.bodies import Bodies
    from kvd.http.delivery import Delivery
    from kvd.http.responses_api.reading import Wanted
    from kvd.http.responses_api.store import Store


@dataclass(frozen=True)
class ResponsesRoutes:
    """The handlers of ``/v1/responses``."""

    bodies: Bodies
    delivery: Delivery
    store: Store
    ignored: Ignored

    def table(self) -> list[web.RouteDef]:
        return [
            web.post(reading.PATH, self.create, expect_handler=expect_later),
            web.get(f"{reading.PATH}/{{id:.+}}", self.show),
            web.delete(f"{reading.PATH}/{{id:.+}}", self.delete),
        ]

    async def create(self, request: web.Request) -> web.StreamResponse:
        owner = request.get(OWNER)
        # No variable keeps the body in memory while the answer runs.
        wanted = self._read(await self.bodies.read(request), owner)
        for name, count in wanted.ignored.items():
            if count:
                self.ignored(reading.PATH, name, count)
        keep = partial(self._keep, wanted, owner) if wanted.store else None
        kind = ResponseAnswer if wanted.stream else WholeResponse
        answer = kind(wanted, asyncio.get_running_loop().time(), _now, keep)
        if wanted.stream:
            return await self.delivery.stream(request, [wanted.call], answer)
        return await self.delivery.whole([wanted.call], answer)

    async def show(self, request: web.Request) -> web.Response:
        body = self.store.body(request.match_info["id"], request.get(OWNER))
        if body is None:
            raise _not_found(request)
        return web.Response(body=body, content_type="application/json")

    async def delete(self, request: web.Request) -> web.Response:
        if not self.store.delete(request.match_info["id"], request.get(OWNER)):
            raise _not_found(request)
        deleted = {"id": request.match_info["id"], "object": "response", "deleted": True}
        return web.Response(body=msgspec.json.encode(deleted), content_type="application/json")

    def _read(self, body: bytearray, owner: str | None) -> Wanted:
        return reading.read(body, self.store, owner, _now())

    def _keep(self, wanted: Wanted, owner: str | None, body: bytes) -> None:
        response = wanted.response
        self.store.put(response.id, owner, response.previous_response_id, wanted.input, body)


def _now() -> int:
    return int(time.time())


def _not_found(request: web.Request) -> Refusal:
    message = f"the response {request.match_info['id']!r} is not stored (any more)"
    return Refusal(404, message, INVALID, "not_found")
