r"""The journal on disk: requests and their sent events survive the daemon.

One file of records, which `_compact` rewrites without expired ones. When `write` returns, the
record is in the system's cache: it survives this process, but not a power loss::

    kvd journal 2\n  then for each record  | length | crc32 | MessagePack ... |   big-endian

Reading stops at the first truncated or damaged record, which a dying daemon was writing. If the
disk is full or the file reaches its limit, further requests are served but not journaled.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import structlog

from actors.request_journal import (
    Record,
    ReportReceived,
    RequestDropped,
    RequestReceived,
    SavedRequest,
)
from kvd.host.home import unusable
from protocol.worker import RowFailed, RowFinished

MAGIC = b"kvd journal 2\n"
LEAST_DEAD_BYTES = 4 * 1024 * 1024
"""The file is compacted when its dead bytes exceed both this and its live bytes."""
_HEADER = struct.Struct(">II")
_MAX_RECORD = 64 * 1024 * 1024
"""Larger than any frame of a worker, so a longer record is damaged."""


class _RequestId(msgspec.Struct):
    rid: str


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Record).decode
_decode_rid = msgspec.msgpack.Decoder(_RequestId).decode


class DiskJournal:
    """A request journal in a file. Opening it restores `saved`; then it accepts `write`."""

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int,
        keep_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Open the journal in this folder; raises `ConfigError` if that fails."""
        self._path = folder / "requests"
        self._limit = limit_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._log = structlog.get_logger("kvd.daemon.journal")
        self._sizes: dict[str, int] = {}
        """Bytes of each kept request."""
        self._live = 0
        self._ended: dict[str, float] = {}
        """End times of finished requests, whose clients may still attach to read the end."""
        self._warned = False
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self.saved = self._read()
            self._compact()
        except OSError as error:
            raise unusable(self._path, error) from error

    def close(self) -> None:
        os.close(self._fd)

    def write(self, record: Record) -> None:
        """Append a record; records of requests that are not kept are ignored."""
        match record:
            case RequestReceived():
                record = msgspec.structs.replace(record, at=self._clock())
            case ReportReceived(rid=rid) | RequestDropped(rid=rid) if rid not in self._sizes:
                return
            case ReportReceived(rid=rid, report=RowFinished() | RowFailed()):
                self._ended[rid] = self._clock()
                record = msgspec.structs.replace(record, at=self._clock())
            case _:
                pass
        frame = _frame(_encode(record))
        room = isinstance(record, RequestDropped) or self._has_room(len(frame))
        if not room or not self._append(frame):
            self._stop_keeping(record.rid)
            return
        self._size += len(frame)
        if isinstance(record, RequestDropped):
            self._drop(record.rid)
        else:
            self._sizes[record.rid] = self._sizes.get(record.rid, 0) + len(frame)
            self._live += len(frame)

    def _stop_keeping(self, rid: str) -> None:
        """Drop a request, because one of its records could not be written."""
        frame = _frame(_encode(RequestDropped(rid)))
        if rid in self._sizes and self._append(frame):
            self._size += len(frame)
        self._drop(rid)

    def _drop(self, rid: str) -> None:
        self._live -= self._sizes.pop(rid, 0)
        self._ended.pop(rid, None)

    def _expire(self) -> None:
        """Drop requests that finished more than ``keep_s`` ago."""
        due = self._clock() - self._keep_s
        while self._ended:
            rid, at = next(iter(self._ended.items()))
            if at > due:
                return
            self._drop(rid)

    def _has_room(self, size: int) -> bool:
        self._expire()
        dead = self._size - self._live
        full = self._size + size > self._limit
        # Compact only if that frees many bytes, because it rewrites the whole file.
        if dead > max(LEAST_DEAD_BYTES, self._live) or (full and dead > self._limit // 8):
            with contextlib.suppress(OSError):  # the old file stays intact
                self._compact()
        if self._size + size <= self._limit:
            return True
        self._warn(f"the journal has {self._size} bytes, and journal_limit is {self._limit}")
        return False

    def _append(self, frame: bytes) -> bool:
        try:
            if os.pwrite(self._fd, frame, self._size) == len(frame):
                return True
            reason = "the disk is full"
        except OSError as error:
            reason = error.strerror or str(error)
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, self._size)
        self._warn(reason)
        return False

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            self._log.warning(
                "requests are served but no longer journaled: the journal cannot grow",
                reason=reason,
            )

    def _compact(self) -> None:
        """Rewrite the file with the kept requests only."""
        sizes: dict[str, int] = {}
        fresh = self._path.with_suffix(".new")
        fd = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(os.dup(fd), "wb") as stream:
                stream.write(MAGIC)
                for payload in self._payloads():
                    rid = _decode_rid(payload).rid
                    if rid in self._sizes:
                        frame = _frame(payload)
                        stream.write(frame)
                        sizes[rid] = sizes.get(rid, 0) + len(frame)
            fresh.replace(self._path)
        except BaseException:
            os.close(fd)
            fresh.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd, self._sizes, self._live = fd, sizes, sum(sizes.values())
        self._size = len(MAGIC) + self._live
        self._warned = False

    def _payloads(self) -> Iterator[bytes]:
        with os.fdopen(os.dup(self._fd), "rb") as stream:
            stream.seek(0)
            if stream.read(len(MAGIC)) != MAGIC:
                return
            while len(header := stream.read(_HEADER.size)) == _HEADER.size:
                length, checksum = _HEADER.unpack(header)
                if length > _MAX_RECORD:
                    return
                payload = stream.read(length)
                if len(payload) < length or zlib.crc32(payload) != checksum:
                    return
                yield payload

    def _read(self) -> dict[str, SavedRequest]:
        size = os.fstat(self._fd).st_size
        found: dict[str, SavedRequest] = {}
        intact, now = len(MAGIC), self._clock()
        for payload in self._payloads():
            intact += _HEADER.size + len(payload)
            try:
                self._restore(found, _decode(payload), now)
            except msgspec.MsgspecError as error:  # written by another version
                self._log.warning("journal record cannot be decoded", reason=str(error))
        for rid in [rid for rid, at in self._ended.items() if at + self._keep_s < now]:
            del found[rid], self._ended[rid]
        self._size = intact
        self._sizes = dict.fromkeys(found, 0)
        if size > intact:
            self._log.warning("the journal's end is damaged", lost_bytes=size - intact)
        if found:
            self._log.info("requests wait for their clients to attach", count=len(found))
        return found

    def _restore(self, found: dict[str, SavedRequest], record: Record, now: float) -> None:
        match record:
            case RequestReceived(rid=rid, model=model, submit=submit, at=at):
                left = None if submit.deadline_s is None else submit.deadline_s - (now - at)
                found[rid] = SavedRequest(model, submit, left)
            case ReportReceived(rid=rid, report=report) if rid in found:
                found[rid].apply_report(report)
                if isinstance(report, RowFinished | RowFailed):
                    self._ended[rid] = record.at
            case RequestDropped(rid=rid):
                found.pop(rid, None)
                self._ended.pop(rid, None)
            case _:
                pass


def _frame(payload: bytes) -> bytes:
    return _HEADER.pack(len(payload), zlib.crc32(payload)) + payload
