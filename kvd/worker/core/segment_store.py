"""One engine's part of the prefix store: prompts continue from segments, and checkpoints become some.

Both happen in pieces between steps, on files that a thread reads and writes. A prompt continues
from a segment if reading takes less time than prefill; if the file is damaged, missing or too slow,
it is prefilled. A checkpoint is written when the engine is idle or drains, or once a prompt has
continued from it. The daemon allows each segment first (`protocol.segments`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvd.worker.cache.segment_records import SegmentReader, SegmentRecords, can_extend
from kvd.worker.cache.snapshot_records import DamagedRecord
from kvd.worker.core.batch import Batch
from kvd.worker.core.memory_account import MemoryAccount
from kvd.worker.core.preemption import Preemption
from kvd.worker.core.rates import Rates
from kvd.worker.core.request import Request
from kvd.worker.prefix.segment_files import SegmentFiles, Writing
from kvd.worker.prefix.segment_index import Checkpoint, SegmentIndex
from kvd.worker.prefix.tree import Hit
from protocol.segments import SegmentInfo
from protocol.worker import (
    SegmentAbandoned,
    SegmentAllowed,
    SegmentCommand,
    SegmentDamaged,
    SegmentOffered,
    SegmentUsed,
    SegmentWritten,
)

_log = logging.getLogger("kvd.worker")

IDLE_SECONDS = 0.5
"""Seconds without a request after which checkpoints are written."""
LEAST_READ_SECONDS = 1.0
"""Seconds that a read may take even if prefill is estimated to take less."""


@dataclass(eq=False)
class _Offer:
    """A checkpoint that is offered to the daemon, or being written."""

    checkpoint: Checkpoint
    segment: SegmentInfo
    records: SegmentRecords
    allowed: bool = False


class SegmentStore:
    """The segments of one engine.

    ``rates``: what this process has measured. ``clock``: monotonic seconds.
    """

    def __init__(
        self,
        batch: Batch,
        memory: MemoryAccount,
        preemption: Preemption,
        rates: Rates,
        index: SegmentIndex,
        files: SegmentFiles,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batch = batch
        self._memory = memory
        self._preemption = preemption
        self._rates = rates
        self._index = index
        self._files = files
        self._clock = clock
        self._refused: dict[bytes, int] = {}
        """Keys that the daemon refused, and the checkpoint's hits at that time."""
        self._offer: _Offer | None = None
        self._writing: Iterator[None] | None = None
        self._searched_at = (-1, -1)
        """Checkpoints stored and hits at the last search that found nothing to write."""
        self._idle_since: float | None = None
        self._drain_until: float | None = None

    def handle(self, command: SegmentCommand) -> None:
        """Take note of a change of the index, or of the answer to an offer."""
        if not isinstance(command, SegmentAllowed):
            self._index.change(command.added, command.removed)
            self._refused.clear()
            self._searched_at = (-1, -1)
        elif (offer := self._offer) is not None and offer.segment.key == command.key:
            if command.allowed:
                offer.allowed = True
            else:
                self._refused[command.key] = offer.checkpoint.hits
                self._offer = None

    # Reading.

    def restore(self, request: Request, hit: Hit) -> int:
        """Begin to read the longest stored beginning of a prompt; return its tokens.

        0: nothing is read, because a checkpoint in memory (``hit``) is as long, or because prefill
        is faster. The request is suspended until the end of the read.
        """
        tracked = request.tracked
        if tracked.lowered or tracked.full_prefill:
            return 0
        chain = self._index.find(tracked.path, above=hit.tokens)
        chain = [segment for segment in chain if segment.tokens > hit.tokens]
        if not chain:
            return 0
        prefill_s = self._rates.seconds("prefill", chain[0].tokens - hit.tokens)
        if self._rates.seconds("read", sum(segment.nbytes for segment in chain)) >= prefill_s:
            return 0
        row = self._batch.new_row(request, hit)
        reading = self._files.read(chain)
        reader = SegmentReader(self._batch.cache, row, reading.segments)
        self._batch.transfers.reading[request.rid] = reader
        self._batch.scheduler.suspend(request.rid)
        job = self._read(request, hit.tokens, chain, reader, prefill_s)
        self._preemption.start(request.rid, _closing(job, reading.close))
        return chain[0].tokens

    def _read(
        self,
        request: Request,
        held: int,
        chain: list[SegmentInfo],
        reader: SegmentReader,
        prefill_s: float,
    ) -> Iterator[None]:
        batch, rid, start = self._batch, request.rid, self._clock()
        latest = start + max(LEAST_READ_SECONDS, prefill_s)
        try:
            steps = reader.run()
            while next(steps, self) is not self:
                if rid not in batch.transfers.reading:
                    return  # the request has ended or is preempted, and its reader is discarded
                if self._clock() > latest:
                    raise TimeoutError("reading takes longer than prefill")
                yield
            if rid not in batch.transfers.reading:
                return
            if request.tracked.lowered:
                raise TimeoutError("the request was stepped down meanwhile")
        except (DamagedRecord, OSError) as error:
            _log.warning("a prefix is prefilled instead of read: %s", error)
            if not isinstance(error, TimeoutError):
                batch.reports.append(
                    SegmentDamaged(key=chain[reader.reading].key, reason=str(error)[:200])
                )
                self._index.change([], [chain[reader.reading].key])
            reader.forget()
            batch.start_over(request)
        else:
            self._finish_read(request, held, chain, reader, self._clock() - start)
        del batch.transfers.reading[rid]
        batch.scheduler.resume(rid)

    def _finish_read(
        self,
        request: Request,
        held: int,
        chain: list[SegmentInfo],
        reader: SegmentReader,
        seconds: float,
    ) -> None:
        tokens = chain[0].tokens
        self._rates.note("read", sum(segment.nbytes for segment in chain), seconds)
        self._batch.take_row(request, reader.sequences[0], tokens)
        self._batch.prefix_cache.prefilled(
            request.tracked, tokens, request.row, self._memory.spare_bytes
        )
        self._batch.reports.append(
            SegmentUsed(
                key=chain[0].key,
                tokens=tokens - held,
                seconds=seconds,
                prefill_s=self._rates.seconds("prefill", tokens - held),
            )
        )

    # Writing.

    @property
    def has_work(self) -> bool:
        """Whether `work` would do something now."""
        if self._writing is not None:
            return self._may_write
        if self._offer is not None:
            return self._offer.allowed and self._may_write
        return self._may_write and self._has_news

    @property
    def next_deadline(self) -> float | None:
        """Return when `has_work` may become true by itself."""
        if self._drain_until is not None:
            return self._drain_until
        waits = self._idle_since is not None and self._offer is None and self._has_news
        return self._idle_since + IDLE_SECONDS if waits and self._idle_since else None

    @property
    def keeps_worker(self) -> bool:
        """Whether a drained worker should stay for what it still writes."""
        if self._drain_until is None or self._clock() >= self._drain_until:
            return False
        return self._writing is not None or self._offer is not None or self._has_news

    def drain(self, seconds: float) -> None:
        """Write what is worth it within so many seconds, although no request uses it."""
        self._drain_until = self._clock() + seconds
        self._refused.clear()

    def note_idle(self, *, idle: bool) -> None:
        """Take note of whether the engine has requests."""
        if not idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._clock()

    @property
    def _may_write(self) -> bool:
        offer = self._offer
        if self._drain_until is not None or (offer is not None and offer.checkpoint.hits):
            return True
        since = self._idle_since
        return since is not None and self._clock() >= since + IDLE_SECONDS

    @property
    def _has_news(self) -> bool:
        return self._news != self._searched_at

    @property
    def _news(self) -> tuple[int, int]:
        tree = self._batch.prefix_cache.tree
        return (-1, -1) if tree is None else (tree.counts.stored, tree.counts.hit_tokens)

    def work(self, seconds: float) -> None:
        """Offer the next checkpoint, or write for about ``seconds``; at least one record.

        Call it while the device is idle.
        """
        if self._writing is None and self._offer is None:
            self._offer_next()
        elif self._writing is None and self._offer is not None and self._offer.allowed:
            self._writing = self._write(self._offer)
        end = self._clock() + seconds
        while self._writing is not None:
            if next(self._writing, self) is self:
                self._writing = self._offer = None
            if self._clock() >= end:
                return

    def _offer_next(self) -> None:
        tree, news = self._batch.prefix_cache.tree, self._news
        if tree is None:
            return
        rate = 1 / max(self._rates.seconds("prefill", 1), 1e-9)
        for checkpoint, base in self._index.to_write(tree.checkpoints(), rate):
            key = self._index.key(checkpoint.names[-1])
            if self._refused.get(key, -1) >= checkpoint.hits:
                continue
            if base is not None and not can_extend(
                self._batch.cache, base.tokens, checkpoint.tokens
            ):
                base = None
            records = SegmentRecords(
                self._batch.cache, checkpoint.snapshot, base.tokens if base else 0
            )
            segment = SegmentInfo(
                key=key,
                base=base.key if base else None,
                tokens=checkpoint.tokens,
                nbytes=records.nbytes,
            )
            self._offer = _Offer(checkpoint, segment, records)
            self._batch.reports.append(SegmentOffered(segment=segment, hits=checkpoint.hits))
            return
        self._searched_at = news

    def _write(self, offer: _Offer) -> Iterator[None]:
        segment, start = offer.segment, self._clock()
        writing = None
        try:
            writing = self._files.write(segment)
            for record in self._records(offer):
                while not writing.put(record):
                    yield
                yield
            while (nbytes := writing.finished()) is None:
                yield
        except (DamagedRecord, OSError) as error:
            if writing is not None:
                writing.abort()
            self._refused[segment.key] = offer.checkpoint.hits
            reason = str(error)[:200]
            self._batch.reports.append(SegmentAbandoned(key=segment.key, reason=reason))
            return
        segment = SegmentInfo(
            key=segment.key, base=segment.base, tokens=segment.tokens, nbytes=nbytes
        )
        self._index.change([segment], [])
        seconds = self._clock() - start
        self._batch.reports.append(SegmentWritten(segment=segment, seconds=seconds))

    def _records(self, offer: _Offer) -> Iterator[bytes]:
        """Yield the records while the checkpoint is in memory, unchanged."""
        snapshot, snapshots = offer.checkpoint.snapshot, self._batch.cache.snapshots
        records = iter(offer.records)
        while True:
            if not (snapshot.alive and snapshots.unlowered(snapshot)):
                raise DamagedRecord("the checkpoint was evicted meanwhile")
            record = next(records, None)
            if record is None:
                return
            yield record

    def close(self) -> None:
        self._files.close()


def _closing(job: Iterator[None], close: Callable[[], None]) -> Iterator[None]:
    try:
        yield from job
    finally:
        close()
