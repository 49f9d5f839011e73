"""The journal on disk: requests and their sent events survive the daemon.

One file of records (`kvd.host.journal_file`), which `DiskJournal` rewrites without expired ones.
When `write` returns, the record is in the system's cache: it survives this process, but not a power
loss. Neither damage nor a full disk stops the daemon's start. Damaged records are skipped, and a
copy of the file is kept. If the file cannot grow, further requests are served but not journaled.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog
from msgspec.structs import replace

from actors.request_journal import (
    Record,
    ReportReceived,
    RequestDropped,
    RequestReceived,
    SavedRequest,
)
from kvd.host.home import unusable
from kvd.host.journal_file import Damage, Files, JournalFile, checksum, frame
from protocol.worker import RowFailed, RowFinished

LEAST_DEAD_BYTES = 4 * 1024 * 1024
"""The file is compacted when its dead bytes exceed both this and its live bytes."""
_DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
"""Errors of the disk. Any other error of the journal's folder is one of the configuration."""
_RETRY_S = 60.0
"""Seconds until the next attempt to compact the file after the disk failed."""
_encode = msgspec.msgpack.Encoder().encode


@dataclass
class _Kept:
    """A request in the file."""

    nbytes: int = 0
    newest: int | None = None
    """Checksum of its newest record; None after a record that could not be written."""


