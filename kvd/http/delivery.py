"""Runs a request's calls and sends the answer, for all APIs."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from aiohttp import web

from kvd.http.completion import StreamedCompletion, WholeCompletion
from kvd.http.send_buffer import SendBuffer

if TYPE_CHECKING:
    from collections.abc import Sequence

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

    async def whole(self, calls: Sequence[Generate], answer: Whole) -> web.Response:
        body = await WholeCompletion(self.backend, calls, answer).body()
        return web.Response(body=body, content_type="application/json")

    async def stream(
        self,
        request: web.Request,
        calls: Sequence[Generate],
        answer: Streamed,
        content_type: str = _EVENTS,
    ) -> web.StreamResponse:
        transport = request.transport
        if transport is None:
            raise ConnectionResetError("the client has disconnected")
        buffer = SendBuffer(self.unread_limit, transport.get_write_buffer_size, transport.abort)
        completion = StreamedCompletion(self.backend, calls, answer, buffer)
        response = web.StreamResponse(headers=_STREAM_HEADERS | {"Content-Type": content_type})
        async with contextlib.aclosing(completion.chunks()) as chunks:
            async for chunk in chunks:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(chunk)
        if not response.prepared:  # disconnected before the first chunk
            raise ConnectionResetError("the client has disconnected")
        await response.write_eof()
        return response
