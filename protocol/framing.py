"""Framing: lines of JSON for clients, length-prefixed msgpack for workers.

Sans-io: bytes are arguments, and messages are return values. Invalid input raises
`RemoteProtocolError`; only `decode_request` also raises `msgspec.ValidationError`.
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
"""Bytes of a frame's length field, big-endian."""


class _Decoder(ABC):
    """Base of both decoders: after a frame that is too large, the stream is unusable."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.fault: FrameTooLarge | None = None
        """Set after a frame exceeded the limit; no more frames are returned then."""
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Add bytes and return the complete frames; check `fault` afterwards."""
        if self.fault is not None:
            return []
        self._buffer += data
        frames, too_large = self._split()
        if too_large:
            self._buffer.clear()
            self.fault = FrameTooLarge(
                f"a message exceeds the limit of {self.limit} bytes; send less in one message",
                limit_bytes=self.limit,
            )
        return frames

    def receive(self, data: bytes) -> list[bytes]:
        """Like `feed`, but raise the fault if there is one; the frames before it are then lost."""
        frames = self.feed(data)
        if self.fault is not None:
            raise self.fault
        return frames

    @abstractmethod
    def _split(self) -> tuple[list[bytes], bool]:
        """Return the complete frames, and whether a frame that is too large follows."""


class LineDecoder(_Decoder):
    r"""Splits a byte stream into lines without ``\n`` or ``\r\n``; skips empty lines."""

    def __init__(self, limit: int = messages.MAX_FRAME_BYTES) -> None:
        super().__init__(limit)
        self._searched = 0
        """Bytes at the start of the buffer without a newline; they are not searched again."""

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
    """Splits a byte stream into frames of a four-byte length and that many bytes."""

    def __init__(self, limit: int | None = None) -> None:
        from protocol.worker import MAX_FRAME_BYTES  # noqa: PLC0415 - clients do not need it

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


# Constructed at first use: each decoder takes milliseconds, and a client needs only one.


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
    """Encode a message between client and daemon, with its newline."""
    return _json.encode(message) + b"\n"


def encode_frame(message: Command | Report) -> bytes:
    """Encode a message between daemon and worker, with its length."""
    body = _msgpack.encode(message)
    return len(body).to_bytes(_HEADER, "big") + body


def decode_request(line: bytes) -> Request:
    """Decode a client's line; raises `msgspec.ValidationError` if it is JSON, but no request."""
    _check_utf8(line)
    return _guard(_requests().decode, line, let_through=msgspec.ValidationError)


def decode_event(line: bytes) -> Event:
    _check_utf8(line)
    return _guard(_events().decode, line)


def decode_command(frame: bytes) -> Command:
    return _guard(_commands().decode, frame)


def decode_report(frame: bytes) -> Report:
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
    except RecursionError as error:  # msgspec's guard against deep nesting
        raise MalformedFrame("a message is nested too deeply") from error
    except ValueError as error:  # msgspec.DecodeError and UnicodeDecodeError
        raise MalformedFrame(f"not a message: {error}") from error


def _check_utf8(line: bytes) -> None:
    # msgspec skips unknown fields without reading them, so invalid bytes there would pass.
    if line.isascii():
        return
    try:
        str(line, "utf-8")
    except UnicodeDecodeError as error:
        raise MalformedFrame(f"a line is not UTF-8: {error.reason} at byte {error.start}") from None
