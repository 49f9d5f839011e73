"""The journal on disk: requests and their sent events survive the daemon.

One file of records (`kvd.host.journal_file`), which `DiskJournal` rewrites without expired ones.
When `write` returns, the record is in the system's cache: it survives this process, but not a power
loss. Neither damage nor a full disk stops the daemon's start. Damaged records are skipped, and a
copy of the file is kept. If the file cannot grow, further requests are served but not journaled.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
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
    ends_request,
)
from kvd.daemon.compaction import Compaction, Run, at_once, delete_unfinished
from kvd.host.home import unusable
from kvd.host.journal_file import Damage, Files, JournalFile, Scan, checksum, frame

LEAST_DEAD_BYTES = 4 * 1024 * 1024
"""The file is compacted when its dead bytes exceed both this and its live bytes."""
STEP_BYTES = 16 * 1024
"""Minimum bytes that a compaction reads with each record that is written: about 0.2 ms."""
STEP_RATIO = 8
"""Minimum bytes that a compaction reads for each byte that is written, so that it ends."""
MAX_STEP_BYTES = 512 * 1024
"""Maximum bytes that a compaction reads with one record, apart from the rest of the last one."""
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
        run: Run = at_once,
    ) -> None:
        """Open the journal in this folder; raises `ConfigError` if the folder is unusable.

        ``run`` runs what waits for the disk, `at_once` or `in_thread`.
        """
        self._path = folder / "requests"
        self._limit = limit_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._files = files
        self._run = run
        self._log = structlog.get_logger("kvd.daemon.journal")
        self._kept: dict[str, _Kept] = {}
        self._live = 0
        """Bytes of all kept requests."""
        self._ended: dict[str, float] = {}
        """End times of finished requests, whose clients may still attach to read the end."""
        self._warned = False
        self._retry_at = float("-inf")
        """When to compact again after the disk failed."""
        self._compaction: Compaction | None = None
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
        delete_unfinished(self._path, files)
        damage = self._restore(self._file)
        if self._file.size > self._live:
            self._begin_compaction(self._file, damage)
            self._continue_compaction(None)
        self._report(damage)

    def close(self) -> None:
        if self._compaction is not None:
            self._compaction.abandon()
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
        if not (self._has_room(record.rid, data) and self._append(data)):
            return False
        self._kept[record.rid] = _Kept()
        self._count(record.rid, data)
        return True

    def _continue(self, record: ReportReceived) -> bool:
        kept = self._kept.get(record.rid)
        if kept is None:
            return False
        # A worker may report more on a request whose choices have all ended: it has not expired.
        self._ended.pop(record.rid, None)
        if not ends_request(record.report):
            return self._append_report(record, kept)
        now = self._clock()
        written = self._append_report(replace(record, at=now), kept)
        # Set after the write, which drops expired requests: the clock may have jumped since.
        self._ended[record.rid] = now
        return written

    def _append_report(self, record: ReportReceived, kept: _Kept) -> bool:
        previous = kept.newest
        if previous is None:
            return False
        data = frame(_encode(replace(record, previous=previous)))
        room = self._has_room(record.rid, data)
        # A compaction may have found that an earlier record of the request is damaged.
        if not (room and kept.newest == previous and self._append(data)):
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

    def _drop_ended(self, rid: str, nbytes: int) -> None:
        """Drop finished requests except this one, oldest first, until the rest has ``nbytes``."""
        for ended in list(self._ended):
            if self._live <= nbytes:
                return
            if ended != rid:
                self._drop(ended)

    def _has_room(self, rid: str, data: bytes) -> bool:
        """Return whether the limit permits another record of a request; compact the file if needed.

        Before the file is full, finished requests are dropped, oldest first.
        """
        if self._file is None:
            return False
        self._expire()
        if self._compaction is None and self._frees_much(self._file, rid, len(data)):
            self._begin_compaction(self._file)
        if self._compaction is not None:
            full = self._file.size + len(data) > self._limit
            step = MAX_STEP_BYTES if full else max(STEP_BYTES, STEP_RATIO * len(data))
            # More than is appended, or a compaction would never catch up.
            self._continue_compaction(max(2 * len(data), min(step, MAX_STEP_BYTES)))
        if self._file.size + len(data) <= self._limit:
            return True
        self._warn(f"the journal has {self._file.size} bytes, and journal_limit is {self._limit}")
        return False

    def _frees_much(self, file: JournalFile, rid: str, nbytes: int) -> bool:
        """Return whether to compact the file for a record of ``nbytes``."""
        if 0 < self._retry_at - self._clock() <= _RETRY_S:  # more: the clock was set back
            return False
        # A compaction takes a while: it begins while there is still room for records.
        nearly_full = file.size + nbytes > self._limit * 7 // 8
        if nearly_full and nbytes <= self._limit:
            self._drop_ended(rid, self._limit * 5 // 8 - nbytes)
        dead = file.size - self._live
        return dead > max(LEAST_DEAD_BYTES, self._live) or (nearly_full and dead > self._limit // 8)

    def _append(self, data: bytes) -> bool:
        if self._file is None:
            return False
        try:
            self._file.append(data)
        except OSError as error:
            if self._compaction is not None:  # its new file may take the room
                self._end_compaction(error)
                return self._append(data)
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

    def _begin_compaction(self, file: JournalFile, found: Damage | None = None) -> None:
        try:
            self._compaction = Compaction(file, self._path, self._files, self._run, found)
        except OSError as error:
            self._end_compaction(error)

    def _continue_compaction(self, nbytes: int | None) -> None:
        """Read so many bytes of the old file; None: all, and wait for the disk.

        A damaged file is kept as a copy. If the disk fails, the old file stays in use.
        """
        compaction, old = self._compaction, self._file
        if compaction is None or old is None:
            return
        try:
            compaction.copy(nbytes, self._kept_bytes)
            fresh = compaction.install(wait=nbytes is None)
        except OSError as error:
            self._end_compaction(error)
            return
        if fresh is None:
            return
        self._run(old.close)  # deletes its content, which takes a while
        self._file, self._compaction, self._warned = fresh, None, False
        for rid, kept in self._kept.items():
            if (lost := kept.nbytes - compaction.sizes[rid]) > 0:
                self._live -= lost
                kept.nbytes -= lost
                kept.newest = None
        if compaction.found is None:
            self._report(compaction.damage)

    def _end_compaction(self, error: OSError) -> None:
        """Give up a compaction after the disk failed, and try again later."""
        if self._compaction is not None:
            self._compaction.abandon()
            self._compaction = None
        self._retry_at = self._clock() + _RETRY_S
        self._log.warning("the journal cannot be compacted", reason=error.strerror)

    def _kept_bytes(self, rid: str) -> int | None:
        kept = self._kept.get(rid)
        return None if kept is None else kept.nbytes

    def _restore(self, file: JournalFile) -> Damage:
        """Read `saved` from the file; return what was damaged."""
        damage, now = Damage(), self._clock()
        scan = Scan(file, damage)
        for record, data in scan.records():
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
                        scan.reject(rid, data)
                        continue
                    if ends_request(report):
                        self._ended[rid] = record.at
                    self._count(rid, data)
                case RequestDropped(rid=rid):
                    self._drop(rid)
        for rid, kept in self._kept.items():
            kept.newest = scan.newest.get(rid)
        self._expire()
        self.saved = {rid: saved for rid, saved in self.saved.items() if rid in self._kept}
        if self.saved:
            self._log.info("requests wait for their clients to attach", count=len(self.saved))
        return damage
