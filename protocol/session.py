"""One connection between client and daemon, from either end: bytes in, messages out. Sans-io.

The server distinguishes two kinds of faults:

* faults of a *frame* (too large, not UTF-8, not JSON, not an object, no usable id). The error has
  an empty id and `ServerSession.closing` becomes true: send the error, then close;
* faults of a *message* (unknown op, invalid field, unsupported version, id in use). The error has
  the request's id, and the connection continues.
"""

from __future__ import annotations

import msgspec

from protocol import errors
from protocol.chat_checks import check_chat, check_grammar
from protocol.framing import LineDecoder, decode_event, decode_request, encode_line
from protocol.message_base import VERSION, RequestId
from protocol.messages import Error, Event, Generate, Request, Tokenize, is_last
from protocol.validation import describe_error

OPS = tuple(str(kind.__struct_config__.tag) for kind in Request.__args__)


class _Envelope(msgspec.Struct):
    """The fields that the reply to an invalid request is built from."""

    id: RequestId
    v: int = VERSION
    op: str | None = None


_envelope = msgspec.json.Decoder(_Envelope)


class ServerSession:
    """The daemon's end.

    Write `refuse(error)` for each `Error` that `receive` returns, and `send(event)` for each event
    of a request. When `closing` is true, close the connection after writing.
    """

    def __init__(self) -> None:
        self.closing = False
        self.open: dict[str, Request] = {}
        """Requests whose last event has not been sent, by id."""
        self._lines = LineDecoder()

    def receive(self, data: bytes) -> list[Request | Error]:
        """Decode bytes; return new requests, whose ids are now in use, and errors for `refuse`."""
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
        """Encode an event of an open request; the last event closes the request."""
        if event.id not in self.open:
            raise errors.LocalProtocolError(f"no request {event.id!r} is open for {event!r}")
        if is_last(event):
            del self.open[event.id]
        return encode_line(event)

    def refuse(self, error: Error) -> bytes:
        """Encode an error from `receive`. An open request with the same id stays open."""
        return encode_line(error)

    def _take(self, line: bytes) -> Request | Error:
        try:
            request = _parse(line)
        except _MessageFault as fault:
            return Error(id=fault.request_id, error=fault.error.info())
        except errors.RemoteProtocolError as error:
            return self._close(error)
        if request.id in self.open:
            taken = errors.InvalidRequest(
                f"id {request.id!r} is in use by another request of this connection", field="id"
            )
            return Error(id=request.id, error=taken.info())
        self.open[request.id] = request
        return request

    def _close(self, error: errors.RemoteProtocolError) -> Error:
        self.closing = True
        return Error(id="", error=error.info())


class ClientSession:
    """The client's end: `request` encodes, `receive` decodes and raises `RemoteProtocolError`."""

    def __init__(self) -> None:
        self._lines = LineDecoder()
        self._open: set[str] = set()

    def request(self, request: Request) -> bytes:
        """Encode a request, whose id must not be in use."""
        if request.id in self._open:
            raise errors.LocalProtocolError(f"id {request.id!r} is in use")
        line = encode_line(request)
        if len(line) - 1 > self._lines.limit:
            raise errors.FrameTooLarge(
                f"the request has {len(line) - 1} bytes; the limit is {self._lines.limit};"
                " send less text",
                limit_bytes=self._lines.limit,
            )
        self._open.add(request.id)
        return line

    def receive(self, data: bytes) -> list[Event]:
        """Decode bytes to events; an `Error` with an empty id ends the connection."""
        events = [self._take(decode_event(line)) for line in self._lines.feed(data)]
        if self._lines.fault is not None:
            raise self._lines.fault
        return events

    def _take(self, event: Event) -> Event:
        of_connection = isinstance(event, Error) and not event.id
        if not of_connection and event.id not in self._open:
            raise errors.RemoteProtocolError(
                f"an event for request {event.id!r}, which is not open"
            )
        if is_last(event):
            self._open.discard(event.id)
        return event


class _MessageFault(Exception):
    """The line has an id for the answer, but is not a valid request."""

    def __init__(self, request_id: str, error: errors.KvdError) -> None:
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
    if isinstance(request, Generate | Tokenize):
        _check_chat(request)
    return request


def _diagnose(line: bytes, error: msgspec.ValidationError) -> Exception:
    """Return the fault of a line that is valid JSON, but no request."""
    try:
        envelope = _envelope.decode(line)
    except msgspec.ValidationError as fault:
        return errors.MalformedFrame(f"not a request: {describe_error(str(fault), _Envelope)[1]}")
    except (ValueError, RecursionError) as fault:
        # Decoding stopped at `error`, so the rest of the line may be invalid JSON.
        return errors.MalformedFrame(f"not a request: {fault}")
    if envelope.v != VERSION:
        return _MessageFault(envelope.id, _version(envelope.v))
    if envelope.op is not None and envelope.op not in OPS:
        unknown = errors.UnknownOp(
            f"unknown op {envelope.op!r}; known: {', '.join(OPS)}", op=envelope.op
        )
        return _MessageFault(envelope.id, unknown)
    field, text = describe_error(str(error), Request)
    return _MessageFault(envelope.id, errors.InvalidRequest(text, field=field))


def _version(version: int) -> errors.UnsupportedVersion:
    return errors.UnsupportedVersion(
        f"the request uses protocol version {version}; this daemon supports version {VERSION}",
        supported=[VERSION],
    )


def _check_prompt(request: Generate) -> None:
    given = [
        name for name in ("prompt", "messages", "tokens") if getattr(request, name) is not None
    ]
    if len(given) != 1:
        found = " and ".join(given) if given else "none"
        wrong = errors.InvalidRequest(
            f"give exactly one of prompt, messages and tokens; got {found}", field="prompt"
        )
        raise _MessageFault(request.id, wrong)
    if not getattr(request, given[0]):
        empty = errors.EmptyPrompt(f"{given[0]} is empty; give at least one token", field=given[0])
        raise _MessageFault(request.id, empty)


def _check_chat(request: Generate | Tokenize) -> None:
    try:
        check_chat(request.chat, has_messages=request.messages is not None)
        if isinstance(request, Generate) and request.grammar is not None:
            check_grammar(request.grammar)
    except errors.InvalidRequest as error:
        raise _MessageFault(request.id, error) from None
