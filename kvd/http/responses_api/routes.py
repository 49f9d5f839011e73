"""The routes of the Responses API."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web
from msgspec.structs import replace

from kvd.http.bodies import expect_later
from kvd.http.errors import INVALID, Refusal
from kvd.http.queries import read_query
from kvd.http.request_keys import OWNER, REQUEST_ID
from kvd.http.responses_api import reading
from kvd.http.responses_api.answer import ResponseAnswer, WholeResponse
from kvd.http.responses_api.background import Run, ShowQuery
from kvd.http.responses_api.input_items import Page, listed
from protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from kvd.http.backend import Ignored
    from kvd.http.bodies import Bodies
    from kvd.http.delivery import Delivery
    from kvd.http.responses_api.store import Store, Stored
    from kvd.http.responses_api.wanted import Wanted
    from kvd.http.unknown_fields import UnknownFields


@dataclass(frozen=True)
class ResponsesRoutes:
    """The handlers of ``/v1/responses``."""

    bodies: Bodies
    delivery: Delivery
    store: Store
    ignored: Ignored
    unknown: UnknownFields

    def table(self) -> list[web.RouteDef]:
        return [
            web.post(reading.PATH, self.create, expect_handler=expect_later),
            web.post(f"{reading.PATH}/{{id}}/cancel", self.cancel),
            web.get(f"{reading.PATH}/{{id}}/input_items", self.input_items),
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
        if wanted.response.background:
            return await self._run(request, wanted, owner)
        keep = partial(self._keep, wanted, owner) if wanted.store else None
        kind = ResponseAnswer if wanted.stream else WholeResponse
        answer = kind(wanted, asyncio.get_running_loop().time(), _now, keep)
        if wanted.stream:
            return await self.delivery.stream(request, [wanted.call], answer)
        return await self.delivery.whole(request, [wanted.call], answer)

    async def _run(
        self, request: web.Request, wanted: Wanted, owner: str | None
    ) -> web.StreamResponse:
        """Run a background response; its client may disconnect."""
        response, store = wanted.response, self.store
        answer = ResponseAnswer(wanted, asyncio.get_running_loop().time(), _now)
        run = Run(answer, partial(store.update, response.id))
        previous = response.previous_response_id
        store.begin(response.id, owner, previous, wanted.input, run)
        body = run.body
        run.start(self.delivery.backend, replace(wanted.call, id=request[REQUEST_ID]))
        if wanted.stream:
            return await self.delivery.follow(request, run.follow(-1))
        return _json(body)

    async def show(self, request: web.Request) -> web.StreamResponse:
        stored = self._stored(request)
        query = read_query(request.query, ShowQuery)
        if not query.stream:
            return _json(stored.body)
        if stored.run is None:
            raise InvalidRequest(
                "stream is true, but only events of background responses are kept; read the "
                "response without stream",
                field="stream",
            )
        stored.run.check_kept(query.starting_after)
        return await self.delivery.follow(request, stored.run.follow(query.starting_after))

    async def cancel(self, request: web.Request) -> web.Response:
        stored = self._stored(request)
        if stored.run is None:
            raise InvalidRequest(
                "only responses with background: true can be cancelled; others end with their "
                "connection"
            )
        stored.run.cancel()
        return _json(stored.body)

    async def input_items(self, request: web.Request) -> web.Response:
        stored, owner = self._stored(request), request.get(OWNER)
        earlier = [] if stored.previous is None else self.store.history(stored.previous, owner)
        items = [*chain.from_iterable(earlier), *stored.input]
        page = read_query(request.query, Page)
        return _json(listed(items, request.match_info["id"], page))

    def _stored(self, request: web.Request) -> Stored:
        stored = self.store.find(request.match_info["id"], request.get(OWNER))
        if stored is None:
            raise self._not_found(request)
        return stored

    async def delete(self, request: web.Request) -> web.Response:
        if not self.store.delete(request.match_info["id"], request.get(OWNER)):
            raise self._not_found(request)
        deleted = {"id": request.match_info["id"], "object": "response", "deleted": True}
        return _json(msgspec.json.encode(deleted))

    def _not_found(self, request: web.Request) -> Refusal:
        message = self.store.missing(request.match_info["id"])
        return Refusal(404, message, INVALID, "not_found")

    def _read(self, body: bytearray, owner: str | None) -> Wanted:
        return reading.read(body, self.store, owner, _now(), self.unknown.at(reading.PATH))

    def _keep(self, wanted: Wanted, owner: str | None, body: bytes) -> None:
        response = wanted.response
        self.store.put(response.id, owner, response.previous_response_id, wanted.input, body)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _now() -> int:
    return int(time.time())