class DiskJournal:
    """A request journal in a file. Opening it restores `saved`; then it accepts `write`."""

    def __init__(
        self,
        folder: Path,
        *,
        limit_bytes: int,
        keep_s: float,
        clock: Callable[[], float] = time.time,
        files: Files = os,
    ) -> None:
        """Open the journal in this folder; raises `ConfigError` if the folder is unusable."""
        self._path = folder / "requests"
        self._limit = limit_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._files = files
        self._log = structlog.get_logger("kvd.daemon.journal")
        self._kept: dict[str, _Kept] = {}
        self._live = 0
        """Bytes of all kept requests."""
        self._ended: dict[str, float] = {}
        """End times of finished requests, whose clients may still attach to read the end."""
        self._warned = False
        self._retry_at = float("-inf")
        """When to compact again after the disk failed."""
        self.saved: dict[str, SavedRequest] = {}
        self._file: JournalFile | None = None
        """None if the disk failed at the start: then nothing is journaled."""
        try:
            files.makedirs(folder, 0o700, exist_ok=True)
            self._file = JournalFile(self._path, os.O_RDWR | os.O_CREAT, files)
        except OSError as error:
            if error.errno not in _DISK_FAULTS:
                raise unusable(self._path, error) from error
            self._warn(error)
            return
        damage = self._restore(self._file)
        if self._file.size > self._live:
            self._compact(self._file)
        self._report(damage)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def write(self, record: Record) -> bool:
        """Append a record; return whether the file contains it.

        Reports on requests that are not in the file are ignored. After a report that cannot be
        written, no more reports on its request are: the next daemon continues from those before.
        """
        match record:
            case RequestReceived():
                return self._add(record)
            case ReportReceived():
                return self._continue(record)
            case RequestDropped():
                known = record.rid in self._kept
                self._drop(record.rid)
                return known and self._append(frame(_encode(record)))

    def _add(self, record: RequestReceived) -> bool:
        data = frame(_encode(replace(record, at=self._clock())))
        if not (self._has_room(data) and self._append(data)):
            return False
        self._kept[record.rid] = _Kept()
        self._count(record.rid, data)
        return True

    def _continue(self, record: ReportReceived) -> bool:
        kept = self._kept.get(record.rid)
        if kept is None:
            return False
        if not isinstance(record.report, RowFinished | RowFailed):
            return self._append_report(record, kept)
        now = self._clock()
        written = self._append_report(replace(record, at=now), kept)
        # Set after the write, which drops expired requests: the clock may have jumped since.
        self._ended[record.rid] = now
        return written

    def _append_report(self, record: ReportReceived, kept: _Kept) -> bool:
        if kept.newest is None:
            return False
        data = frame(_encode(replace(record, previous=kept.newest)))
        if not (self._has_room(data) and self._append(data)):
            kept.newest = None
            return False
        self._count(record.rid, data)
        return True

    def _count(self, rid: str, data: bytes) -> None:
        """Count a record in the file that belongs to a kept request."""
        kept = self._kept[rid]
        kept.newest = checksum(data)
        kept.nbytes += len(data)
        self._live += len(data)

    def _drop(self, rid: str) -> None:
        if (kept := self._kept.pop(rid, None)) is not None:
            self._live -= kept.nbytes
        self._ended.pop(rid, None)

    def _expire(self) -> None:
        """Drop requests that finished more than ``keep_s`` ago."""
        now = self._clock()
        if self._ended and next(iter(self._ended.values())) > now:  # the clock was set back
            self._ended = {rid: min(at, now) for rid, at in self._ended.items()}
        while self._ended:
            rid, at = next(iter(self._ended.items()))
            if at > now - self._keep_s:
                return
            self._drop(rid)

    def _has_room(self, data: bytes) -> bool:
        """Return whether the limit permits another record; compact the file if that frees much."""
        if self._file is None:
            return False
        self._expire()
        size, dead = self._file.size + len(data), self._file.size - self._live
        # Compact only if that frees many bytes, because it rewrites the whole file.
        much = dead > max(LEAST_DEAD_BYTES, self._live)
        if (much or (size > self._limit and dead > self._limit // 8)) and (
            self._clock() >= self._retry_at
        ):
            self._report(self._compact(self._file))
            size = self._file.size + len(data)
        if size <= self._limit:
            return True
        self._warn(f"the journal has {self._file.size} bytes, and journal_limit is {self._limit}")
        return False

    def _append(self, data: bytes) -> bool:
        if self._file is None:
            return False
        try:
            self._file.append(data)
        except OSError as error:
            self._warn(error)
            return False
        return True

    def _warn(self, reason: OSError | str) -> None:
        if isinstance(reason, OSError):
            reason = reason.strerror or str(reason)
        if not self._warned:
            self._warned = True
            self._log.warning(
                "requests are served but no longer journaled: the journal cannot grow",
                reason=reason,
            )

    def _report(self, damage: Damage) -> None:
        if damage.records:
            self._log.warning(
                "the journal is damaged, or another version wrote it: all other records are in "
                "use; `kvctl doctor` describes the damage",
                records=damage.records,
                bytes=damage.nbytes,
            )

    def _compact(self, file: JournalFile) -> Damage:
        """Rewrite the file with the kept requests only, and return what was damaged.

        A damaged file is kept as a copy. If the disk fails, the old file stays in use.
        """
        damage, sizes, path = Damage(), Counter[str](), self._path.with_suffix(".new")
        try:
            fresh = JournalFile(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, self._files)
            try:
                fresh.extend(self._kept_frames(file, sizes, damage))
                fresh.sync()  # without it, a power loss could leave an empty file of this name
                if damage.records:
                    self._keep_copy()
                self._files.replace(path, self._path)
            except BaseException:
                fresh.close()
                with contextlib.suppress(OSError):
                    self._files.unlink(path)
                raise
        except OSError as error:
            self._retry_at = self._clock() + _RETRY_S
            self._log.warning("the journal cannot be compacted", reason=error.strerror)
            return damage
        file.close()
        self._file, self._live, self._warned = fresh, sizes.total(), False
        for rid, kept in self._kept.items():
            kept.nbytes = sizes[rid]
        return damage

    def _kept_frames(
        self, file: JournalFile, sizes: Counter[str], damage: Damage
    ) -> Iterator[bytes]:
        for record, data in file.records(damage):
            if record.rid in self._kept and not isinstance(record, RequestDropped):
                sizes[record.rid] += len(data)
                yield data

    def _keep_copy(self) -> None:
        """Give the file a second name, in place of an older copy; without it if the disk fails."""
        copy = self._path.with_suffix(".damaged")
        with contextlib.suppress(OSError):
            self._files.unlink(copy)
        with contextlib.suppress(OSError):
            self._files.link(self._path, copy)

    def _restore(self, file: JournalFile) -> Damage:
        """Read `saved` from the file; return what was damaged."""
        damage, now = Damage(), self._clock()
        for record, data in file.records(damage):
            match record:
                case RequestReceived(rid=rid, model=model, submit=submit, at=at):
                    self._drop(rid)
                    # If the clock was set back, no time counts as passed.
                    passed = max(0.0, now - at)
                    left = None if submit.deadline_s is None else submit.deadline_s - passed
                    self.saved[rid] = SavedRequest(model, submit, left)
                    self._kept[rid] = _Kept()
                    self._count(rid, data)
                case ReportReceived(rid=rid, report=report):
                    try:
                        self.saved[rid].apply_report(report)
                    except LookupError:  # a choice that the request does not have
                        damage.add(len(data))
                    if isinstance(report, RowFinished | RowFailed):
                        self._ended[rid] = record.at
                    self._count(rid, data)
                case RequestDropped(rid=rid):
                    self._drop(rid)
        self._expire()
        self.saved = {rid: saved for rid, saved in self.saved.items() if rid in self._kept}
        if self.saved:
            self._log.info("requests wait for their clients to attach", count=len(self.saved))
        return damage
