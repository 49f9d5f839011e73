"""Invariants of a batch."""

from __future__ import annotations

from kvd.worker.core.batch import Batch
from tests.worker.prefix.invariants import check_prefix_cache


def check_batch(batch: Batch) -> None:
    """Assert the invariants between two steps."""
    assert batch.admission.idle == (not batch.requests)
    step = batch._step
    in_step = [] if step is None else [*step.drawing, *step.passing]
    for rid, request in batch.requests.items():
        assert rid == request.rid
        assert request.completions, "a request without completions was not forgotten"
        admitted = batch.scheduler.is_admitted(rid)
        for owner in request.owners:
            assert owner.row is None or (admitted and owner.snapshot is None)
        assert request.row is None or not request.begun
        assert not (request.preempted_owners and (admitted or request.swapped))
        assert not request.kept_pages or request.preempted_owners
        for completion in request.completions:
            assert not completion.released
            assert completion.row is None or request.begun
            assert not completion.ended or completion in in_step
            assert completion.launched <= request.max_new
    for completion in in_step:
        assert not completion.released, "a step in flight uses a freed row"
        assert completion in batch.requests[completion.key[0]].completions
    check_prefix_cache(batch.prefix_cache, (request.tracked for request in batch.requests.values()))
