"""Keeps what is left of the rows of preempted requests: snapshots, a file, or only the tokens.

`kvd.worker.core.preemption` decides which, and when the rows come back.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.worker.core.batch import Batch
from kvd.worker.core.request import Request, SwappedRows
from kvd.worker.serving.runner import Row
from protocol.worker import RowResumed


class PreemptedRows:
    """The preempted requests of one engine: their rows leave the batch, and come back into it."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        self._cache = batch.cache
        self._admission = batch.admission

    def preempt(self, request: Request) -> None:
        """Take an admitted request out of the batch; snapshots of its rows stay in memory.

        No step may be in flight. Only `Admission.requeue_preempted` queues the request again.
        """
        assert not self._batch.in_flight, "a step in flight uses the rows"
        for completion in request.completions:
            if completion.row is not None:
                completion.snapshot = self._cache.snapshots.take(completion.row)
                self._batch.leave(completion)
        if request.row is not None:
            request.snapshot = self._cache.snapshots.take(request.row)
            self._cache.free(request.row, clean=False)
            request.row = None
        request.kept_pages = self._pages_of(request)
        self._batch.prefix_cache.release_place(request.tracked)
        self._admission.preempt(request.rid, request.kept_pages)

    def _pages_of(self, request: Request) -> int:
        """Return the pages of the budget that a request's snapshots take."""
        charge_of = self._cache.snapshots.charge_of
        kept: int = sum(charge_of(owner.snapshot) for owner in request.preempted_owners)
        return -(-kept // self._admission.budget.page_bytes)

    def recount(self, request: Request) -> None:
        """Lower what a preempted request keeps, after its snapshots were stepped down."""
        if request.kept_pages:
            request.kept_pages = self._pages_of(request)
            self._admission.reduce_kept(request.rid, request.kept_pages)

    def restore(self, request: Request) -> None:
        """Turn a request's snapshots into rows: all of them, or none if memory is short."""
        owners = request.preempted_owners
        rows = [self._cache.restore(owner.snapshot) for owner in owners]
        request.kept_pages = 0
        for owner, row in zip(owners, rows, strict=True):
            self._cache.snapshots.drop(owner.snapshot)
            owner.snapshot = None
            self._batch.join(request, owner, row)

    def move_out(self, request: Request, swapped: SwappedRows | None) -> None:
        """Drop a preempted request's snapshots; ``swapped`` None: its rows must be recomputed."""
        for owner in request.preempted_owners:
            self._cache.snapshots.drop(owner.snapshot)
            owner.snapshot = None
        request.kept_pages = 0
        request.swapped = swapped
        self._admission.reduce_kept(request.rid, 0)
        if swapped is None:
            self._batch.start_over(request)

    def move_in(self, request: Request, swapped: SwappedRows, rows: Sequence[Row]) -> None:
        """Give a request the rows that were read from its file, in the file's order."""
        owners = {owner.key: owner for owner in request.owners}
        for key, row in zip(swapped.owners, rows, strict=True):
            self._batch.join(request, owners[key], row)

    def finish_resume(self, request: Request) -> None:
        """Report that a preempted request continues, and delete its file."""
        if request.swapped is not None:
            self._batch.transfers.folder.delete(request.swapped.path)
            request.swapped = None
        request.resumed_at = request.longest
        self._batch.reports.append(RowResumed(rid=request.rid))
