"""One engine's part of the prefix store: it continues prompts from segments, and writes segments.

Both happen in pieces between steps, on files that a thread reads and writes. A prompt continues
from a segment if reading takes less time than prefill; if the file is damaged, missing or too slow,
it is prefilled. A checkpoint is written when the engine is idle or drains, or once a prompt has
continued from it. The daemon allows each segment first (`protocol.segments`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvd.worker.cache.segment_records import SegmentReader, SegmentRecords, can_extend
from kvd.worker.core.batch import Batch
from kvd.worker.core.memory_account import MemoryAccount
from kvd.worker.core.preemption import Preemption
from kvd.worker.core.rates import Rates
from kvd.worker.core.request import Request
from kvd.worker.prefix.queued_paths import Path
from kvd.worker.prefix.segment_files import WAIT_SECONDS, Reading, SegmentFiles
from kvd.worker.prefix.segment_index import Checkpoint, SegmentIndex
from kvd.worker.prefix.segment_io import Failed, Written
from kvd.worker.prefix.tree import Hit
from protocol.record_file import DamagedFile
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
    trusted: bool = True
    """False once a request on its path returned bad logits."""


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
        self._searched: dict[bool, tuple[int, int]] = {}
        """Checkpoints trusted and tokens hit at the last search that found nothing to write, while
        idle and while busy."""
        self._idle_since: float | None = None
        self._drain_until: float | None = None
        batch.on_untrusted = self.distrust

    def handle(self, command: SegmentCommand) -> None:
        """Take note of a change of the index, or of the answer to an offer."""
        if not isinstance(command, SegmentAllowed):
            self._index.change(command.added, command.removed)
            self._refused.clear()
            self._searched.clear()
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
        if tracked.lowered or tracked.full_prefill or not tracked.reads_store:
            return 0
        chain = self._index.find(tracked.path, above=hit.tokens)
        chain = [segment for segment in chain if segment.tokens > hit.tokens]
        if not chain:
            return 0
        prefill_s = self._rates.seconds("prefill", chain[0].tokens - hit.tokens)
        if self._rates.seconds("read", _bytes_to_read(chain)) >= prefill_s:
            return 0
        row = self._batch.new_row(request, hit)
        reading = self._files.read(chain)
        reader = SegmentReader(self._batch.cache, row, reading.segments)
        self._batch.transfers.reading[request.rid] = reader
        self._batch.scheduler.suspend(request.rid)
        job = self._read(request, hit.tokens, chain, reader, reading)
        self._preemption.start(request.rid, job)
        return chain[0].tokens

    def _read(
        self,
        request: Request,
        held: int,
        chain: list[SegmentInfo],
        reader: SegmentReader,
        reading: Reading,
    ) -> Iterator[None]:
        batch, rid, start = self._batch, request.rid, self._clock()
        prefill_s = self._rates.seconds("prefill", chain[0].tokens - held)
        latest = start + max(LEAST_READ_SECONDS, prefill_s)
        problem = ""
        try:
            steps = reader.run()
            while rid in batch.transfers.reading:
                if next(steps, self) is self:
                    break
                if self._clock() > latest:
                    problem = "reading takes longer than prefill"
                    break
                yield
            else:
                return  # the request has ended or was preempted, and its row is freed
        except DamagedFile as error:
            problem = str(error)[:200]
            key = reading.damaged or chain[reader.reading].key
            self._drop(key, problem)
        finally:
            reading.close()
        if request.tracked.lowered:
            problem = "the request was stepped down meanwhile"
        if problem:
            _log.warning("a prefix is prefilled instead of read: %s", problem)
            request.tracked.reads_store = False
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
        self._rates.note("read", _bytes_to_read(chain), seconds)
        self._batch.prefix_cache.count_read(tokens - held)
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
                nbytes=_bytes_to_read(chain),
            )
        )

    def distrust(self, path: Path) -> None:
        """Drop the segments on the path of a prompt whose request returned bad logits."""
        offer = self._offer
        for key in map(self._index.key, path):
            if key in self._index:
                self._drop(key, "a request on its path returned bad logits")
            elif offer is not None and offer.segment.key == key:
                offer.trusted = False

    def _drop(self, key: bytes, reason: str) -> None:
        """Report a segment as damaged: the daemon deletes it, and those that continue it."""
        self._batch.reports.append(SegmentDamaged(key=key, reason=reason))
        self._index.change([], [key])
        self._searched.clear()

    # Writing.

    @property
    def has_work(self) -> bool:
        """Whether `work` would do something now, or a drained worker need not stay any longer."""
        if self._clock() >= self._latest:
            return True
        if self._offer is not None:
            return self._offer.allowed and (self._is_idle or self._offer.checkpoint.hits > 0)
        return self._may_find(idle=self._is_idle)

    @property
    def next_deadline(self) -> float | None:
        """Return when `has_work` may become true by itself."""
        if self._drain_until is not None:
            return self._drain_until
        if self._idle_since is None or not (self._offer or self._may_find(idle=True)):
            return None
        return self._idle_since + IDLE_SECONDS

    @property
    def keeps_worker(self) -> bool:
        """Whether a drained worker should stay for what it still writes."""
        if self._drain_until is None or self._clock() >= self._latest:
            return False
        return self._offer is not None or self._may_find(idle=True)

    def drain(self, seconds: float) -> None:
        """Write from now on for at most so many seconds; later calls change nothing."""
        if self._drain_until is None:
            self._drain_until = self._clock() + seconds
            self._refused.clear()
            self._searched.clear()

    @property
    def _latest(self) -> float:
        """When writing must have ended."""
        return math.inf if self._drain_until is None else self._drain_until

    def note_idle(self, *, idle: bool) -> None:
        """Take note of whether the engine has requests."""
        if not idle:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = self._clock()

    @property
    def _is_idle(self) -> bool:
        if self._drain_until is not None:
            return True
        return self._idle_since is not None and self._clock() >= self._idle_since + IDLE_SECONDS

    def _may_find(self, *, idle: bool) -> bool:
        """Whether a search for a checkpoint to write may find one."""
        return self._news != self._searched.get(idle, (0, 0))

    @property
    def _news(self) -> tuple[int, int]:
        tree = self._batch.prefix_cache.tree
        return (0, 0) if tree is None else (tree.counts.trusted, tree.counts.hit_tokens)

    def work(self, seconds: float) -> None:
        """Offer the next checkpoint, or write for about ``seconds``; at least one record.

        Call it while the device is idle.
        """
        if self._offer is None:
            self._offer_next(idle=self._is_idle)
        elif self._writing is None and self._offer.allowed:
            self._writing = self._write(self._offer)
        end = self._clock() + seconds
        while self._writing is not None:
            if next(self._writing, self) is self:
                self._writing = self._offer = None
            if self._clock() >= end:
                return

    def _offer_next(self, *, idle: bool) -> None:
        """Offer the best checkpoint; while busy, only one that a prompt has continued from."""
        tree, news = self._batch.prefix_cache.tree, self._news
        if tree is None:
            return
        rate = 1 / max(self._rates.seconds("prefill", 1), 1e-9)
        for checkpoint, base in self._index.to_write(tree.checkpoints(), rate):
            key = self._index.key(checkpoint.names[-1])
            busy = not idle and not checkpoint.hits
            if busy or self._refused.get(key, -1) >= checkpoint.hits:
                continue
            records, segment = self._segment(key, checkpoint, base)
            if self._clock() + self._rates.seconds("write", segment.nbytes) > self._latest:
                continue
            self._offer = _Offer(checkpoint, segment, records)
            self._batch.reports.append(SegmentOffered(segment=segment, hits=checkpoint.hits))
            return
        self._searched[idle] = news

    def _segment(
        self, key: bytes, checkpoint: Checkpoint, base: SegmentInfo | None
    ) -> tuple[SegmentRecords, SegmentInfo]:
        cache = self._batch.cache
        if base is not None and not can_extend(cache, base.tokens, checkpoint.tokens):
            base = None
        start, base_key = (0, None) if base is None else (base.tokens, base.key)
        records = SegmentRecords(cache, checkpoint.snapshot, start)
        return records, SegmentInfo(
            key=key, base=base_key, tokens=checkpoint.tokens, nbytes=records.nbytes
        )

    def _write(self, offer: _Offer) -> Iterator[None]:
        segment, writer = offer.segment, self._files.write(offer.segment)
        result: Written | Failed | None = None
        try:
            for record in self._records(offer):
                while not writer.put(record) and (result := writer.poll()) is None:
                    yield
                yield
                if result is not None:
                    break
            writer.end()
            while (result := writer.poll()) is None:
                writer.wait(WAIT_SECONDS)
                yield
        except DamagedFile as error:
            result = Failed(str(error))
        finally:  # also if a step failed
            writer.close()
            if not isinstance(result, Written):
                reason = "a step failed" if result is None else result.reason
                self._refused[segment.key] = offer.checkpoint.hits
                self._batch.reports.append(SegmentAbandoned(key=segment.key, reason=reason))
        if isinstance(result, Written):
            segment = replace(segment, nbytes=result.nbytes)
            self._index.change([segment], [])
            self._batch.reports.append(SegmentWritten(segment=segment, seconds=result.seconds))
            if not offer.trusted:
                self._drop(segment.key, "a request on its path returned bad logits")

    def _records(self, offer: _Offer) -> Iterator[bytes]:
        """Yield the records while the checkpoint is in memory, unchanged."""
        snapshot, snapshots = offer.checkpoint.snapshot, self._batch.cache.snapshots
        records = iter(offer.records)
        while True:
            if not (snapshot.alive and snapshots.unlowered(snapshot)):
                raise DamagedFile("the checkpoint was evicted meanwhile")
            record = next(records, None)
            if record is None:
                return
            yield record


def _bytes_to_read(chain: Sequence[SegmentInfo]) -> int:
    """Return about how many bytes of these segments the first one's prefix needs."""
    tokens = chain[0].tokens
    return sum(one.nbytes * min(tokens, one.tokens) // one.tokens for one in chain)
