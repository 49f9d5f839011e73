"""One conversation between a client and the daemon, from either end. Sans-io.

Keeps which request ids are in use, and turns what the peer sends into requests (events) or into
the error that answers it. Does not run requests and knows nothing of models.

Two kinds of fault on the server's side:

* of a *frame* (too large, not UTF-8, not JSON, no object, no usable id): the answer has an empty
  id, and `ServerSession.closing` is true: send the answer, then close;
* of a *message* (unknown op, wrong field, other version, id in use): the answer carries the
  request's id, and the conversation goes on.
"""

from __future__ import annotations

import msgspec

from protocol.errors import (
    EmptyPrompt,
    FrameTooLarge,
    InvalidRequest,
    KvdError,
    LocalProtocolError,
    MalformedFrame,
    RemoteProtocolError,
    UnknownOp,
    UnsupportedVersion,
)
from protocol.framing import LineDecoder, decode_event, decode_request, encode_line
from protocol.messages import (
    VERSION,
    Error,
    Event,
    Generate,
    Request,
    RequestId,
    is_last,
)
from protocol.validation import explain

OPS = tuple(str(kind.__struct_config__.tag) for kind in Request.__args__)


class _Envelope(msgspec.Struct):
    """What can be read of a request that is not one."""

    id: RequestId
    v: int = VERSION
    op: str | None = None


_envelope = msgspec.json.Decoder(_Envelope)


class ServerSession:
    """The daemon's end.

    Call `receive` with what came in; write `refuse(error)` for each `Error` that it returns, and
    run the requests. Write `send(event)` for each event of a request. When `closing` is true,
    close after writing.
    """

    def __init__(self) -> None:
        self.closing = False
        self._lines = LineDecoder()
        self._open: dict[str, Request] = {}

    @property
    def open(self) -> dict[str, Request]:
        """The requests that still owe their last event, by id."""
        return self._open

    def receive(self, data: bytes) -> list[Request | Error]:
        """Take bytes; return the new requests, now in use, and the errors to `refuse` with."""
        if self.closing:
            return []
        found: list[Request | Error] = []
        for line in self._lines.feed(data):
            taken = self._take(line)
            found.append(taken)
            if isinstance(taken, Error) and not taken.id:
                return found
        if self._lines.fault is not None:
            found.append(self._close(self._lines.fault))
        return found

    def send(self, event: Event) -> bytes:
        """Encode an event of a request in use; its last event frees the id."""
        if event.id not in self._open:
            raise LocalProtocolError(f"no request {event.id!r} is open for {event!r}")
        if is_last(event):
            del self._open[event.id]
        return encode_line(event)

    def refuse(self, error: Error) -> bytes:
        """Encode an error that answers no open request (its id may be one that is in use)."""
        return encode_line(error)

    def _take(self, line: bytes) -> Request | Error:
        try:
            request = _parse(line)
        except _MessageFault as fault:
            return Error(id=fault.request_id, error=fault.error.info())
        except RemoteProtocolError as error:
            return self._close(error)
        if request.id in self._open:
            taken = InvalidRequest(
                f"id {request.id!r} is in use by another request of this connection", field="id"
            )
            return Error(id=request.id, error=taken.info())
        self._open[request.id] = request
        return request

    def _close(self, error: RemoteProtocolError) -> Error:
        self.closing = True
        return Error(id="", error=error.info())


class ClientSession:
    """The client's end: `request` encodes, `receive` decodes. Raises `RemoteProtocolError` only."""

    def __init__(self) -> None:
        self._lines = LineDecoder()
        self._open: set[str] = set()

    def request(self, request: Request) -> bytes:
        """Encode a request; its id must not be in use."""
        if request.id in self._open:
            raise LocalProtocolError(f"id {request.id!r} is in use")
        line = encode_line(request)
        if len(line) - 1 > self._lines.limit:
            raise FrameTooLarge(
                f"the request has {len(line) - 1} bytes; the limit is {self._lines.limit}",
                limit_bytes=self._lines.limit,
            )
        self._open.add(request.id)
        return line

    def receive(self, data: bytes) -> list[Event]:
        """Take bytes and return the events; an `Error` with an empty id ends the connection."""
        events = [self._take(decode_event(line)) for line in self._lines.feed(data)]
        if self._lines.fault is not None:
            raise self._lines.fault
        return events

    def _take(self, event: Event) -> Event:
        of_connection = isinstance(event, Error) and not event.id
        if not of_connection and event.id not in self._open:
            raise RemoteProtocolError(f"an event for {event.id!r}, which is not open")
        if is_last(event):
            self._open.discard(event.id)
        return event


class _MessageFault(Exception):
    """The line has an id to answer to, and something else is wrong with it."""

    def __init__(self, request_id: str, error: KvdError) -> None:
        super().__init__(error.message)
        self.request_id = request_id
        self.error = error


def _parse(line: bytes) -> Request:
    try:
        request = decode_request(line)
    except msgspec.ValidationError as error:
        raise _diagnose(line, error) from None
    if request.v != VERSION:
        raise _MessageFault(request.id, _version(request.v))
    if isinstance(request, Generate):
        _check_prompt(request)
    return request


def _diagnose(line: bytes, error: msgspec.ValidationError) -> Exception:
    """Say what is wrong with a line that is JSON and no request."""
    try:
        envelope = _envelope.decode(line)
    except msgspec.ValidationError as fault:
        return MalformedFrame(f"not a request: {explain(str(fault), _Envelope)[1]}")
    except (ValueError, RecursionError) as fault:
        # Bytes behind the first error that are not even JSON.
        return MalformedFrame(f"not a request: {fault}")
    if envelope.v != VERSION:
        return _MessageFault(envelope.id, _version(envelope.v))
    if envelope.op is not None and envelope.op not in OPS:
        unknown = UnknownOp(f"unknown op {envelope.op!r}; known: {', '.join(OPS)}", op=envelope.op)
        return _MessageFault(envelope.id, unknown)
    field, text = explain(str(error), Request)
    return _MessageFault(envelope.id, InvalidRequest(text, field=field))


def _version(version: int) -> UnsupportedVersion:
    return UnsupportedVersion(
        f"this daemon speaks version {VERSION}, the request is of version {version}",
        supported=[VERSION],
    )


def _check_prompt(request: Generate) -> None:
    given = [
        name for name in ("prompt", "messages", "tokens") if getattr(request, name) is not None
    ]
    if len(given) != 1:
        what = " and ".join(given) if given else "none"
        wrong = InvalidRequest(
            f"give exactly one of prompt, messages and tokens; got {what}", field="prompt"
        )
        raise _MessageFault(request.id, wrong)
    if not getattr(request, given[0]):
        empty = EmptyPrompt(f"{given[0]} is empty; give at least one token", field=given[0])
        raise _MessageFault(request.id, empty)
