"""Admission: queue and grant together, with a daemon that answers late."""

from __future__ import annotations

import pytest

from kvd.worker.scheduling.admission import Admission, Held
from kvd.worker.scheduling.budget import PageBudget
from kvd.worker.scheduling.scheduler import Scheduler
from protocol.errors import InsufficientMemory
from protocol.worker import Grant
from tests.worker.scheduling.helpers import BASE, IDLE, PAGE, ROW_PAGES, with_two_levels


def admission_of(pages=IDLE, rows=5):
    return Admission(
        Scheduler(max_rows=rows, chunk=128),
        PageBudget(BASE, PAGE, BASE + pages * PAGE, seq=1),
        row_pages=ROW_PAGES,
        idle_pages=IDLE,
    )


def answer(admission, request, *, granted, budget_pages=100):
    budget = admission.budget
    admission.granted(
        Grant(
            seq=request.seq,
            total_bytes=request.total_bytes if granted else budget.granted_bytes,
            granted=granted,
            limit_bytes=BASE + budget_pages * PAGE,
        )
    )


def denied(admission, held=Held(), **more):  # noqa: B008 - a value
    """Admit until no more memory is requested; deny all memory requests."""
    while (result := admission.admit(held)).memory_request is not None and result.refused is None:
        answer(admission, result.memory_request, granted=False, **more)
    return result


def test_after_a_denial_cached_prefixes_are_evicted() -> None:
    admission = admission_of(pages=20)
    admission.submit("a", 640, 64)  # 10 pages, and 3 for the tail
    assert denied(admission, Held(20, 1, cached=16)).evict_pages == 9
    assert admission.has_work
    result = admission.admit(Held(17, 1, cached=7))
    assert result.plan.admitted == ("a",)
    assert result.evict_pages == 0


def test_no_more_is_evicted_than_is_cached() -> None:
    admission = admission_of(pages=20)
    admission.submit("a", 1920, 64)
    assert denied(admission, Held(20, 1, cached=4)).evict_pages == 4
    result = denied(admission, Held(16, 1))
    assert result.plan.missing_pages == 13
    assert (result.evict_pages, result.refused, result.swap_out_kept) == (0, None, False)


def test_a_request_waits_while_other_workers_hold_the_memory_and_reports_its_position() -> None:
    admission = admission_of()
    admission.submit("a", 1920, 64)
    request = admission.admit(Held()).memory_request
    assert request is not None
    assert not request.resuming
    admission.submit("b", 1920, 64)
    assert admission.admit(Held()).queue_positions == ()  # the memory may still be granted
    answer(admission, request, granted=False)
    result = denied(admission)
    assert (result.refused, result.evict_pages) == (None, 0)
    assert [(one.rid, one.position) for one in result.queue_positions] == [("a", 1), ("b", 2)]
    assert not admission.has_work
    admission.granted(Grant(seq=admission.budget.seq, total_bytes=BASE + 33 * PAGE, granted=True))
    assert admission.admit(Held()).plan.admitted == ("a",)


def test_a_request_beyond_the_budget_is_refused_at_submit_and_when_the_budget_shrinks() -> None:
    admission = admission_of()
    admission.submit("a", 64, 1)
    request = admission.admit(Held()).memory_request
    assert request is None
    admission.budget.limit_bytes = BASE + 40 * PAGE
    admission.submit("b", 2368, 64)  # 37 pages, and a tail of 3
    with pytest.raises(InsufficientMemory) as refused:
        admission.submit("c", 2432, 64)
    detail = refused.value.detail
    assert (detail["needed_bytes"], detail["limit_bytes"]) == (BASE + 41 * PAGE, BASE + 40 * PAGE)
    admission.finish("a")
    result = denied(admission, budget_pages=39)
    assert result.refused is not None
    assert result.refused[0] == "b"


def test_reservations_follow_the_start_level_and_step_downs() -> None:
    admission = with_two_levels(pages=60)
    scheduler = admission.scheduler
    admission.submit("a", 640, 64)
    assert admission.admit(Held()).plan.admitted == ("a",)
    admission.set_start_level(1)
    admission.submit("b", 640, 64)
    admission.submit("c", 640, 64)
    assert admission.admit(Held()).plan.admitted == ("b", "c")
    assert [scheduler.find(rid).level for rid in "abc"] == [0, 1, 1]
    assert scheduler.reserved_pages == 11 + 6 + 6
    assert scheduler.step_down_savings("a", 1) == 5
    admission.step_down("a", 1)
    assert scheduler.reserved_pages == 18
    admission.set_start_level(0)
    admission.submit("d", 640, 64)
    admission.admit(Held())
    assert scheduler.reserved_pages == 29


