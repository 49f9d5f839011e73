r"""The journal's file: records that are found again behind damage.

Each record is a frame, big-endian. There is no header of the whole file that could be damaged::

    | marker, 8 bytes | length | crc32 of the payload | crc32 of the 16 bytes before | payload |

The payload is a `Record` in MessagePack. The marker names the format's version, and begins with a
byte that text in UTF-8 never contains: a prompt cannot imitate a frame. Behind bytes that are no
intact frame, reading continues at the next marker. Every record except a request's first contains
the checksum of the request's record before it. After a lost record, the rest of that request is
therefore recognized and skipped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

import msgspec

from actors.request_journal import Record

MARKER = b"\xffkvd\r\nj3"
_HEADER = struct.Struct(">8sIII")
_CHECKED = struct.Struct(">8sII")
"""The part of the header that its own checksum covers."""
_MAX_RECORD_BYTES = 64 * 1024 * 1024
"""Larger than any frame of a worker, so a longer record is damaged."""
_BLOCK_BYTES = 256 * 1024
"""Bytes per read, and per write of many records."""
_SECTOR_BYTES = 4096
"""Bytes per read where a whole block cannot be read."""

T = TypeVar("T")


class Status(Protocol):
    """What `os.fstat` returns."""

    @property
    def st_size(self) -> int: ...


class Files(Protocol):
    """The functions of `os` that the journal uses; tests replace them by a disk that fails."""

    def makedirs(self, name: Path, mode: int, exist_ok: bool) -> None: ...
    def open(self, path: Path, flags: int, mode: int) -> int: ...
    def close(self, fd: int, /) -> None: ...
    def fstat(self, fd: int, /) -> Status: ...
    def pread(self, fd: int, length: int, offset: int, /) -> bytes: ...
    def pwrite(self, fd: int, data: bytes, offset: int, /) -> int: ...
    def ftruncate(self, fd: int, length: int, /) -> None: ...
    def fsync(self, fd: int) -> None: ...
    def replace(self, src: Path, dst: Path) -> None: ...
    def link(self, src: Path, dst: Path) -> None: ...
    def unlink(self, path: Path) -> None: ...


@dataclass
class Damage:
    """Records and bytes that were skipped while a file was read."""

    records: int = 0
    """Places without an intact record, and intact records that this version does not know."""
    nbytes: int = 0

    def add(self, nbytes: int) -> None:
        self.records += 1
        self.nbytes += nbytes


class JournalFile:
    """An open file of records; raises OSError if it cannot be opened."""

    def __init__(self, path: Path, flags: int = 0, files: Files = os) -> None:
        self._files = files
        self._fd = files.open(path, flags | os.O_CLOEXEC, 0o600)
        try:
            self.size = files.fstat(self._fd).st_size
            """Bytes of the file."""
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._files.close(self._fd)

    def sync(self) -> None:
        self._files.fsync(self._fd)

    def append(self, data: bytes) -> None:
        """Append the frame of a record; see `extend`."""
        self._write(data)

    def extend(self, frames: Iterable[bytes]) -> None:
        """Append many records. Raises OSError if not all of a write succeeds, and undoes it."""
        waiting = bytearray()
        for data in frames:
            waiting += data
            if len(waiting) >= _BLOCK_BYTES:
                self._write(bytes(waiting))
                waiting.clear()
        self._write(bytes(waiting))

    def records(self, damage: Damage) -> Iterator[tuple[Record, bytes]]:
        """Yield the usable records with their frames, and add all others to ``damage``.

        Records behind a lost record of the same request are neither.
        """
        return Scan(self, damage).records()

    def frames(self, at: int, stop: int) -> Iterator[tuple[bytes | None, int]]:
        """Yield the frames that begin in this range, or None for damage.

        Also yield how many bytes later the next one begins.
        """
        reader = _Reader(self._fd, self._files)
        while at < stop:
            data = _frame_at(reader, at, self.size)
            end = self.size if data is None else at + len(data)
            # The first bytes of the next marker may complete a frame that was cut off.
            begin = at + 1 if data is None else end - len(MARKER) + 1
            following = min(end, reader.find_marker(begin, end))
            yield data, following - at
            at = following

    def _write(self, data: bytes) -> None:
        failure: OSError | None = None
        try:
            if self._files.pwrite(self._fd, data, self.size) < len(data):
                failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            failure = error
        if failure is not None:
            with contextlib.suppress(OSError):
                self._files.ftruncate(self._fd, self.size)
            raise failure
        self.size += len(data)


class Head(msgspec.Struct, frozen=True):
    """The fields of a record by which it is found; decoding the rest takes most of the time."""

    t: Literal["request", "report", "dropped"]
    rid: str
    previous: int = 0


class Scan:
    """Reads the records of a file in their order, as many at once as its user wants.

    Adds what is no intact record to ``damage``. Skips records behind a lost one of their request.
    """

    def __init__(self, file: JournalFile, damage: Damage) -> None:
        self._file = file
        self._damage = damage
        self._at = 0
        self.newest: dict[str, int] = {}
        """Checksum of the newest record of each request."""

    @property
    def at_end(self) -> bool:
        return self._at >= self._file.size

    def heads(self, nbytes: int | None = None) -> Iterator[tuple[Head, bytes]]:
        """Yield the next records that begin within so many bytes, with their frames; None: all."""
        end = self._file.size
        stop = end if nbytes is None else min(end, self._at + nbytes)
        for data, size in self._file.frames(self._at, stop):
            self._at += size
            head = None if data is None else _decode(_head_decoder, data)
            if data is None or head is None:
                self._damage.add(size)
            elif head.t == "dropped":
                self.newest.pop(head.rid, None)
                yield head, data
            elif head.t == "request" or self.newest.get(head.rid) == head.previous:
                self.newest[head.rid] = checksum(data)
                yield head, data

    def records(self) -> Iterator[tuple[Record, bytes]]:
        """Yield all other records completely decoded, with their frames."""
        for head, data in self.heads():
            record = _decode(_decoder, data)
            if record is None:
                self.reject(head.rid, data)
            else:
                yield record, data

    def reject(self, rid: str, data: bytes) -> None:
        """Count a record that cannot be used as damage; skip the rest of its request."""
        self._damage.add(len(data))
        self.newest.pop(rid, None)


def frame(payload: bytes) -> bytes:
    """Return a record as it is in the file."""
    start = _CHECKED.pack(MARKER, len(payload), zlib.crc32(payload))
    return b"".join((start, zlib.crc32(start).to_bytes(4, "big"), payload))


def checksum(data: bytes) -> int:
    """Return the checksum of a frame's payload."""
    return int.from_bytes(data[12:16], "big")


