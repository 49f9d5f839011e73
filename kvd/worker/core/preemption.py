"""Parking: rows leave the batch while they run, give memory back, and go on with the same tokens.

Where a row goes, the first of these that frees enough::

    memory      frozen where it is: what it had reserved and not yet filled comes free
    disk        its pages in a file (`kvd.worker.cache.snapshot_records`), all of it comes free
    recompute   nothing is kept: its prompt is read again, its tokens are fed again

Of the last two the one that takes less time, by what this process has measured. A row that was
stepped down on its way would not be the same if it were read again: it goes to disk if it can. A
file that cannot be written or is not what was written costs time, and never the request.

A parked request waits in the queue again, at the place of its arrival.

Does not cover: who is parked and when (`reclaiming`).
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.snapshot_records import DamagedRecord, SnapshotReader, SnapshotWriter
from kvd.worker.core.memory_account import can_preempt
from kvd.worker.core.request import Completion, Request, Saved
from kvd.worker.core.swap import Folder, Writing, records_of
from protocol.worker import Report, RowPreempted, RowResumed

if TYPE_CHECKING:
    from kvd.worker.core.hands import Hands
    from kvd.worker.core.rates import Rates
    from protocol.worker import PreemptionMode

_log = logging.getLogger("kvd.worker")


class Preemption:
    """The parked rows of one engine. ``folder`` None: nothing is written."""

    def __init__(
        self,
        hands: Hands,
        folder: Folder | None,
        rates: Rates,
        report: Callable[[Report], None],
    ) -> None:
        self._hands = hands
        self._folder = folder
        self._rates = rates
        self._report = report
        self._away: list[str] = []
        """Parked by the `reclaim` under way; they wait in the queue when it is over."""
        self._jobs: dict[str, Iterator[None]] = {}
        """What is under way beside, by request: rows that come back, or leave the memory."""
        self.loading: dict[str, SnapshotReader] = {}
        """Requests that are admitted and whose rows are being read."""
        self._writing: dict[str, Writing] = {}

    @property
    def busy(self) -> bool:
        """Whether `work` has something to do."""
        return bool(self._jobs)

    def work(self, seconds: float) -> None:
        """Work for about so long, at least one piece; the device must be idle."""
        end = time.monotonic() + seconds
        while self._jobs:
            rid, job = next(iter(self._jobs.items()))
            if next(job, self) is self:
                del self._jobs[rid]
            if time.monotonic() >= end:
                return

    # Rows leave.

    def take_out(self, request: Request) -> None:
        """Freeze a running request's rows and take it out of the batch.

        Nothing may be in flight. Its pages stay, and it waits for `Admission.requeue_preempted`.
        """
        hands, cache = self._hands, self._hands.cache
        hands.drain()
        for completion in request.completions:
            if completion.row is not None:
                completion.snapshot = cache.snapshots.take(completion.row)
                hands.leave(completion)
        if request.row is not None:
            request.snapshot = cache.snapshots.take(request.row)
            cache.free(request.row, clean=False)
            request.row = None
        held = sum(cache.snapshots.charge_of(one) for one in request.snapshots)
        request.kept_pages = -(-held // hands.admission.budget.page_bytes)
        hands.prefix_cache.release_place(request.tracked)
        hands.admission.preempt(request.rid, request.kept_pages)

    def reclaim(self, wanted_bytes: int) -> Iterator[None]:
        """Park requests, the least valuable first, until so much comes free.

        What is in memory of those that are parked goes first. The caller cuts the pools, gives the
        memory back, and then calls `requeue`; each yield is a piece.
        """
        hands = self._hands
        wanted = -(-wanted_bytes // hands.admission.budget.page_bytes)
        for request in self._kept():
            if wanted <= 0:
                return
            wanted -= request.kept_pages
            yield from self._move_out(request)
        for rid in hands.scheduler.victims():
            if wanted <= 0:
                return
            hands.settle()  # it may end somebody
            running = hands.requests.get(rid)
            if running is not None and can_preempt(running):
                wanted -= yield from self._park(running, wanted)

    def _kept(self) -> list[Request]:
        """Return who waits with something in memory, the last in the queue first."""
        hands = self._hands
        waiting = [hands.requests[rid] for rid in reversed(hands.scheduler.queue)]
        return [one for one in waiting if one.kept_pages]

    def _park(self, request: Request, wanted: int) -> Generator[None, None, int]:
        hands = self._hands
        scheduled = hands.scheduler.find(request.rid)
        left = hands.prefix_cache.filled_by(request.tracked) // hands.admission.budget.page_bytes
        whole = scheduled.pages + scheduled.choices * hands.admission.row_pages - left
        self.take_out(request)
        self._away.append(request.rid)
        where: PreemptionMode = "memory"
        if not request.snapshots:
            where = "recompute"
            self._start_over(request)
        elif whole - request.kept_pages < wanted:
            where = yield from self._move_out(request)
        if hands.requests.get(request.rid) is not request:
            return whole
        freed = whole - request.kept_pages
        nbytes = freed * hands.admission.budget.page_bytes
        self._report(RowPreempted(rid=request.rid, nbytes=nbytes, where=where))
        return freed

    def requeue(self) -> None:
        """Let who was parked wait in the queue."""
        away, self._away = self._away, []
        for rid in away:
            if rid in self._hands.requests:
                self._hands.admission.requeue_preempted(rid)

    def spill(self) -> None:
        """Take what others keep out of the memory that the head of the queue waits for.

        One request; until it is out nobody is admitted, so that it stays where it is.
        """
        head = self._hands.scheduler.head
        behind = [one for one in self._kept() if head is None or one.rid != head.rid]
        if behind and not self._jobs:
            self._hands.admission.closed = True
            self._jobs[behind[0].rid] = self._spill(behind[0])

    def _spill(self, request: Request) -> Iterator[None]:
        yield from self._move_out(request)
        self._hands.admission.closed = False

    def _move_out(self, request: Request) -> Generator[None, None, PreemptionMode]:
        """Write a frozen request to disk, or drop what it has; return where it is."""
        hands = self._hands
        if hands.requests.get(request.rid) is not request:
            return "recompute"  # it is over
        saver = self._saver(request)
        saved = None if saver is None else (yield from self._save(request, saver))
        if hands.requests.get(request.rid) is not request:
            return "recompute"  # it is over
        for holder in request.holders:
            if holder.snapshot is not None:
                hands.cache.snapshots.drop(holder.snapshot)
                holder.snapshot = None
        request.kept_pages = 0
        request.saved = saved
        hands.admission.reduce_kept(request.rid, 0)
        if saved is None:
            self._start_over(request)
        return "recompute" if saved is None else "disk"

    def _start_over(self, request: Request) -> None:
        request.start_over()
        self._hands.scheduler.restart_prefill(request.rid)

    def _saver(self, request: Request) -> SnapshotWriter | None:
        """Return what writes a request, if that is possible and worth it."""
        cache = self._hands.cache
        if self._folder is None or not isinstance(cache, ModelCache):
            return None
        saver = SnapshotWriter(cache, request.snapshots)
        if not self._folder.has_room(saver.nbytes):
            return None
        again = self._rates.recompute(self._read(request), request.longest)
        if not request.mixed and again < self._rates.disk(saver.nbytes):
            return None
        return saver

    def _read(self, request: Request) -> int:
        return (
            len(request.prompt)
            if request.begun
            else self._hands.scheduler.find(request.rid).prefilled
        )

    def _save(self, request: Request, saver: SnapshotWriter) -> Generator[None, None, Saved | None]:
        """Write a file; None if that fails, or the request is over."""
        folder, rid = self._folder, request.rid
        assert folder is not None, "there is a saver"
        holders = tuple(
            one.key if isinstance(one, Completion) else None
            for one in request.holders
            if one.snapshot is not None
        )
        try:
            writing = self._writing[rid] = folder.new(_name(rid), saver.nbytes)
        except OSError as error:
            _log.warning("a row is not parked on disk: %s", error)
            return None
        spent = 0.0
        try:
            records = saver.records()
            while True:
                start = time.monotonic()
                record = next(records, None)
                if record is None:
                    break
                writing.add(record)
                spent += time.monotonic() - start
                yield
                if self._hands.requests.get(rid) is not request:
                    return None  # `forget` has deleted it
            writing.finish()
        except OSError as error:
            _log.warning("a row is not parked on disk: %s", error)
            self._stop_writing(rid)
            return None
        del self._writing[rid]
        self._rates.note("write", saver.nbytes, spent)
        return Saved(writing.path, saver.nbytes, holders)

    def _stop_writing(self, rid: str) -> None:
        writing = self._writing.pop(rid, None)
        if writing is not None and self._folder is not None:
            writing.stop()
            self._folder.delete(writing.path)

    # Rows come back.

    def resume(self, request: Request) -> None:
        """Let a request that was parked and is admitted again go on, at once or soon."""
        if request.saved is None:
            self.restore(request)
            self._resumed(request)
            return
        self._hands.scheduler.suspend(request.rid)
        loader = SnapshotReader(self._hands.cache, records_of(request.saved.path))
        self.loading[request.rid] = loader
        self._jobs[request.rid] = self._load(request, request.saved, loader)

    def _resumed(self, request: Request) -> None:
        request.resumed_at = request.longest
        self._report(RowResumed(rid=request.rid))

    def restore(self, request: Request) -> None:
        """Give a request its rows back; all or, where memory is short, none."""
        hands, cache = self._hands, self._hands.cache
        holders = [one for one in request.holders if one.snapshot is not None]
        rows = [cache.restore(one.snapshot) for one in holders]
        request.kept_pages = 0
        for holder, row in zip(holders, rows, strict=True):
            cache.snapshots.drop(holder.snapshot)
            holder.snapshot = None
            if isinstance(holder, Request):
                holder.row = row
            else:
                hands.join(request, holder, row)

    def _load(self, request: Request, saved: Saved, loader: SnapshotReader) -> Iterator[None]:
        hands, rid = self._hands, request.rid
        spent = 0.0
        try:
            steps = loader.run()
            while rid in self.loading:
                start = time.monotonic()
                if next(steps, self) is self:
                    break
                spent += time.monotonic() - start
                yield
            else:
                return  # it is over, and forgotten
        except (DamagedRecord, OSError) as error:
            _log.warning("a parked row is computed again: %s", error)
            loader.forget()
            self._start_over(request)
        else:
            self._rates.note("read", saved.nbytes, spent)
            self._take_in(request, saved, loader)
        del self.loading[rid]
        self._drop_file(request)
        hands.scheduler.resume(rid)
        self._resumed(request)

    def _take_in(self, request: Request, saved: Saved, loader: SnapshotReader) -> None:
        """Give the rows that were read to those who wrote them."""
        owners = {one.key if isinstance(one, Completion) else None: one for one in request.holders}
        for key, row in zip(saved.holders, loader.sequences, strict=True):
            owner = owners[key]
            if isinstance(owner, Request):
                owner.row = row
            else:
                self._hands.join(request, owner, row)

    def _drop_file(self, request: Request) -> None:
        if request.saved is not None and self._folder is not None:
            self._folder.delete(request.saved.path)
        request.saved = None

    # Requests end, steps fail.

    def forget(self, request: Request) -> None:
        """Let go of what a request that is over has here; what was frozen, the engine drops."""
        loader = self.loading.pop(request.rid, None)
        if loader is not None:
            loader.forget()
        self._stop_writing(request.rid)
        self._drop_file(request)

    def abandon(self) -> None:
        """Give up what is under way, after a step that failed.

        Who was being written stays in memory; who was being read is brought back like all rows.
        """
        self._jobs.clear()
        self._hands.admission.closed = False
        for rid in list(self._writing):
            self._stop_writing(rid)
        for rid, loader in list(self.loading.items()):
            del self.loading[rid]
            loader.forget()
            request = self._hands.requests[rid]
            self._drop_file(request)
            self._hands.scheduler.resume(rid)
            self._resumed(request)
        self.requeue()


def _name(rid: str) -> str:
    """Return a file's name: ids are the daemon's own, and may hold anything."""
    return hashlib.sha256(rid.encode()).hexdigest()[:32]