def test_a_request_starts_at_the_first_level_that_fits_the_budget() -> None:
    admission = with_two_levels()
    admission.budget.limit_bytes = BASE + 30 * PAGE
    admission.submit("a", 1920, 64)  # 31 pages at level 0, 16 at level 1
    assert admission.scheduler.find("a").level == 1
    admission.granted(Grant(seq=1, total_bytes=0, granted=True, limit_bytes=BASE + 40 * PAGE))
    assert admission.scheduler.find("a").level == 0


def test_no_request_is_admitted_while_memory_is_given_back() -> None:
    admission = admission_of(pages=30)
    admission.submit("a", 640, 64)
    admission.closed = True
    assert admission.admit(Held()).plan.admitted == ()
    assert not admission.has_work
    admission.closed = False
    assert admission.admit(Held()).plan.admitted == ("a",)


def test_giving_back_replaces_an_open_memory_request() -> None:
    admission = admission_of(pages=40)
    admission.submit("a", 6400, 64)
    open_request = admission.admit(Held()).memory_request
    assert open_request is not None
    request, freed = admission.give_back(20, Held())
    assert request is not None
    assert (request.seq, request.total_bytes, freed) == (
        open_request.seq + 1,
        BASE + 20 * PAGE,
        20 * PAGE,
    )
    answer(admission, open_request, granted=True, budget_pages=200)  # too late
    assert admission.budget.granted_bytes == BASE + 20 * PAGE
    answer(admission, request, granted=True, budget_pages=200)
    assert admission.admit(Held()).memory_request is not None


def test_kept_pages_are_swapped_out_before_the_head_waits_forever() -> None:
    admission = admission_of(pages=30)
    for rid in "ab":
        admission.submit(rid, 640, 64)
    assert admission.admit(Held()).plan.admitted == ("a", "b")
    for rid in "ab":
        admission.preempt(rid, kept_pages=11)
        admission.requeue_preempted(rid)
    request, _ = admission.give_back(22, Held())
    assert request is not None
    answer(admission, request, granted=True)
    result = denied(admission)
    assert result.swap_out_kept
    admission.reduce_kept("b", 0)
    assert admission.admit(Held()).plan.resumed == ("a",)


def preempted_with_smaller_grant() -> Admission:
    admission = admission_of(pages=20)
    admission.submit("a", 640, 64)
    assert admission.admit(Held()).plan.admitted == ("a",)
    admission.preempt("a")
    request, _ = admission.give_back(8, Held())
    assert request is not None
    answer(admission, request, granted=True)
    admission.requeue_preempted("a")
    return admission


def test_a_preempted_request_waits_for_its_memory() -> None:
    admission = preempted_with_smaller_grant()
    result = denied(admission)
    assert (result.refused, admission.has_work) == (None, False)
    # The daemon remembers the denied memory request and grants it when there is room.
    admission.granted(Grant(seq=admission.budget.seq, total_bytes=BASE + 20 * PAGE, granted=True))
    result = admission.admit(Held())
    assert (result.plan.admitted, result.plan.resumed) == (("a",), ("a",))


def test_a_preempted_request_beyond_the_budget_is_refused() -> None:
    admission = preempted_with_smaller_grant()
    refused = denied(admission, budget_pages=12).refused
    assert refused is not None
    assert isinstance(refused[1], InsufficientMemory)


def test_checkpoints_covered_by_row_reservations_count_once() -> None:
    admission = admission_of(pages=20)
    admission.submit("a", 1, 1)
    admission.admit(Held())
    spare = admission.spare_pages(Held(0, 1))
    assert spare > 0
    assert admission.spare_pages(Held(3, 1, cached=3)) == spare - 3
    assert admission.spare_pages(Held(3, 1, cached=3, covered=2)) == spare - 1
    request = admission.request_spare(spare + 2, Held(3, 1, cached=3, covered=2))
    assert request is not None
    assert request.reason == "3 more pages"
    assert admission.request_spare(spare + 2, Held()) is None  # a memory request is open


