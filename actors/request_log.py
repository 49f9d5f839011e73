"""The requests of the daemon as records: those that are open, and the newest that ended."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec.structs import replace

from actors.request_state import RequestState
from protocol import messages
from protocol.cache_text import summary
from protocol.messages import Event
from protocol.request_record import RequestRecord

MAX_ENDED = 256
"""Ended requests kept, in about 200 KB."""
MAX_OPEN = 256
"""Open requests listed: the earliest ones."""


@dataclass
class RequestLog:
    """The newest ended requests."""

    clock: Callable[[], float] = time.time
    ended: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=MAX_ENDED))
    last: int = 0
    """Number of requests that have ended."""

    def record_end(self, request: RequestState, event: Event, now: float) -> None:
        """Record a request whose last event is sent; ``now``: the event loop's clock."""
        self.last += 1
        record = replace(open_record(request, now), seq=self.last, at=self.clock())
        if isinstance(event, messages.Done):
            usage = event.usage
            record = replace(
                record,
                stage=event.reason,
                prompt_tokens=usage.prompt_tokens,
                cached_tokens=usage.cached_tokens,
                completion_tokens=usage.completion_tokens,
            )
        elif isinstance(event, messages.Error):
            code, message = event.error.code, event.error.message
            record = replace(record, stage="error", code=code, message=message)
        self.ended.append(record)

    def since(self, number: int) -> list[RequestRecord]:
        """Return the ended requests after this one that are still kept."""
        return [record for record in self.ended if record.seq > number]


def open_records(requests: Iterable[RequestState], now: float) -> list[RequestRecord]:
    """Return records of the first `MAX_OPEN` open requests."""
    listed = (request for request, _ in zip(requests, range(MAX_OPEN), strict=False))
    return [open_record(request, now) for request in listed]


def open_record(request: RequestState, now: float) -> RequestRecord:
    timing, outcome = request.timing, request.outcome
    return RequestRecord(
        rid=request.submit.rid,
        model=timing.model,
        stage=request.stage,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=None if outcome is None else outcome.reused_tokens,
        cache="" if outcome is None else summary(outcome),
        completion_tokens=sum(len(choice.tokens) for choice in request.choices),
        age_s=None if timing.arrived_at is None else now - timing.arrived_at,
        first_token_s=timing.first_token_s,
        levels=list(request.levels),
    )
