"""Preemption: running requests leave the batch, free their memory, and later continue unchanged.

The rows of a preempted request are kept in memory if that frees enough; if not, on disk, or not at
all::

    memory      as snapshots: frees the pages that the request reserved and has not filled
    disk        as a file (`kvd.worker.core.swap`): frees all of the request's memory
    recompute   not kept: later, the prompt is prefilled and the tokens are fed again

Disk or recompute is chosen by which takes less time, as measured in this process. Rows that were
stepped down while they ran would differ after recomputation, so they go to disk if possible. A file
that cannot be written, or that is damaged, costs time but never the request.

A preempted request waits in the queue, in the order of its original arrival.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.snapshot_records import SnapshotReader, SnapshotWriter
from kvd.worker.core.batch import Batch
from kvd.worker.core.memory_account import can_preempt
from kvd.worker.core.preempted_rows import PreemptedRows
from kvd.worker.core.rates import Rates
from kvd.worker.core.request import Request, SwappedRows
from protocol.record_file import DamagedFile
from protocol.worker import PreemptionMode, RowPreempted

_log = logging.getLogger("kvd.worker")


Steps = Iterator[float | None]
"""Pieces of a transfer. Each yield is the seconds of work that the device got and may not have done
yet. Infinity: the next piece must wait for another step."""


@dataclass(eq=False)
class _Job:
    """A transfer that proceeds while other rows decode."""

    steps: Steps
    ready: Callable[[], bool]
    """Whether it can proceed now."""
    begun: Callable[[], bool]
    """Whether pools must not shrink before its end."""
    wait: Callable[[float], None]
    """Waits until it can proceed, for at most some seconds."""
    needs_idle_device: Callable[[], bool]
    """Whether no step may be in flight while it proceeds."""


class Preemption:
    """The preempted requests of one engine. ``clock``: monotonic seconds."""

    def __init__(
        self, batch: Batch, rates: Rates, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._batch = batch
        self.rows = PreemptedRows(batch)
        self._transfers = batch.transfers
        self._rates = rates
        self._unqueued: list[str] = []
        """Requests preempted by the `reclaim` under way; `requeue` queues them."""
        self._clock = clock
        self._jobs: dict[str, _Job] = {}
        """By request."""
        self._reclaims_since: float | None = None
        self.delays_rows = False
        """Whether rows decode during the present `work`, or did so during the last one."""

    @property
    def busy(self) -> bool:
        return bool(self._jobs)

    @property
    def ready(self) -> bool:
        """Whether `work` would do something now; otherwise all transfers wait for the disk."""
        return any(job.ready() for job in self._jobs.values())

    @property
    def delays_reclaim(self) -> bool:
        """Whether a transfer has begun that must end before memory is reclaimed."""
        return any(job.begun() for job in self._jobs.values())

    @property
    def reclaim_seconds(self) -> float | None:
        """Seconds since the present reclaim began; None: there is none."""
        since = self._reclaims_since
        return None if since is None else self._clock() - since

    def note_reclaim(self, *, active: bool) -> None:
        """Take note of the begin or the end of a reclaim."""
        self._reclaims_since = self._clock() if active else None

    def start(
        self,
        rid: str,
        steps: Steps,
        ready: Callable[[], bool] = lambda: True,
        begun: Callable[[], bool] = lambda: True,
        wait: Callable[[float], None] = time.sleep,
        needs_idle_device: Callable[[], bool] = lambda: True,
    ) -> None:
        """Let `work` run a transfer of a request's rows whenever it is ``ready``.

        A reclaim waits for its end once it has ``begun``. Before, it has a row and nothing else.
        """
        self._jobs[rid] = _Job(steps, ready, begun, wait, needs_idle_device)

    def wait(self, seconds: float) -> None:
        """Wait until the first transfer can proceed, for at most this time."""
        for job in self._jobs.values():
            job.wait(seconds)
            return

    def work(self, seconds: float, *, delays_rows: bool = True, waits: bool = False) -> None:
        """Continue transfers for about ``seconds``, at least one record if one is ready.

        The transfer that started first has precedence. The work ends early if another record would
        exceed the time. It waits for the step in flight only if a transfer needs that.

        ``delays_rows``: whether rows decode. ``waits``: whether nothing else is to be done. Then,
        if no transfer can proceed, `work` waits for the first one until the time is over, or until
        a transfer has ended. Raises what the transfers raise.
        """
        self.delays_rows = delays_rows
        now = time.monotonic()
        end = now + seconds
        while True:
            able = ((rid, job) for rid, job in self._jobs.items() if job.ready())
            rid, job = next(able, ("", None))
            if job is None:
                if not waits or not self._jobs or now >= end:
                    return
                self.wait(end - now)
                now = time.monotonic()
                continue
            if job.needs_idle_device():
                self._batch.synchronize()
                end, now = end + time.monotonic() - now, time.monotonic()
            if (work_s := next(job.steps, self)) is self:
                del self._jobs[rid]
                waits = False  # its request may be continued
            elif isinstance(work_s, float):
                end -= work_s
            before, now = now, time.monotonic()
            if now + (now - before) > end:
                return

    # Rows leave.

    def reclaim(self, wanted_bytes: int) -> Iterator[None]:
        """Preempt requests until ``wanted_bytes`` are free, the least valuable first.

        Begins with the snapshots of requests that are already preempted. Each yield is the end of
        a piece of work. After the last one, the caller shrinks the pools, returns the memory and
        calls `requeue`.
        """
        wanted = -(-wanted_bytes // self._batch.admission.budget.page_bytes)
        yield from self._free(wanted, self._batch.scheduler.victims(), can_preempt)

    def make_room(self, rid: str, pages: int) -> None:
        """Free pages for a stalled request during the next steps; it is the last one preempted.

        Meanwhile nothing is reserved: the pages are for this request alone.
        """
        if self._jobs:
            return
        victims = self._batch.scheduler.victims()
        self._batch.admission.closed = True
        self.start(rid, self._make_room(pages, victims[: victims.index(rid) + 1]))

    def _make_room(self, pages: int, victims: list[str]) -> Iterator[None]:
        yield from self._free(pages, victims, lambda _request: True)
        self._batch.admission.closed = False
        self.requeue()

    def _free(
        self, wanted: int, victims: list[str], may_preempt: Callable[[Request], bool]
    ) -> Iterator[None]:
        """Free ``wanted`` pages: snapshots in memory first, then ``victims`` in their order."""
        batch = self._batch
        for request in self._in_memory():
            if wanted <= 0:
                return
            wanted -= request.kept_pages
            yield from self._move_out(request)
        for rid in victims:
            if wanted <= 0:
                return
            batch.finish_step(late=True)  # requests may end
            running = batch.requests.get(rid)
            if running is not None and may_preempt(running):
                wanted -= yield from self._preempt(running, wanted)

    def _in_memory(self) -> list[Request]:
        """Return queued requests with snapshots in memory, the last in the queue first."""
        scheduler = self._batch.scheduler
        queued = [self._batch.requests[rid] for rid in reversed(scheduler.queue)]
        return [request for request in queued if request.kept_pages]

    def _preempt(self, request: Request, wanted: int) -> Generator[None, None, int]:
        """Preempt a request; return the pages that this frees."""
        batch, page_bytes = self._batch, self._batch.admission.budget.page_bytes
        scheduled = batch.scheduler.find(request.rid)
        filled = batch.prefix_cache.filled_by(request.tracked) // page_bytes
        held = scheduled.pages + scheduled.choices * batch.admission.row_pages - filled
        self._transfers.abort_reading(request.rid)  # a prompt whose read has not begun
        self.rows.preempt(request)
        self._unqueued.append(request.rid)
        where: PreemptionMode = "memory"
        if not request.preempted_owners:
            where = "recompute"
            batch.start_over(request)
        elif held - request.kept_pages < wanted:
            where = yield from self._move_out(request)
        if not batch.holds(request):
            return held
        freed = held - request.kept_pages
        batch.reports.append(RowPreempted(rid=request.rid, nbytes=freed * page_bytes, where=where))
        return freed

    def requeue(self) -> None:
        unqueued, self._unqueued = self._unqueued, []
        for rid in unqueued:
            if rid in self._batch.requests:
                self._batch.admission.requeue_preempted(rid)

    def move_out_kept(self) -> None:
        """Move the snapshots of one queued request out of memory, for the head of the queue.

        No request is admitted meanwhile, because admitting this one would need its snapshots.
        """
        if self._jobs:
            return
        head = self._batch.scheduler.head
        for request in self._in_memory():
            if head is None or request.rid != head.rid:
                self._batch.admission.closed = True
                self.start(request.rid, self._move_out_and_admit(request))
                return

    def _move_out_and_admit(self, request: Request) -> Iterator[None]:
        yield from self._move_out(request)
        self._batch.admission.closed = False

    def _move_out(self, request: Request) -> Generator[None, None, PreemptionMode]:
        """Write a request's snapshots to disk, or drop them; return where its rows are now."""
        batch = self._batch
        if not batch.holds(request):
            return "recompute"  # the request has ended
        writer = self._writer(request)
        swapped = None if writer is None else (yield from self._write(request, writer))
        if not batch.holds(request):
            return "recompute"
        self.rows.move_out(request, swapped)
        return "recompute" if swapped is None else "disk"

    def _writer(self, request: Request) -> SnapshotWriter | None:
        """Return a writer of a request's snapshots; None if recomputing its rows is better."""
        batch = self._batch
        folder = self._transfers.folder
        if not isinstance(batch.cache, ModelCache) or not folder.has_room(0):
            return None
        writer = SnapshotWriter(batch.cache, [owner.snapshot for owner in request.preempted_owners])
        if not folder.has_room(writer.nbytes):
            return None
        position = batch.scheduler.find(request.rid).prefilled
        prefilled = len(request.prompt) if request.begun else position
        recompute_s = self._rates.recompute_seconds(prefilled, request.longest)
        if not request.mixed_levels and recompute_s < self._rates.swap_seconds(writer.nbytes):
            return None
        return writer

    def _write(
        self, request: Request, writer: SnapshotWriter
    ) -> Generator[None, None, SwappedRows | None]:
        """Write the file; return None if that fails, or if the request ends meanwhile."""
        rid, seconds, records = request.rid, 0.0, writer.records()
        owners = tuple(owner.key for owner in request.preempted_owners)
        try:
            file = self._transfers.start_writing(rid, writer.nbytes)
            while self._batch.holds(request):
                start = time.monotonic()
                record = next(records, None)
                if record is None:
                    break
                file.add(record)
                seconds += time.monotonic() - start
                yield
            else:
                return None  # `Transfers.discard` has deleted the file
            file.finish()
        except OSError as error:
            _log.warning("cannot swap a row to disk: %s", error)
            self._transfers.abort_writing(rid)
            return None
        del self._transfers.writing[rid]
        self._rates.note("write", writer.nbytes, seconds)
        return SwappedRows(file.path, writer.nbytes, owners)

    # Rows come back.

    def resume(self, request: Request) -> None:
        """Continue a preempted request that is admitted again: now, or once its file is read."""
        if request.swapped is None:
            self.rows.restore(request)
            self.rows.finish_resume(request)
            return
        self._batch.scheduler.suspend(request.rid)
        reader = SnapshotReader(
            self._batch.cache, self._transfers.folder.read(request.swapped.path)
        )
        self._transfers.reading[request.rid] = reader
        self.start(request.rid, self._read(request, request.swapped, reader))

    def _read(
        self, request: Request, swapped: SwappedRows, reader: SnapshotReader
    ) -> Iterator[None]:
        batch, rid = self._batch, request.rid
        seconds = 0.0
        try:
            steps = reader.run()
            while rid in self._transfers.reading:
                start = time.monotonic()
                if next(steps, self) is self:
                    break
                seconds += time.monotonic() - start
                yield
            else:
                return  # the request has ended, and its reader is discarded
        except (DamagedFile, OSError) as error:
            _log.warning("a swapped row is recomputed: %s", error)
            reader.forget()
            batch.start_over(request)
        else:
            self._rates.note("read_swapped", swapped.nbytes, seconds)
            self.rows.move_in(request, swapped, reader.sequences)
        del self._transfers.reading[rid]
        batch.scheduler.resume(rid)
        self.rows.finish_resume(request)

    def abandon(self) -> None:
        """Abort all transfers after a failed step.

        Rows that were being written stay in memory. Rows that were being read have no file any
        more, and recovery rebuilds them like all rows.
        """
        self._jobs.clear()
        self._batch.admission.closed = False
        for rid in list(self._transfers.writing):
            self._transfers.abort_writing(rid)
        for rid in list(self._transfers.reading):
            self._transfers.abort_reading(rid)
            self._batch.scheduler.resume(rid)
            request = self._batch.requests[rid]
            if request.swapped is not None:
                self.rows.finish_resume(request)
        self.requeue()