def test_spare_tails_count_until_they_are_freed() -> None:
    admission = admission_of(pages=20)
    admission.submit("a", 640, 64)
    assert admission.admit(Held(0, 4)).plan.missing_pages == 10 + 4 * ROW_PAGES - 20
    assert admission.admit(Held(0, 3)).plan.admitted == ("a",)


def test_held_and_reserved_pages_are_not_given_back() -> None:
    admission = admission_of(pages=40)
    admission.submit("a", 640, 64)
    admission.submit("b", 640, 64)
    admission.admit(Held())
    assert admission.give_back(0, Held(40, 0)) == (None, 0)
    request, _ = admission.give_back(0, Held(5, 1))  # the rows are smaller than their reservations
    assert request is not None
    assert request.total_bytes == BASE + 26 * PAGE
    answer(admission, request, granted=True)
    admission.preempt("b", kept_pages=4)
    request, _ = admission.give_back(0, Held(14, 1))
    assert request is not None
    assert request.total_bytes == BASE + 17 * PAGE


def test_an_idle_engine_keeps_cached_prefixes() -> None:
    admission = admission_of(pages=40)
    request = admission.give_back_idle(kept=12)
    assert request is not None
    assert request.total_bytes == BASE + (IDLE + 12) * PAGE
    answer(admission, request, granted=True)
    assert not admission.has_work
    assert admission.give_back_idle(kept=12) is None


def test_a_denied_memory_request_is_withdrawn_when_its_request_ends() -> None:
    """Otherwise the daemon would later grant memory that no request needs."""
    admission = admission_of()
    admission.submit("a", 1920, 64)
    request = admission.admit(Held()).memory_request
    assert request is not None
    answer(admission, request, granted=False)
    admission.finish("a")
    assert admission.has_work
    request = admission.give_back_idle()
    assert request is not None
    assert request.total_bytes == BASE + IDLE * PAGE


def test_suspended_and_preempted_requests_do_not_count_as_work() -> None:
    admission = admission_of(pages=40)
    admission.submit("a", 640, 64)
    admission.admit(Held())
    assert admission.has_work
    admission.scheduler.suspend("a")
    assert not admission.has_work
    admission.scheduler.resume("a")
    assert admission.has_work
    admission.preempt("a")
    admission.admit(Held())
    assert not admission.has_work
    assert not admission.idle
    admission.requeue_preempted("a")
    assert admission.has_work


def test_denied_spare_memory_hides_no_request_of_a_client() -> None:
    """The daemon frees memory of other models only for clients, so it must see their requests."""
    admission = admission_of(pages=40)
    admission.submit("a", 640, 64)
    admission.admit(Held())
    request = admission.request_spare(60, Held())
    assert request is not None
    answer(admission, request, granted=False)
    assert admission.request_spare(60, Held()) is None
    assert admission.request_spare(90, Held()) is None
    admission.submit("b", 5120, 64)
    result = admission.admit(Held(pages=30, cached=30))

    assert result.memory_request is not None
    assert result.memory_request.total_bytes > request.total_bytes
    assert not result.evict_pages
    answer(admission, result.memory_request, granted=False)
    assert admission.request_spare(50, Held()) is not None, "less than was denied"


@pytest.mark.parametrize("event", ["finish", "finish_choice", "preempt"])
def test_freed_memory_allows_a_denied_request_again(event: str) -> None:
    admission = admission_of(pages=40)
    admission.submit("a", 1, 1, choices=2)
    admission.admit(Held())
    admission.submit("b", 5120, 64)
    denied(admission)
    admission.admit(Held())
    assert admission.budget.denied is not None
    getattr(admission, event)("a")
    assert admission.admit(Held()).memory_request is not None


def test_pages_that_a_preempted_request_no_longer_keeps_are_free_for_others() -> None:
    admission = admission_of(pages=30)
    admission.submit("runs", 1, 1)
    admission.submit("a", 640, 64)
    admission.admit(Held())
    admission.preempt("a", kept_pages=10)
    admission.submit("b", 960, 64)  # 15 pages, and two tails
    assert denied(admission).plan.missing_pages == 1
    assert not admission.admit(Held()).plan.admitted
    admission.reduce_kept("a", 4)
    assert admission.has_work
    assert admission.admit(Held()).plan.admitted == ("b",)
    admission.scheduler.suspend("runs")
    admission.scheduler.suspend("b")
    admission.submit("c", 5120, 64)
    denied(admission)
    admission.reduce_kept("a", 0)
    assert admission.has_work
    assert admission.admit(Held()).memory_request is not None
