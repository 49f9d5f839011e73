"""Runs a request's calls and sends the answer, for all APIs."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web
from msgspec.structs import replace

from kvd.http.completion import StreamedCompletion, WholeCompletion
from kvd.http.request_keys import REQUEST_ID
from kvd.http.send_buffer import SendBuffer

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from kvd.http.backend import Completions
    from kvd.http.completion import Streamed, Whole
    from protocol.messages import Generate

_EVENTS = "text/event-stream; charset=utf-8"
_STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx would buffer the stream
}


@dataclass(frozen=True)
class Delivery:
    """Sends whole and streamed answers; both raise a `Refusal` before the answer begins."""

    backend: Completions
    unread_limit: int
    """Unread bytes of a stream at which its client is disconnected."""

    async def whole(
        self, request: web.Request, calls: Sequence[Generate], answer: Whole
    ) -> web.Response:
        body = await WholeCompletion(self.backend, _named(request, calls), answer).body()
        return web.Response(body=body, content_type="application/json")

    async def stream(
        self,
        request: web.Request,
        calls: Sequence[Generate],
        answer: Streamed,
        content_type: str = _EVENTS,
    ) -> web.StreamResponse:
        transport = _transport(request)
        buffer = SendBuffer(self.unread_limit, transport.get_write_buffer_size, transport.abort)
        completion = StreamedCompletion(self.backend, _named(request, calls), answer, buffer)
        return await self.follow(request, completion.chunks(), content_type)

    async def follow(
        self, request: web.Request, chunks: AsyncGenerator[bytes], content_type: str = _EVENTS
    ) -> web.StreamResponse:
        """Send chunks as they are; they are closed at the end, also if the client disconnects."""
        response = web.StreamResponse(headers=_STREAM_HEADERS | {"Content-Type": content_type})
        async with contextlib.aclosing(chunks):
            async for chunk in chunks:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(chunk)
        if not response.prepared:
            if _transport(request).is_closing():  # disconnected before the first chunk
                raise ConnectionResetError("the client has disconnected")
            await response.prepare(request)
        await response.write_eof()
        return response


def _transport(request: web.Request) -> asyncio.Transport:
    if request.transport is None:
        raise ConnectionResetError("the client has disconnected")
    return request.transport


def _named(request: web.Request, calls: Sequence[Generate]) -> list[Generate]:
    """Return the calls with the id of the answer's headers, by which `kvctl explain` finds them."""
    return [replace(call, id=request[REQUEST_ID]) for call in calls]
