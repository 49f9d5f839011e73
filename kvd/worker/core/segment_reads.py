"""Continues an engine's prompts from segments, where reading takes less time than prefill.

A read is a transfer (`kvd.worker.core.preemption`): its records are written into the pools between
steps, and threads read ahead. The request is suspended meanwhile and other rows decode. The prompt
is prefilled if a file is damaged or missing, if the disk hangs, or if the read takes too long
(`kvd.worker.core.read_rates`). A thread first finds out which share of the files is in the system's
page cache. If reading so many cached and other bytes is slower than prefill, the prompt is
prefilled, too.

Prompts that share what is being read wait for it (`kvd.worker.scheduling.shared_prompts`). While
memory is reclaimed, no read begins, and those that have begun end after `RECLAIM_SECONDS`: their
prompts begin again, a few times.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvd.worker.cache.host_copy import COPIED_TOGETHER
from kvd.worker.cache.segment_records import SegmentReader, growth_for
from kvd.worker.cache.unplaced_rows import unplaced_row
from kvd.worker.core.batch import Batch
from kvd.worker.core.memory_account import MemoryAccount
from kvd.worker.core.preemption import Preemption, Steps
from kvd.worker.core.rates import Rates
from kvd.worker.core.read_rates import Limit, ReadRates
from kvd.worker.core.request import Request
from kvd.worker.core.staging_memory import StagingMemory
from kvd.worker.prefix.lookup import Unread
from kvd.worker.prefix.page_cache import Part
from kvd.worker.prefix.segment_files import Reading, SegmentFiles, UnreadableSegments
from kvd.worker.prefix.segment_index import SegmentIndex
from kvd.worker.prefix.tree import Hit
from protocol.cache_outcome import UnreadCause
from protocol.record_file import DamagedFile
from protocol.segments import SegmentInfo
from protocol.worker import SegmentDamaged, SegmentUsed

_log = logging.getLogger("kvd.worker")

RECLAIM_SECONDS = 0.25
"""Seconds after which a read ends for a reclaim, which would wait for it. Most reads take less."""
MAX_INTERRUPTED = 3
"""How often reclaims end the reads of one prompt before it is prefilled."""


@dataclass(eq=False)
class _Read:
    """A request whose prompt is being read."""

    request: Request
    held: int
    """Tokens of the prompt that were in memory."""
    chain: list[SegmentInfo]
    reading: Reading
    reader: SegmentReader
    nbytes: int
    """About how many bytes it reads."""
    prefill_s: float
    """Estimated seconds of prefill instead."""
    limit: Limit | None
    """None: prefill is better."""
    cached_share: float | None = None
    """`Reading.cached_share`; None until it is known and ``limit`` is that for it."""
    records: Iterator[float] = field(init=False)
    queued_at: float = 0.0
    started_at: float = 0.0
    copy_s: float = 0.0
    """Seconds of steps that wrote records into the pools."""

    def __post_init__(self) -> None:
        self.records = self.reader.run()

    @property
    def seconds(self) -> float:
        """Seconds of reading. The thread's I/O and the copies into the pools overlap."""
        return max(self.reading.seconds, self.copy_s)