_decoder: msgspec.msgpack.Decoder[Record] = msgspec.msgpack.Decoder(Record)
_head_decoder = msgspec.msgpack.Decoder(Head)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T | None:
    """Return the content of a frame, or None if another version wrote it."""
    try:
        return decoder.decode(memoryview(data)[_HEADER.size :])
    except Exception:  # noqa: BLE001 - no content of the file may stop the daemon's start
        return None


class _Reader:
    """Reads a file in blocks. Bytes that cannot be read are zeros."""

    def __init__(self, fd: int, files: Files) -> None:
        self._fd = fd
        self._files = files
        self._start = 0
        self._block = b""

    def read(self, at: int, size: int) -> bytes:
        """Return these bytes; fewer at the end of the file."""
        first = at - self._start
        if first < 0 or first + size > len(self._block):
            self._start, first = at, 0
            self._block = self._load(at, max(size, _BLOCK_BYTES))
        return self._block[first : first + size]

    def find_marker(self, at: int, end: int) -> int:
        """Return the position of the first marker from ``at`` on, or ``end``."""
        while at < end:
            self.read(at, len(MARKER))
            found = self._block.find(MARKER, at - self._start)
            if found >= 0:
                return self._start + found
            if len(self._block) < _BLOCK_BYTES:  # the file's end
                break
            at = self._start + len(self._block) - len(MARKER) + 1
        return end

    def _load(self, at: int, size: int) -> bytes:
        try:
            return self._files.pread(self._fd, size, at)
        except OSError:
            sectors = range(at, at + size, _SECTOR_BYTES)
            return b"".join(self._load_sector(one, at + size) for one in sectors)

    def _load_sector(self, at: int, end: int) -> bytes:
        size = min(_SECTOR_BYTES, end - at)
        try:
            return self._files.pread(self._fd, size, at)
        except OSError:
            return bytes(size)


def _frame_at(reader: _Reader, at: int, end: int) -> bytes | None:
    header = reader.read(at, _HEADER.size)
    if len(header) < _HEADER.size:
        return None
    marker, length, payload_checksum, header_checksum = _HEADER.unpack(header)
    if marker != MARKER or zlib.crc32(header[: _CHECKED.size]) != header_checksum:
        return None
    if length > min(_MAX_RECORD_BYTES, end - at - _HEADER.size):
        return None
    data = reader.read(at, _HEADER.size + length)
    return data if zlib.crc32(data[_HEADER.size :]) == payload_checksum else None
