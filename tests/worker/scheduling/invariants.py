"""Invariants of a scheduler, checked after every event."""

from __future__ import annotations

from kvd.worker.scheduling.scheduler import Scheduler
from kvd.worker.scheduling.states import RequestStates


def check_scheduler(scheduler: Scheduler) -> None:
    states = scheduler.states
    check_states(states)
    assert states.rows <= scheduler._max_rows
    for request in states.requests.values():
        assert request.remaining == 0 or request.prefilled % scheduler._chunk == 0, "off the grid"
    for rid, chunks in scheduler._planned.items():
        if not chunks:
            continue
        request = states.prefilling[rid]
        assert not request.suspended
        start = request.prefilled
        for chunk in chunks:
            end = min((start // scheduler._chunk + 1) * scheduler._chunk, request.prefill_end)
            assert (chunk.rid, chunk.start, chunk.end) == (rid, start, end)
            start = end


def check_states(states: RequestStates) -> None:
    queued = list(states.queue)
    outside = [*queued, *states.preempted.values()]
    admitted = [*states.prefilling.values(), *states.decoding.values()]
    rids = [request.rid for request in [*outside, *admitted]]
    assert len(rids) == len(set(rids)), "a request is in two states"
    assert set(rids) == set(states.requests), "a request is in no state"
    assert queued == sorted(queued, key=lambda request: request.queue_key), "queue out of order"
    assert states.rows == sum(request.choices for request in admitted), "rows miscounted"
    pages = sum(request.pages for request in admitted)
    pages += sum(request.kept_pages for request in outside)
    assert states.reserved_pages == pages, "pages miscounted"
    assert not any(request.suspended for request in outside)
    assert not any(request.kept_pages for request in admitted)
    assert all(request.was_admitted for request in [*states.preempted.values(), *admitted])
    assert all(
        request.was_admitted or not (request.prefilled or request.kept_pages) for request in queued
    )
    assert all(request.remaining == 0 for request in states.decoding.values())
    assert all(request.remaining > 0 for request in states.prefilling.values())
