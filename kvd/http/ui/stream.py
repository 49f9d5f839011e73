"""The stream that feeds the page: one snapshot a second, as server-sent events.

It contains what `kvctl top` polls: the status and new events, and the requests besides. Without a
page nothing runs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from kvd.http.ui.control import Observed
from protocol.errors import Overloaded

INTERVAL_S = 1.0
MAX_STREAMS = 16
"""Pages that may watch at once. A browser's hidden tabs do not count: they close their stream."""
_MAX_EVENTS = 500
"""Events in the first snapshot."""
_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # nginx would buffer the stream
}


@dataclass
class Snapshots:
    """What one page has received."""

    observed: Observed
    last_event: int = 0
    last_ended: int = 0

    def next(self) -> bytes:
        """Return the next snapshot as a server-sent event."""
        events = self.observed.events_since(self.last_event)[-_MAX_EVENTS:]
        ended = self.observed.ended_since(self.last_ended)
        if events:
            self.last_event = events[-1].seq
        if ended:
            self.last_ended = ended[-1].seq
        snapshot: dict[str, Any] = {
            "status": self.observed.status(),
            "events": events,
            "open": self.observed.open_requests(),
            "ended": ended,
        }
        return b"data: " + msgspec.json.encode(snapshot) + b"\n\n"


@dataclass
class Streams:
    """All open streams."""

    observed: Observed
    is_allowed: Callable[[web.Request], bool]
    """Whether the keys in force allow a page that watches already."""
    count: int = 0
    _closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Send snapshots until the page closes it, its key is removed, or the daemon ends."""
        if self.count >= MAX_STREAMS:
            raise Overloaded(
                f"{self.count} pages watch this daemon; close some of them", retry_after_s=5.0
            )
        self.count += 1
        try:
            response = web.StreamResponse(headers=_HEADERS)
            await response.prepare(request)
            snapshots = Snapshots(self.observed)
            while not self._closing.is_set() and self.is_allowed(request):
                await response.write(snapshots.next())
                await self._wait()
            await response.write_eof()
        finally:
            self.count -= 1
        return response

    async def close(self, _: web.Application | None = None) -> None:
        """End all streams, so that the server's end does not wait for them."""
        self._closing.set()

    async def _wait(self) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._closing.wait(), INTERVAL_S)