class SegmentReads:
    """The reads of one engine. ``clock``: seconds of its steps (`StepClock`)."""

    def __init__(
        self,
        batch: Batch,
        memory: MemoryAccount,
        preemption: Preemption,
        rates: Rates,
        index: SegmentIndex,
        files: SegmentFiles,
        staging: StagingMemory,
        clock: Callable[[], float],
    ) -> None:
        self._batch = batch
        self._memory = memory
        self._preemption = preemption
        self._rates = ReadRates(rates)
        self._prefill_seconds = partial(rates.seconds, "prefill")
        self._index = index
        self._files = files
        self._staging = staging
        self._clock = clock
        self._growth = growth_for(batch.cache)

    def restore(self, request: Request, hit: Hit) -> int:
        """Begin to read the longest stored beginning of a prompt; return its tokens.

        0: nothing is read, because a checkpoint in memory (``hit``) is as long, because prefill is
        faster, or because the disk hangs. The request is suspended until the end of the read.
        """
        chain = self._find(request, hit.tokens)
        if not chain:
            return 0
        prefill_s = self._prefill_seconds(chain[0].tokens - hit.tokens)
        nbytes = _bytes_to_read(chain, hit.tokens)
        limit = self._rates.limit(nbytes, prefill_s)
        if limit is None:
            self._rates.recover(1.0)
            request.tracked.unread = Unread(chain[0].tokens, "slower")
            return 0
        parts = [part for _, part in _needed(chain, hit.tokens)]
        chain = [segment for segment in chain if segment.tokens > hit.tokens]
        row = unplaced_row(self._batch.cache, hit.snapshot, request.level)
        reading = self._files.read(chain, parts[: len(chain)])
        reader = SegmentReader(
            self._batch.cache,
            row,
            reading.segments,
            reading.skip,
            self._growth,
            lambda: 1 if self._preemption.delays_rows else COPIED_TOGETHER,
        )
        read = _Read(request, hit.tokens, chain, reading, reader, nbytes, prefill_s, limit)
        read.queued_at = self._clock()
        self._batch.transfers.reading[request.rid] = reader
        self._batch.scheduler.suspend(request.rid, reads_prompt=True)
        self._preemption.start(
            request.rid,
            self._run(read),
            lambda: self._ready(read),
            lambda: reading.started,
            reading.wait,
            lambda: reader.needs_idle_device,
        )
        return chain[0].tokens

    def prefetch(self, request: Request) -> None:
        """Bring the segments that a queued prompt will probably be read from to the page cache.

        Does so once for a request, and while nothing else is read.
        """
        tracked = request.tracked
        if tracked.prefetched or self._batch.transfers.reading or self._files.reads:
            return
        tracked.prefetched = True
        held = self._batch.prefix_cache.peek(tracked.tokens, tracked.salt).tokens
        chain = self._find(request, held)
        if not chain:
            return
        prefill_s = self._prefill_seconds(chain[0].tokens - held)
        if self._rates.limit(_bytes_to_read(chain, held), prefill_s) is not None:
            self._files.prefetch([segment for segment in chain if segment.tokens > held])

    def _find(self, request: Request, held: int) -> list[SegmentInfo]:
        """Return the segments of the longest stored beginning that is longer than ``held`` tokens.

        The last segment is first, then its bases, including those within ``held``. Empty if there
        is none, or if they must not or cannot be read.
        """
        tracked = request.tracked
        if tracked.lowered or tracked.full_prefill or not tracked.reads_store:
            return []
        chain = self._index.find(tracked.path, above=held)
        if chain and not self._staging.charged:
            tracked.unread = Unread(chain[0].tokens, "memory")
            return []
        if chain and self._files.hangs:
            tracked.unread = Unread(chain[0].tokens, "hangs")
            return []
        return chain

    def _ready(self, read: _Read) -> bool:
        """Whether `_run` would do something now."""
        if not self._is_wanted(read):
            return True
        if read.cached_share is None and (share := read.reading.cached_share) is not None:
            read.cached_share = share
            read.limit = self._rates.limit(read.nbytes, read.prefill_s, share)
        if not read.reading.started and self._preemption.reclaim_seconds is not None:
            return False
        return read.reading.ready or self._is_slow(read) or self._is_interrupted(read)

    def _is_wanted(self, read: _Read) -> bool:
        """Whether the request has neither ended nor lost its row."""
        return self._batch.transfers.reading.get(read.request.rid) is read.reader

    def _is_slow(self, read: _Read) -> bool:
        """Whether the read should end, because the disk hangs or prefill is faster by now."""
        now = self._clock()
        if read.reading.hangs or not read.reading.started:
            # Until it starts, it waits for the end of other reads or of a reclaim.
            return read.reading.hangs or now - read.queued_at > max(1.0, read.prefill_s)
        if read.limit is None:
            return True
        seconds, share = now - read.started_at, read.cached_share
        if seconds > read.limit.end_s:
            return True
        spent = read.seconds if read.limit.is_first else seconds
        if spent <= read.limit.check_s or share is None:
            return False
        # Ending it discards what is read, so it goes on if the rest takes less time than prefill.
        done = read.reading.nbytes
        return self._rates.rest_seconds(read.nbytes, share, done, spent) > read.prefill_s

    def _is_interrupted(self, read: _Read) -> bool:
        """Whether a reclaim has waited long enough for a read."""
        seconds = self._preemption.reclaim_seconds
        return read.reading.started and seconds is not None and seconds >= RECLAIM_SECONDS

    def _run(self, read: _Read) -> Steps:
        """Read one record after each yield, which is that of `SegmentReader.run`."""
        try:
            # The check comes before each record: the row of a request that ended is free.
            while self._is_wanted(read):
                work_s: float | None = 0.0
                if self._must_end(read):
                    self._end(read)
                    return
                if not read.reading.started:
                    read.started_at = self._clock()
                    read.reading.start()
                elif (work_s := self._copy_next(read)) is None:
                    self._finish(read)
                    return
                yield work_s
        except DamagedFile as error:
            self._report_damage(read, str(error)[:200])
            # The index lacks the segment from now on, and another one may be read instead.
            self._give_up(read, "damaged", str(error)[:200], retries=True)
        except UnreadableSegments as error:
            self._give_up(read, "failed", str(error)[:200])
        finally:
            read.reading.close()

    def _must_end(self, read: _Read) -> bool:
        lowered = read.request.tracked.lowered
        return lowered or self._is_slow(read) or self._is_interrupted(read)

    def _end(self, read: _Read) -> None:
        """Give up a read for one of the reasons of `_must_end`."""
        tracked = read.request.tracked
        if tracked.lowered:
            self._give_up(read, "reclaim", "the request was stepped down meanwhile")
        elif not self._is_slow(read):
            tracked.interrupted += 1
            retries = tracked.interrupted < MAX_INTERRUPTED
            self._give_up(read, "reclaim", "memory is reclaimed", retries=retries)
        elif read.limit is None:
            self._rates.recover(read.cached_share or 0.0)
            self._give_up(read, "slower", None)
        else:
            if read.reading.started:
                self._note_failure(read, read.limit)
            if read.reading.hangs:
                self._give_up(read, "hangs", "the disk hangs")
            else:
                self._give_up(read, "slow", "it takes longer than prefill")

    def _note_failure(self, read: _Read, limit: Limit) -> None:
        done, seconds = read.reading.nbytes, read.seconds
        if not limit.is_first:
            seconds = self._clock() - read.started_at
        if not (done or read.reading.hangs):  # half of the rate that would be enough
            done, seconds = read.nbytes, 2 * read.prefill_s
        self._rates.note_failure(read.nbytes, read.cached_share, done, seconds)

    def _copy_next(self, read: _Read) -> float | None:
        """Write the next record into the pools; return what the reader yields, or None: the end."""
        start = self._clock()
        work_s = next(read.records, None)
        read.copy_s += self._clock() - start
        if work_s is not None and math.isfinite(work_s):
            read.copy_s += work_s
        return work_s

    def _report_damage(self, read: _Read, reason: str) -> None:
        key = read.reading.damaged or read.chain[read.reader.reading].key
        if key not in self._index:
            return  # the daemon deleted the file
        self._batch.reports.append(SegmentDamaged(key=key, reason=reason))
        self._index.change([], [key])

    def _give_up(
        self, read: _Read, cause: UnreadCause, problem: str | None, *, retries: bool = False
    ) -> None:
        """Begin the prompt again; ``retries``: with segments, if there are others.

        ``problem`` is logged, if there is one.
        """
        read.request.tracked.unread = Unread(read.chain[0].tokens, cause)
        if problem is not None:
            _log.warning("a stored prefix is not used: %s", problem)
        read.request.tracked.reads_store = retries
        read.reader.forget()
        self._batch.start_over(read.request)
        self._resume(read)

    def _finish(self, read: _Read) -> None:
        """Give the request its row, without slots: the prefill of the rest places it."""
        request, tokens = read.request, read.chain[0].tokens
        self._rates.note(read.reading.nbytes, read.cached_share, read.seconds)
        self._batch.prefix_cache.count_read(tokens - read.held)
        self._batch.take_row(request, read.reader.sequences[0], tokens)
        self._batch.prefix_cache.prefilled(
            request.tracked, 0, tokens, request.row, self._memory.spare_bytes
        )
        self._batch.reports.append(
            SegmentUsed(
                key=read.chain[0].key,
                tokens=tokens - read.held,
                seconds=read.seconds,
                prefill_s=self._prefill_seconds(tokens - read.held),
                nbytes=read.reading.nbytes,
            )
        )
        self._resume(read)

    def _resume(self, read: _Read) -> None:
        del self._batch.transfers.reading[read.request.rid]
        self._batch.scheduler.resume(read.request.rid)


def _bytes_to_read(chain: Sequence[SegmentInfo], held: int) -> int:
    """Return about how many bytes of these segments the first one's prefix needs.

    ``chain``: a segment and all its bases. ``held``: tokens of the prefix that are in memory.
    """
    return sum(int(one.nbytes * (end - start)) for one, (start, end) in _needed(chain, held))


def _needed(chain: Sequence[SegmentInfo], held: int) -> Iterator[tuple[SegmentInfo, Part]]:
    """Yield each segment of a chain, and about which part of its file is needed.

    The arguments are those of `_bytes_to_read`.
    """
    tokens = chain[0].tokens
    for one, base in itertools.zip_longest(chain, chain[1:]):
        # If the base is longer or missing, the segment's pages begin with the prompt.
        first = base.tokens if base is not None and base.tokens < one.tokens else 0
        start, end = max(held, first), min(tokens, one.tokens)
        length = one.tokens - first
        part = (start - first) / length, (end - first) / length
        yield one, part if start < end else (0.0, 0.0)
