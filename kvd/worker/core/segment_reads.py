"""Continues an engine's prompts from segments, where reading takes less time than prefill.

A read is a transfer (`kvd.worker.core.preemption`): its records are written into the pools between
steps, and a thread reads ahead. The request is suspended meanwhile and other rows decode. If a file
is damaged or missing, if the disk hangs, or if reading takes longer than prefill was estimated to
take, the prompt is prefilled.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvd.worker.cache.segment_records import SegmentReader
from kvd.worker.core.batch import Batch
from kvd.worker.core.memory_account import MemoryAccount
from kvd.worker.core.preemption import Preemption
from kvd.worker.core.rates import Rates
from kvd.worker.core.request import Request
from kvd.worker.prefix.segment_files import Reading, SegmentFiles, UnreadableSegments
from kvd.worker.prefix.segment_index import SegmentIndex
from kvd.worker.prefix.tree import Hit
from protocol.record_file import DamagedFile
from protocol.segments import SegmentInfo
from protocol.worker import SegmentDamaged, SegmentUsed

_log = logging.getLogger("kvd.worker")

LEAST_READ_SECONDS = 1.0
"""Seconds that a read may take even if prefill is estimated to take less."""


@dataclass(eq=False)
class _Read:
    """A request whose prompt is being read."""

    request: Request
    held: int
    """Tokens of the prompt that were in memory."""
    chain: list[SegmentInfo]
    reading: Reading
    reader: SegmentReader
    prefill_s: float
    """Seconds that prefill of the same tokens would take."""
    records: Iterator[None] = field(init=False)
    started_at: float = 0.0

    def __post_init__(self) -> None:
        self.records = self.reader.run()


class SegmentReads:
    """The reads of one engine. ``clock``: monotonic seconds."""

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

    def restore(self, request: Request, hit: Hit) -> int:
        """Begin to read the longest stored beginning of a prompt; return its tokens.

        0: nothing is read, because a checkpoint in memory (``hit``) is as long, because prefill is
        faster, or because the disk hangs. The request is suspended until the end of the read.
        """
        tracked = request.tracked
        if tracked.lowered or tracked.full_prefill or not tracked.reads_store or self._files.hangs:
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
        read = _Read(request, hit.tokens, chain, reading, reader, prefill_s)
        self._batch.transfers.reading[request.rid] = reader
        self._batch.scheduler.suspend(request.rid)
        self._preemption.start(request.rid, self._run(read), lambda: self._ready(read))
        return chain[0].tokens

    def _ready(self, read: _Read) -> bool:
        """Whether `_run` would do something now."""
        return read.reading.ready or self._is_late(read) or not self._is_wanted(read)

    def _is_wanted(self, read: _Read) -> bool:
        """Whether the request has neither ended nor lost its row."""
        return self._batch.transfers.reading.get(read.request.rid) is read.reader

    def _is_late(self, read: _Read) -> bool:
        if not read.reading.started:
            return False
        return self._clock() > read.started_at + max(LEAST_READ_SECONDS, read.prefill_s)

    def _run(self, read: _Read) -> Iterator[None]:
        """Read one record after each yield. The device must be idle."""
        try:
            # The check comes before each record: the row of a request that ended is free.
            while self._is_wanted(read):
                if problem := self._problem(read):
                    self._note_rate(read)
                    self._give_up(read, problem)
                    return
                if not read.reading.started:
                    read.started_at = self._clock()
                    read.reading.start()
                elif next(read.records, self) is self:
                    self._finish(read)
                    return
                yield
        except DamagedFile as error:
            self._report_damage(read, str(error)[:200])
            # The index lacks the segment from now on, and another one may be read instead.
            self._give_up(read, str(error)[:200], retries=True)
        except UnreadableSegments as error:
            self._give_up(read, str(error)[:200])
        finally:
            read.reading.close()

    def _problem(self, read: _Read) -> str:
        """Return why a prompt must be prefilled instead; empty if there is no reason."""
        if read.request.tracked.lowered:
            return "the request was stepped down meanwhile"
        if read.reading.hangs:
            return "the disk does not answer"
        if self._is_late(read):
            return "reading takes longer than prefill"
        return ""

    def _report_damage(self, read: _Read, reason: str) -> None:
        key = read.reading.damaged or read.chain[read.reader.reading].key
        self._batch.reports.append(SegmentDamaged(key=key, reason=reason))
        self._index.change([], [key])

    def _give_up(self, read: _Read, problem: str, *, retries: bool = False) -> None:
        """Begin the prompt again; ``retries``: with segments, if there are others."""
        _log.warning("a stored prefix is not used: %s", problem)
        read.request.tracked.reads_store = retries
        read.reader.forget()
        self._batch.start_over(read.request)
        self._resume(read)

    def _finish(self, read: _Read) -> None:
        request, tokens = read.request, read.chain[0].tokens
        self._note_rate(read)
        self._batch.prefix_cache.count_read(tokens - read.held)
        self._batch.take_row(request, read.reader.sequences[0], tokens)
        self._batch.prefix_cache.prefilled(
            request.tracked, tokens, request.row, self._memory.spare_bytes
        )
        self._batch.reports.append(
            SegmentUsed(
                key=read.chain[0].key,
                tokens=tokens - read.held,
                seconds=self._clock() - read.started_at,
                prefill_s=self._rates.seconds("prefill", tokens - read.held),
                nbytes=read.reading.nbytes,
            )
        )
        self._resume(read)

    def _note_rate(self, read: _Read) -> None:
        """Measure the rate at which prompts are read, other rows' steps in between included."""
        if read.reading.started:
            seconds = self._clock() - read.started_at
            self._rates.note("read", max(1, read.reading.nbytes), seconds)

    def _resume(self, read: _Read) -> None:
        del self._batch.transfers.reading[read.request.rid]
        self._batch.scheduler.resume(read.request.rid)


def _bytes_to_read(chain: Sequence[SegmentInfo]) -> int:
    """Return about how many bytes of these segments the first one's prefix needs."""
    tokens = chain[0].tokens
    return sum(one.nbytes * min(tokens, one.tokens) // one.tokens for one in chain)
