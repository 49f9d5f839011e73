"""A response from the events of its call, in one piece or as typed events. Sans-io."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from kvd.http.request_stats import RequestStats
from kvd.http.responses_api.objects import (
    Failure,
    Incomplete,
    InputDetails,
    OutputDetails,
    OutputItem,
    Usage,
)
from kvd.http.responses_api.output_items import (
    OpenCustomCall,
    OpenFunctionCall,
    OpenItem,
    OpenMessage,
    OpenReasoning,
)
from kvd.http.responses_api.text_logprobs import TextLogprobs
from protocol import messages
from protocol.errors import bounded
from protocol.parts import PartReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvd.http.errors import Refusal
    from kvd.http.responses_api.objects import ItemStatus, Status
    from kvd.http.responses_api.wanted import Wanted
    from protocol.messages import Event, FinishReason
    from protocol.parts import PartStart
    from protocol.types import TokenLogprob
    from protocol.types import Usage as CallUsage

    Events = Iterator[tuple[str, dict[str, Any]]]

_json = msgspec.json.Encoder()


class ResponseAnswer:
    """A response, in one piece (`body`) or as a stream (`handle` returns bytes to send)."""

    _streams = True

    def __init__(
        self,
        wanted: Wanted,
        now: float,
        clock: Callable[[], int],
        keep: Callable[[bytes], None] | None = None,
    ) -> None:
        """``clock`` returns seconds since 1970; ``keep`` stores the finished response."""
        self._wanted = wanted
        self._response = wanted.response
        self._stats = RequestStats(1, now)
        self._clock = clock
        self._keep = keep
        self._parts = PartReader()
        self._items: list[OutputItem] = []
        self._open: OpenItem | None = None
        self._blank = ""
        """White space that may begin a message, or separate other parts."""
        self._blank_logprobs: list[TokenLogprob] = []
        self._logprobs = TextLogprobs()
        self._next = 0
        """Number of the next event."""

    @property
    def over(self) -> bool:
        return self._stats.over

    def body(self) -> bytes:
        return _json.encode(self._response)

    def handle(self, number: int, event: Event, now: float) -> bytes:
        """Take an event; raises `InvalidRequest` if an answer in one piece is too large."""
        self._stats.handle(number, event, now)
        match event:
            case messages.Accepted():
                return self.begin() + self._start()
            case messages.Queued():
                return self.begin()
            case messages.Tokens():
                return self.begin() + self._encoded(self._tokens(event))
            case messages.Done(reason=reason, usage=usage):
                return self.begin() + self._encoded(self._done(reason, usage))
            case messages.Paused() | messages.Resumed():
                return self.waiting()
            case _:
                return b""

    def waiting(self) -> bytes:
        """Return an event, since comments do not reset the clients' idle timers."""
        return self.begin() or self._encoded([(self._phase, self._snapshot())])

    def repeated(self, number: int) -> bytes:
        """Return what `waiting` does as a repetition of an event's number, which it leaves last."""
        return _event(self._phase, number, self._snapshot())

    def cancelled(self) -> bytes:
        """Return the end of a stream that the client has cancelled; OpenAI has no event for it."""

        def events() -> Events:
            yield from self._close("incomplete")
            self._settle("cancelled")
            yield "incomplete", self._snapshot()

        return self._encoded(events())

    def failed(self, refusal: Refusal) -> bytes:
        """Return the end of the stream; clients know the reason by OpenAI's code."""
        failure = Failure(
            _failure_code(refusal), bounded(refusal.message), refusal.type, bounded(refusal.param)
        )
        self._settle("failed")
        self._response = replace(self._response, error=failure)
        return self.begin() + self._encoded([("failed", self._snapshot())])

    def begin(self) -> bytes:
        """Return the first events, unless they are sent."""
        if self._next:
            return b""
        return self._encoded([("created", self._snapshot()), (self._phase, self._snapshot())])

    def _start(self) -> bytes:
        if self._response.status != "queued":
            return b""
        self._response = replace(self._response, status="in_progress")
        return self._encoded([(self._phase, self._snapshot())])

    @property
    def status(self) -> Status:
        return self._response.status

    @property
    def _phase(self) -> str:
        """Event of a response that is not over."""
        return "queued" if self._response.status == "queued" else "in_progress"

    def _snapshot(self) -> dict[str, Any]:
        return {"response": self._response}

    def _encoded(self, events: Iterator[tuple[str, dict[str, Any]]] | Any) -> bytes:
        """Return events as server-sent events, numbered."""
        data = bytearray()
        for kind, fields in events:
            data += _event(kind, self._next, fields)
            self._next += 1
        return bytes(data)

    def _tokens(self, event: messages.Tokens) -> Events:
        self._logprobs.add(event.logprobs or ())
        for piece in self._parts.split(event.text, event.parts):
            if piece.begins:
                yield from self._close("completed")
                if piece.part.kind != "text":
                    yield from self._open_item(self._new_item(piece.part))
            text = piece.text
            found = [] if piece.part.kind == "call" else self._logprobs.take(text)
            if self._open is None:
                text, self._blank = self._blank + text, ""
                found, self._blank_logprobs = self._blank_logprobs + found, []
                if not text.strip():
                    self._blank, self._blank_logprobs = text, found
                    continue
                yield from self._open_item(self._new_message())
            if isinstance(self._open, OpenMessage):
                self._open.add_logprobs(found)
            if text:
                yield from self._located(self._opened.push(text))
        if self._parts.part.kind == "call":
            self._logprobs.skip()

    @property
    def _opened(self) -> OpenItem:
        assert self._open is not None, "no item is open"
        return self._open

    def _new_id(self, kind: type[OpenItem]) -> str:
        own = self._response.id.removeprefix("resp_")
        return f"{kind.prefix}_{own}_{len(self._items)}"

    def _new_item(self, part: PartStart) -> OpenItem:
        if part.kind == "reasoning":
            return OpenReasoning(
                self._new_id(OpenReasoning),
                as_summary=self._wanted.summary,
                sealed=self._wanted.sealed,
            )
        name = self._wanted.tools.known(part.name)
        kind = OpenCustomCall if name.custom else OpenFunctionCall
        return kind(self._new_id(kind), part.call, name)

    def _new_message(self) -> OpenMessage:
        return OpenMessage(self._new_id(OpenMessage), streams=self._streams)

    def _open_item(self, item: OpenItem) -> Events:
        self._open = item
        yield "output_item.added", self._place() | {"item": item.item("in_progress")}
        yield from self._located(item.begin())

    def _close(self, status: ItemStatus) -> Events:
        """End the open item, if there is one."""
        self._blank, self._blank_logprobs = "", []
        if (item := self._open) is None:
            return
        yield from self._located(item.end())
        done = item.item(status)
        yield "output_item.done", self._place() | {"item": done}
        self._items.append(done)
        self._open = None

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self._items)}

    def _located(self, events: Events) -> Events:
        for kind, fields in events:
            yield kind, {"item_id": self._opened.id} | self._place() | fields

    def _done(self, reason: FinishReason, usage: CallUsage) -> Events:
        complete = reason == "stop"
        yield from self._close("completed" if complete else "incomplete")
        if not self._items:  # an empty answer is an empty message
            yield from self._open_item(self._new_message())
            yield from self._close("completed" if complete else "incomplete")
        status: Status = "completed" if complete else "incomplete"
        self._settle(status)
        self._response = replace(
            self._response,
            completed_at=self._clock() if complete else None,
            incomplete_details=Incomplete("max_output_tokens") if reason == "length" else None,
            usage=_usage(usage),
            kvd=self._stats.extension,
        )
        if self._keep is not None:
            self._keep(self.body())
        yield status, self._snapshot()

    def _settle(self, status: Status) -> None:
        self._response = replace(self._response, status=status, output=list(self._items))


class WholeResponse(ResponseAnswer):
    """A response in one piece: events are handled, and not encoded."""

    _streams = False

    def _encoded(self, events: Iterator[tuple[str, dict[str, Any]]] | Any) -> bytes:
        for _ in events:
            self._next += 1
        return b""


def _event(kind: str, number: int, fields: dict[str, Any]) -> bytes:
    event = {"type": f"response.{kind}", "sequence_number": number} | fields
    return b"event: response.%b\ndata: %b\n\n" % (kind.encode(), _json.encode(event))


def _usage(usage: CallUsage) -> Usage:
    return Usage(
        usage.prompt_tokens,
        InputDetails(usage.cached_tokens),
        usage.completion_tokens,
        OutputDetails(usage.reasoning_tokens),
        usage.prompt_tokens + usage.completion_tokens,
    )


def _failure_code(refusal: Refusal) -> str:
    if refusal.code in {"context_length_exceeded", "rate_limit_exceeded"}:
        return refusal.code
    return "server_error" if refusal.status >= 500 else "invalid_prompt"
