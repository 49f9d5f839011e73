"""Writes an engine's checkpoints as segments, and knows which segments there are.

The engine offers one checkpoint at a time to the daemon, and writes it once it is allowed
(`protocol.segments`). It offers the checkpoints from which a prompt has continued at any time, and
the others when it is idle or drains. Once memory has evicted a checkpoint, it offers the others
while it is busy too, because they may be next.

Records are copied between steps, and a thread writes them. The offer ends when the thread does,
because only then is it known whether there is a file. A disk that hangs therefore stops further
offers, and nothing else.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from kvd.worker.cache.segment_records import SegmentRecords, can_extend
from kvd.worker.core.batch import Batch
from kvd.worker.core.rates import Rates
from kvd.worker.core.staging_memory import StagingMemory
from kvd.worker.prefix.queued_paths import Path
from kvd.worker.prefix.segment_files import SegmentFiles
from kvd.worker.prefix.segment_index import Checkpoint, SegmentIndex
from kvd.worker.prefix.segment_io import BackgroundWriter, Failed, Written
from protocol.segments import SegmentInfo
from protocol.worker import (
    SegmentAbandoned,
    SegmentAllowed,
    SegmentCommand,
    SegmentDamaged,
    SegmentOffered,
    SegmentWritten,
)

IDLE_SECONDS = 0.5
"""Seconds without a request after which checkpoints are written."""
POLL_SECONDS = 0.005
"""Seconds after which an idle engine looks again whether the disk takes more."""


@dataclass(eq=False)
class _Offer:
    """A checkpoint that is offered to the daemon, or being written."""

    checkpoint: Checkpoint
    segment: SegmentInfo
    source: Iterator[bytes]
    """The records that are not copied yet."""
    allowed: bool = False
    writer: BackgroundWriter | None = None
    record: bytes | None = None
    """A record that the writer had no room for."""
    problem: str | None = None
    """Why the file is abandoned."""
    trusted: bool = True
    """False once a request on its path returned bad logits."""


class SegmentStore:
    """The segments of one engine. ``clock``: monotonic seconds."""

    def __init__(
        self,
        batch: Batch,
        rates: Rates,
        index: SegmentIndex,
        files: SegmentFiles,
        staging: StagingMemory,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._batch = batch
        self._rates = rates
        self._index = index
        self._files = files
        self.staging = staging
        self._clock = clock
        self._refused: dict[bytes, int] = {}
        """Keys that were refused or could not be written, and the checkpoint's hits then."""
        self._offer: _Offer | None = None
        self._searched: dict[bool, tuple[int, ...]] = {}
        """`_news` at the last search that found nothing to write: among all checkpoints, and among
        those with hits."""
        self._evicted = 0
        """Checkpoints that memory had evicted when the engine was last idle."""
        self._idle_since: float | None = None
        self._drain_until: float | None = None
        batch.on_untrusted = self.distrust

    def handle(self, command: SegmentCommand) -> None:
        """Take note of a change of the index, or of the answer to an offer."""
        offer = self._offer
        if not isinstance(command, SegmentAllowed):
            self._index.change(command.added, command.removed)
            self._refused.clear()
            self.staging.obtain()
        elif offer is not None and offer.segment.key == command.key:
            offer.allowed = command.allowed
            if not command.allowed:
                self._refuse(offer)

    def distrust(self, path: Path) -> None:
        """Drop the segments on the path of a prompt whose request returned bad logits."""
        offer = self._offer
        for key in map(self._index.key, path):
            if key in self._index:
                self._drop(key)
            elif offer is not None and offer.segment.key == key:
                offer.trusted = False

    def _drop(self, key: bytes) -> None:
        """Report a segment as damaged: the daemon deletes it, and those that continue it."""
        reason = "a request on its path returned bad logits"
        self._batch.reports.append(SegmentDamaged(key=key, reason=reason))
        self._index.change([], [key])

    @property
    def has_work(self) -> bool:
        """Whether `work` would do something now, or a drained worker need not stay any longer."""
        if self._clock() >= self._latest:
            return True
        if (offer := self._offer) is None:
            return self._may_find(everything=self._writes_everything)
        return offer.allowed if offer.writer is None else offer.writer.ready

    @property
    def next_deadline(self) -> float | None:
        """Return when `has_work` may become true by itself."""
        due = [] if self._drain_until is None else [self._drain_until]
        if self._offer is not None and self._offer.writer is not None:
            due.append(self._clock() + POLL_SECONDS)
        elif self._offer is None and self._idle_since is not None and self._may_find():
            due.append(self._idle_since + IDLE_SECONDS)
        return min(due, default=None)

    @property
    def keeps_worker(self) -> bool:
        """Whether a drained worker should stay for what it still writes."""
        if self._drain_until is None or self._clock() >= self._latest:
            return False
        return self._offer is not None or self._may_find()

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
        if self._is_idle and (tree := self._batch.prefix_cache.tree) is not None:
            self._evicted = tree.counts.evicted
        if not idle:
            self._idle_since = None
            return
        self._files.free_memory()
        if self._idle_since is None:
            self._idle_since = self._clock()

    def work(self, seconds: float) -> None:
        """Offer the next checkpoint, or write for about ``seconds``; at least one record.

        Call it while the device is idle and `has_work` is true.
        """
        if (offer := self._offer) is None:
            self._offer_next(everything=self._writes_everything)
        elif offer.allowed:
            self._write(offer, self._clock() + seconds)

    # Offers.

    @property
    def _is_idle(self) -> bool:
        if self._drain_until is not None:
            return True
        return self._idle_since is not None and self._clock() >= self._idle_since + IDLE_SECONDS

    @property
    def _writes_everything(self) -> bool:
        """Whether checkpoints without a hit are written too."""
        tree = self._batch.prefix_cache.tree
        return self._is_idle or (tree is not None and tree.counts.evicted > self._evicted)

    def _may_find(self, *, everything: bool = True) -> bool:
        """Whether a search for a checkpoint to write may find one."""
        tree = self._batch.prefix_cache.tree
        return bool(tree) and self.staging.charged and self._news != self._searched.get(everything)

    @property
    def _news(self) -> tuple[int, ...]:
        """Counts that change when a search may find something else."""
        tree = self._batch.prefix_cache.tree
        if tree is None:
            return ()
        return tree.counts.trusted, tree.counts.hit_tokens, self._index.changes

    def _offer_next(self, *, everything: bool) -> None:
        """Offer the best checkpoint; unless ``everything``, only one that a prompt has used."""
        tree, news = self._batch.prefix_cache.tree, self._news
        if tree is None:
            return
        rate = 1 / max(self._rates.seconds("prefill", 1), 1e-9)
        for checkpoint, base in self._index.to_write(tree.checkpoints(), rate):
            key = self._index.key(checkpoint.names[-1])
            usable = everything or checkpoint.hits
            if not usable or self._refused.get(key, -1) >= checkpoint.hits:
                continue
            offer = self._make_offer(key, checkpoint, base)
            seconds = self._rates.seconds("write", offer.segment.nbytes)
            if self._clock() + seconds > self._latest:
                continue
            self._offer = offer
            self._batch.reports.append(SegmentOffered(segment=offer.segment, hits=checkpoint.hits))
            return
        self._searched[everything] = news

    def _make_offer(self, key: bytes, checkpoint: Checkpoint, base: SegmentInfo | None) -> _Offer:
        cache = self._batch.cache
        if base is not None and not can_extend(cache, base.tokens, checkpoint.tokens):
            base = None
        start, base_key = (0, None) if base is None else (base.tokens, base.key)
        records = SegmentRecords(cache, checkpoint.snapshot, start)
        segment = SegmentInfo(
            key=key, base=base_key, tokens=checkpoint.tokens, nbytes=records.nbytes
        )
        return _Offer(checkpoint, segment, iter(records))

    def _refuse(self, offer: _Offer) -> None:
        """End an offer; the checkpoint is offered again once a prompt has continued from it."""
        self._refused[offer.segment.key] = offer.checkpoint.hits
        self._offer = None

    # Writing.

    def _write(self, offer: _Offer, end: float) -> None:
        """Hand records to the thread until a time, as long as it takes them."""
        writer = offer.writer
        if writer is None:
            writer = offer.writer = self._files.write(offer.segment)
        while writer.ready:
            if (result := writer.poll()) is not None:
                self._finish(offer, result)
                return
            self._put_next(offer, writer)
            if self._clock() >= end:
                return

    def _put_next(self, offer: _Offer, writer: BackgroundWriter) -> None:
        try:
            if offer.record is None:
                offer.record = self._next_record(offer)
        except BaseException:  # a failed step
            self._abandon(offer, writer, "a step failed")
            raise
        if offer.problem is not None:
            self._abandon(offer, writer, offer.problem)
        elif offer.record is None:
            writer.end()
        elif writer.put(offer.record):
            offer.record = None

    def _next_record(self, offer: _Offer) -> bytes | None:
        """Copy the next record while the checkpoint is in memory, unchanged; None: it was last."""
        snapshot, snapshots = offer.checkpoint.snapshot, self._batch.cache.snapshots
        if snapshot.alive and snapshots.unlowered(snapshot):
            return next(offer.source, None)
        offer.problem = "the checkpoint was evicted meanwhile"
        return None

    def _abandon(self, offer: _Offer, writer: BackgroundWriter, problem: str) -> None:
        """Delete the file; the thread does so once its present I/O ends."""
        offer.problem = problem
        writer.close()

    def _finish(self, offer: _Offer, result: Written | Failed) -> None:
        """Report the thread's result."""
        if isinstance(result, Failed):
            reason = offer.problem or result.reason
            self._refuse(offer)
            self._batch.reports.append(
                SegmentAbandoned(key=offer.segment.key, reason=reason, nbytes=result.nbytes)
            )
            return
        segment = replace(offer.segment, nbytes=result.nbytes)
        self._offer = None
        self._index.change([segment], [])
        self._batch.reports.append(SegmentWritten(segment=segment, seconds=result.seconds))
        if not offer.trusted:
            self._drop(segment.key)
