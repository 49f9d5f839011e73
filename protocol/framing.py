"""Bytes to messages and back: lines of JSON for clients, length-prefixed msgpack for workers.

Sans-io: bytes come in as arguments, messages go out as values. Knows the limits of a frame, and
nothing of conversations (`protocol.session`) or of sockets. Whatever the peer sends, only
`RemoteProtocolError` comes out.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

import msgspec

from protocol import messages
from protocol.errors import FrameTooLarge, MalformedFrame
from protocol.messages import Event, Request

if TYPE_CHECKING:
    from collections.abc import Callable

    from protocol.worker import Command, Report

T = TypeVar("T")

_HEADER = 4
"""Bytes of a frame's length, big-endian."""


class _Decoder(ABC):
    """What both framings share: once a frame was too large, the stream cannot be trusted."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.fault: FrameTooLarge | None = None
        """Set once a frame is over the limit; nothing more comes out then."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Take bytes and return the frames that are complete; look at `fault` afterwards."""
        if self.fault is not None:
            return []
        self._buffer += data
        frames, too_large = self._split()
        if too_large:
            self._buffer.clear()
            self.fault = FrameTooLarge(
                f"a frame has more than {self.limit} bytes; send less in one message",
                limit_bytes=self.limit,
            )
        return frames

    def receive(self, data: bytes) -> list[bytes]:
        """Do as `feed` does, but raise the fault.

        The complete frames before the fault are lost then; who needs them uses `feed`.
        """
        frames = self.feed(data)
        if self.fault is not None:
            raise self.fault
        return frames

    @abstractmethod
    def _split(self) -> tuple[list[bytes], bool]:
        """Return the complete frames, and whether one that is too large follows them."""


class LineDecoder(_Decoder):
    r"""Splits a byte stream into lines: without the ``\n`` or ``\r\n``, empty lines left out."""

    def __init__(self, limit: int = messages.MAX_FRAME_BYTES) -> None:
        super().__init__(limit)
        self._searched = 0
        """No newline before this index: long lines are not searched twice."""

    def _split(self) -> tuple[list[bytes], bool]:
        lines: list[bytes] = []
        start = 0
        while (end := self._buffer.find(b"\n", max(start, self._searched))) >= 0:
            if end - start > self.limit:
                return lines, True
            if line := bytes(self._buffer[start:end]).removesuffix(b"\r"):
                lines.append(line)
            start = end + 1
        del self._buffer[:start]
        self._searched = len(self._buffer)
        return lines, len(self._buffer) > self.limit


class FrameDecoder(_Decoder):
    """Splits a byte stream into frames: four bytes of length, then that many bytes."""

    def __init__(self, limit: int | None = None) -> None:
        from protocol.worker import MAX_FRAME_BYTES  # noqa: PLC0415 - as below

        super().__init__(MAX_FRAME_BYTES if limit is None else limit)

    def _split(self) -> tuple[list[bytes], bool]:
        frames: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _HEADER:
            body = start + _HEADER
            size = int.from_bytes(self._buffer[start:body], "big")
            if size > self.limit:
                return frames, True
            if len(self._buffer) - body < size:
                break
            frames.append(bytes(self._buffer[body : body + size]))
            start = body + size
        del self._buffer[:start]
        return frames, False


_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()


# A decoder takes some milliseconds to make; a client needs one of them, and no words of workers.


@functools.cache
def _requests() -> msgspec.json.Decoder[Request]:
    return msgspec.json.Decoder(Request)


@functools.cache
def _events() -> msgspec.json.Decoder[Event]:
    return msgspec.json.Decoder(Event)


@functools.cache
def _commands() -> msgspec.msgpack.Decoder[Command]:
    from protocol.worker import Command  # noqa: PLC0415

    return msgspec.msgpack.Decoder(Command)


@functools.cache
def _reports() -> msgspec.msgpack.Decoder[Report]:
    from protocol.worker import Report  # noqa: PLC0415

    return msgspec.msgpack.Decoder(Report)


def encode_line(message: Request | Event) -> bytes:
    """Encode a message for a client or a daemon, newline included."""
    return _json.encode(message) + b"\n"


def encode_frame(message: Command | Report) -> bytes:
    """Encode a message for a worker or a daemon, length included."""
    body = _msgpack.encode(message)
    return len(body).to_bytes(_HEADER, "big") + body


def decode_request(line: bytes) -> Request:
    """Decode what a client sent; `msgspec.ValidationError` says that it is JSON, but no request."""
    _check_utf8(line)
    return _guard(_requests().decode, line, let_through=msgspec.ValidationError)


def decode_event(line: bytes) -> Event:
    """Decode what a daemon sent."""
    _check_utf8(line)
    return _guard(_events().decode, line)


def decode_command(frame: bytes) -> Command:
    """Decode what the daemon sent to its worker."""
    return _guard(_commands().decode, frame)


def decode_report(frame: bytes) -> Report:
    """Decode what a worker sent."""
    return _guard(_reports().decode, frame)


class _Nothing(Exception):
    pass


def _guard(
    decode: Callable[[bytes], T], data: bytes, *, let_through: type[Exception] = _Nothing
) -> T:
    try:
        return decode(data)
    except let_through:
        raise
    except RecursionError as error:  # msgspec's own guard against nests of brackets
        raise MalformedFrame("a message is nested too deeply") from error
    except ValueError as error:  # msgspec.DecodeError and UnicodeDecodeError
        raise MalformedFrame(f"not a message: {error}") from error


def _check_utf8(line: bytes) -> None:
    # msgspec skips unknown fields unread, so their bytes would pass.
    if line.isascii():
        return
    try:
        str(line, "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedFrame(f"a line is not UTF-8: {error.reason} at byte {error.start}") from None
