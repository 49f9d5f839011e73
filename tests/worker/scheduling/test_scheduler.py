"""The scheduler: admission, chunks, choices, preemption and deadlines."""

from __future__ import annotations

import pytest

from kvd.worker.scheduling.scheduler import Chunk, Plan, ReservationSizes, Scheduler
from protocol.errors import InvalidRequest, LocalProtocolError
from tests.worker.scheduling.helpers import CHUNK, PAGES, grouping, own, within
from tests.worker.scheduling.invariants import check_scheduler


@pytest.fixture
def scheduler():
    result = Scheduler(max_rows=3, chunk=CHUNK)
    yield result
    check_scheduler(result)


def run_prefill(scheduler, free=PAGES):
    """Run plans until no prompt is left to prefill; return the chunks."""
    chunks = []
    while group := scheduler.plan(within(free)).group:
        chunks += group
        for chunk in group:
            scheduler.mark_prefilled(chunk.rid, chunk.end)
    return chunks


def test_an_idle_scheduler_plans_nothing(scheduler):
    assert scheduler.plan(within(PAGES)) == Plan((), (), (), 0)


def test_a_prompt_of_one_token_decodes_at_once(scheduler):
    scheduler.submit("a", 1, 10)
    assert scheduler.plan(within(PAGES)) == Plan(("a",), (), ("a",), 0)


def test_chunks_end_on_the_absolute_grid_and_leave_the_last_token(scheduler):
    scheduler.submit("a", 300, 10)
    assert run_prefill(scheduler) == [
        Chunk("a", 0, 128),
        Chunk("a", 128, 256),
        Chunk("a", 256, 299),
    ]
    assert scheduler.plan(within(PAGES)).decode == ("a",)


@pytest.mark.parametrize(
    ("prompt_len", "ends"), [(2, [1]), (128, [127]), (129, [128]), (130, [128, 129])]
)
def test_chunk_ends_around_the_grid(scheduler, prompt_len, ends):
    scheduler.submit("a", prompt_len, 1)
    assert [chunk.end for chunk in run_prefill(scheduler)] == ends


def test_a_plan_is_repeated_until_its_chunk_ran(scheduler):
    scheduler.submit("a", 300, 1)
    scheduler.submit("b", 300, 1)
    first = scheduler.plan(within(PAGES)).group
    assert scheduler.plan(within(PAGES)).group == first


def test_decoding_continues_during_a_long_prompt(scheduler):
    scheduler.submit("short", 1, 10)
    scheduler.submit("long", 2000, 10)
    while (plan := scheduler.plan(within(PAGES))).group:
        assert "short" in plan.decode
        scheduler.mark_prefilled("long", plan.group[0].end)
    assert plan.decode == ("short", "long")


def test_rows_are_bounded(scheduler):
    for rid in "abcd":
        scheduler.submit(rid, 1, 1)
    assert scheduler.plan(within(PAGES)).admitted == ("a", "b", "c")
    assert scheduler.plan(within(PAGES)) == Plan((), (), ("a", "b", "c"), 0)
    scheduler.finish("b")
    assert scheduler.plan(within(PAGES)) == Plan(("d",), (), ("a", "c", "d"), 0)


@pytest.mark.parametrize(
    ("prompt_len", "max_new", "pages"),
    [(1, 1, 0), (1, 126, 0), (1, 127, 1), (64, 64, 1), (128, 63, 1), (128, 64, 2), (4000, 96, 63)],
)
def test_the_reservation_is_the_worst_case_without_the_tail(scheduler, prompt_len, max_new, pages):
    scheduler.submit("a", prompt_len, max_new)
    assert scheduler.find("a").pages == pages


def test_rows_count_in_addition_to_pages(scheduler):
    """In this test each row's tail takes two pages."""
    scheduler.submit("a", 640, 64)
    calls = []

    def missing_pages(pages, rows):
        calls.append((pages, rows))
        return pages + 2 * rows - 11

    assert scheduler.plan(missing_pages).missing_pages == 1
    assert scheduler.head.rid == "a"
    assert calls[0] == (10, 1)
    assert scheduler.plan(within(12)).admitted == ("a",)
    assert scheduler.head is None
    assert len(scheduler.states.requests) == 1


def test_missing_pages_are_counted_for_all_requests_with_free_rows(scheduler):
    for rid in "abcd":  # three rows
        scheduler.submit(rid, 640, 64)
    plan = scheduler.plan(within(7))
    assert (plan.missing_pages, plan.queue_missing_pages) == (3, 23)
    plan = scheduler.plan(within(12))
    assert plan.admitted == ("a",)
    assert (plan.missing_pages, plan.queue_missing_pages) == (8, 18)


def test_the_head_waits_for_pages_and_is_never_overtaken(scheduler):
    scheduler.submit("big", 640, 64)  # 10 pages
    scheduler.submit("tiny", 1, 1)
    assert scheduler.plan(within(7)) == Plan((), (), (), 3, 3)
    assert scheduler.waiting == 2
    assert scheduler.plan(within(10)).admitted == ("big", "tiny")
    assert scheduler.reserved_pages == 10


def test_pages_are_given_back_once(scheduler):
    scheduler.submit("a", 640, 64)
    scheduler.submit("b", 640, 64)
    assert scheduler.plan(within(10)) == Plan(("a",), (Chunk("a", 0, 128),), (), 10, 10)
    scheduler.finish("a")
    assert scheduler.reserved_pages == 0
    scheduler.finish("b")  # it was only queued
    assert scheduler.reserved_pages == 0
    with pytest.raises(LocalProtocolError, match="request a is not scheduled"):
        scheduler.finish("a")


def test_missing_pages_include_an_overdrawn_grant(scheduler):
    scheduler.submit("a", 640, 64)
    assert scheduler.plan(within(-5)).missing_pages == 15


@pytest.mark.parametrize("end", [0, 64, 127, 129, 299])
def test_only_the_planned_chunk_can_be_marked(scheduler, end):
    scheduler.submit("a", 300, 1)
    scheduler.plan(within(PAGES))
    with pytest.raises(LocalProtocolError, match="no chunk"):
        scheduler.mark_prefilled("a", end)


def test_a_request_without_planned_chunk_cannot_be_marked(scheduler):
    scheduler.submit("a", 300, 1)
    scheduler.submit("b", 300, 1)
    scheduler.plan(within(PAGES))
    with pytest.raises(LocalProtocolError, match="request b"):
        scheduler.mark_prefilled("b", 128)


def test_a_chunk_is_marked_once(scheduler):
    scheduler.submit("a", 300, 1)
    scheduler.plan(within(PAGES))
    scheduler.mark_prefilled("a", 128)
    with pytest.raises(LocalProtocolError, match="no chunk"):
        scheduler.mark_prefilled("a", 256)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_rows": 0},
        {"chunk": 0},
        {"age": 0},
        {"chunk": 256, "budget": 256},
        {"chunk": 256, "budget": 512, "decode_budget": 256},
    ],
)
def test_wrong_limits_are_refused(wrong):
    with pytest.raises(LocalProtocolError):
        Scheduler(**({"max_rows": 1, "chunk": 1} | wrong))


@pytest.mark.parametrize("wrong", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_wrong_numbers_and_duplicate_ids_are_refused(scheduler, wrong):
    scheduler.submit("a", 1, 1)
    with pytest.raises(LocalProtocolError, match="scheduled already"):
        scheduler.submit("a", 1, 1)
    prompt_len, max_new, choices = wrong
    with pytest.raises(LocalProtocolError, match="must be positive"):
        scheduler.submit("b", prompt_len, max_new, choices=choices)


def test_operations_on_unknown_or_queued_requests_raise(scheduler):
    scheduler.submit("waiting", 10, 1)
    for act in (scheduler.finish, scheduler.suspend, scheduler.resume, scheduler.preempt):
        with pytest.raises(LocalProtocolError, match="unknown"):
            act("unknown")
    for act in (
        scheduler.suspend,
        scheduler.resume,
        scheduler.preempt,
        scheduler.states.requeue_preempted,
    ):
        with pytest.raises(LocalProtocolError, match="request waiting is not"):
            act("waiting")


# Priorities. See also test_queue.py and test_prefill_order.py.


def test_higher_priorities_are_admitted_first_and_ageing_is_counted_in_work():
    scheduler = Scheduler(max_rows=1, chunk=CHUNK, age=1000)
    scheduler.submit("running", 1, 1)
    scheduler.plan(within(PAGES))
    scheduler.submit("low", 100, 100)
    scheduler.submit("later", 100, 100)
    scheduler.submit("urgent", 300, 300, priority=1)  # 400 tokens after "low"
    scheduler.submit("too late", 1, 1, priority=1)  # 1000 after "low", 800 after "later"
    admitted = []
    for rid in ("running", "urgent", "low", "too late"):
        scheduler.finish(rid)
        admitted += scheduler.plan(within(PAGES)).admitted
    assert admitted == ["urgent", "low", "too late", "later"]


def test_eight_short_prompts_are_prefilled_in_two_passes():
    scheduler = grouping()
    for rid in "abcdefgh":
        scheduler.submit(rid, 33, 10)
    for rids in ("abcd", "efgh"):
        group = scheduler.plan(within(PAGES)).group
        assert group == tuple(Chunk(rid, 0, 32) for rid in rids)
        for chunk in group:
            scheduler.mark_prefilled(chunk.rid, chunk.end)
            check_scheduler(scheduler)
    assert scheduler.plan(within(PAGES)).decode == tuple("abcdefgh")


def test_a_group_uses_the_budget_that_decoding_leaves():
    """The budget of 170 tokens holds five prompts of 32 with 10 decoding choices, four with 11."""
    for choices, together in ((10, 5), (11, 4), (30, 4)):
        scheduler = grouping(max_rows=42)
        scheduler.submit("decodes", 1, 10, choices=choices)
        for rid in "abcdefgh":
            scheduler.submit(rid, 33, 10)
        plan = scheduler.plan(within(PAGES))
        assert plan.decode == ("decodes",)
        assert len(plan.group) == together


def test_a_chunk_fits_with_all_rows_decoding():
    scheduler = grouping(max_rows=3)
    scheduler.submit("decodes", 1, 10, choices=2)
    scheduler.submit("long", 1000, 10)
    assert scheduler.plan(within(PAGES)).group == (Chunk("long", 0, 128),)


def test_suspended_requests_take_nothing_from_the_budget():
    scheduler = grouping(max_rows=42)
    scheduler.submit("decodes", 1, 10, choices=11)
    for rid in "abcdefgh":
        scheduler.submit(rid, 33, 10)
    assert len(scheduler.plan(within(PAGES)).group) == 4
    scheduler.suspend("decodes")
    assert len(scheduler.plan(within(PAGES)).group) == 5


def test_a_group_counts_as_one_pass():
    scheduler = grouping()
    for rid, prompt_len in (("a", 60), ("b", 60), ("long", 1025), ("short", 257)):
        scheduler.submit(rid, prompt_len, 10)
    leads = []
    for _ in range(3):
        group = scheduler.plan(within(PAGES)).group
        leads.append(group[0].rid)
        for chunk in group:
            scheduler.mark_prefilled(chunk.rid, chunk.end)
    assert leads == ["a", "short", "long"]


def test_unmarked_members_of_a_group_are_planned_again():
    scheduler = grouping()
    for rid in "abc":
        scheduler.submit(rid, 33, 10)
    scheduler.plan(within(PAGES))
    scheduler.mark_prefilled("b", 32)
    scheduler.finish("a")
    assert scheduler.plan(within(PAGES)).group == (Chunk("c", 0, 32),)


# Cached prefixes.


def test_a_cached_prefix_is_skipped():
    scheduler = grouping()
    scheduler.submit("a", 300, 10)
    scheduler.submit("b", 60, 10)
    assert scheduler.plan(within(PAGES)).group == (Chunk("a", 0, 128),)
    assert scheduler.cache_candidates == ("a", "b")
    scheduler.skip_to("a", 256)
    assert scheduler.cache_candidates == ("b",)
    assert scheduler.next_group() == (Chunk("a", 256, 299), Chunk("b", 0, 59))


def test_a_fully_cached_prompt_decodes_at_once(scheduler):
    scheduler.submit("a", 257, 10)
    scheduler.plan(within(PAGES))
    scheduler.skip_to("a", 256)
    assert scheduler.next_group() == ()
    assert scheduler.plan(within(PAGES)).decode == ("a",)


def test_a_miss_changes_nothing(scheduler):
    scheduler.submit("a", 300, 10)
    group = scheduler.plan(within(PAGES)).group
    scheduler.skip_to("a", 0)
    assert scheduler.next_group() == group


@pytest.mark.parametrize("position", [-128, 64, 299, 384])
def test_skipped_positions_lie_on_the_grid_and_in_the_prompt(scheduler, position):
    scheduler.submit("a", 300, 10)
    scheduler.plan(within(PAGES))
    with pytest.raises(LocalProtocolError, match="not a chunk end"):
        scheduler.skip_to("a", position)


def test_nothing_is_skipped_after_the_first_chunk_or_before_admission(scheduler):
    scheduler.submit("a", 300, 10)
    with pytest.raises(LocalProtocolError, match="not about to start"):
        scheduler.skip_to("a", 128)
    scheduler.plan(within(PAGES))
    scheduler.mark_prefilled("a", 128)
    with pytest.raises(LocalProtocolError, match="not about to start"):
        scheduler.skip_to("a", 256)


# Deadlines.


def test_deadlines_apply_in_every_state(scheduler):
    scheduler.submit("runs", 10, 10, deadline=5.0)
    scheduler.submit("preempted", 10, 10, deadline=3.0)
    scheduler.plan(within(PAGES))
    scheduler.preempt("preempted")
    scheduler.submit("queued", 10, 10, deadline=4.0)
    scheduler.submit("without", 10, 10)
    assert scheduler.next_deadline == 3.0
    assert scheduler.expired(2.9) == []
    assert scheduler.expired(4.0) == ["preempted", "queued"]
    for rid in scheduler.expired(5.0):
        scheduler.finish(rid)
    assert scheduler.next_deadline is None
    assert len(scheduler.states.requests) == 1


# Suspension and preemption.


def test_a_suspended_request_keeps_its_memory_and_gets_no_tokens(scheduler):
    for rid in "ab":
        scheduler.submit(rid, 640, 64)
    scheduler.submit("c", 1, 1)
    scheduler.plan(within(PAGES))
    scheduler.suspend("a")
    scheduler.suspend("c")
    plan = scheduler.plan(within(PAGES))
    assert plan == Plan((), (Chunk("b", 0, 128),), (), 0)
    assert (scheduler.reserved_pages, scheduler.reserved_rows, scheduler.states.active) == (
        20,
        3,
        1,
    )
    assert scheduler.find("a").suspended
    scheduler.resume("a")
    scheduler.resume("c")
    plan = scheduler.plan(within(PAGES))
    assert plan == Plan((), (Chunk("a", 0, 128),), ("c",), 0)


def test_the_chunk_of_a_suspended_request_cannot_be_marked(scheduler):
    scheduler.submit("a", 300, 1)
    scheduler.plan(within(PAGES))
    scheduler.suspend("a")
    with pytest.raises(LocalProtocolError, match="no chunk"):
        scheduler.mark_prefilled("a", 128)
    with pytest.raises(LocalProtocolError, match="suspended already"):
        scheduler.suspend("a")
    scheduler.resume("a")
    with pytest.raises(LocalProtocolError, match="not suspended"):
        scheduler.resume("a")


def test_a_preempted_request_frees_its_pages_and_continues_its_prefill(scheduler):
    scheduler.submit("a", 640, 64)
    scheduler.submit("b", 640, 64)
    scheduler.plan(within(20))
    scheduler.mark_prefilled("a", 128)
    scheduler.preempt("a")
    assert scheduler.reserved_pages == 10
    scheduler.submit("c", 640, 64)
    assert scheduler.plan(within(20)).admitted == ("c",)
    scheduler.submit("d", 640, 64)
    scheduler.states.requeue_preempted("a")
    assert scheduler.head.rid == "a"  # it arrived before d
    scheduler.finish("b")
    plan = scheduler.plan(within(20))
    assert (plan.admitted, plan.resumed) == (("a",), ("a",))
    assert plan.group == (Chunk("a", 128, 256),)
    assert scheduler.plan(within(20)).resumed == ()


def test_a_resumed_request_decodes_at_once(scheduler):
    scheduler.submit("a", 1, 100)
    scheduler.plan(within(PAGES))
    scheduler.suspend("a")
    scheduler.preempt("a")
    assert scheduler.plan(within(PAGES)) == Plan((), (), (), 0)
    scheduler.states.requeue_preempted("a")
    assert scheduler.plan(within(PAGES)) == Plan(("a",), (), ("a",), 0, 0, ("a",))


def test_pages_kept_by_a_preempted_request_are_counted_once(scheduler):
    scheduler.submit("a", 640, 64)
    scheduler.plan(within(10))
    scheduler.preempt("a", kept_pages=7)
    assert scheduler.reserved_pages == 7
    scheduler.submit("b", 250, 70)
    assert scheduler.plan(within(10)) == Plan((), (), (), 1, 1)
    scheduler.states.requeue_preempted("a")
    assert scheduler.plan(within(10)).admitted == ("a",)
    assert scheduler.reserved_pages == 10
    scheduler.preempt("a", kept_pages=7)
    scheduler.states.reduce_kept("a", 2)
    assert scheduler.reserved_pages == 2
    assert scheduler.plan(within(10)).admitted == ("b",)
    with pytest.raises(LocalProtocolError, match="not preempted with at least 3"):
        scheduler.states.reduce_kept("a", 3)
    with pytest.raises(LocalProtocolError, match="cannot keep"):
        scheduler.preempt("b", kept_pages=-1)
    assert scheduler.reserved_pages == 2 + 4
    scheduler.finish("a")
    assert scheduler.reserved_pages == 4


def test_victims_are_in_order_of_low_priority_and_late_arrival(scheduler):
    scheduler.submit("old", 10, 10)
    scheduler.submit("urgent", 10, 10, priority=2)
    scheduler.submit("new", 300, 10)
    scheduler.submit("queued", 10, 10, priority=-1)
    scheduler.plan(within(PAGES))
    scheduler.suspend("new")
    assert scheduler.victims() == ["new", "old", "urgent"]


# Several choices.


def test_choices_share_the_prompts_pages_and_end_one_by_one():
    scheduler = Scheduler(max_rows=3, chunk=CHUNK, sizes=ReservationSizes(own_pages=own))
    scheduler.submit("a", 321, 127, choices=3)  # 4 pages of prompt, 6 at the end
    scheduler.submit("b", 1, 1)
    assert scheduler.find("a").pages == 4 + 3 * 2
    assert scheduler.plan(within(9)).missing_pages == 1
    assert scheduler.plan(within(10)).admitted == ("a",)
    run_prefill(scheduler)
    assert scheduler.plan(within(10)).decode == ("a",)
    scheduler.states.remove_choice("a")
    assert scheduler.reserved_pages == 8
    plan = scheduler.plan(within(10))
    assert (plan.admitted, plan.decode) == (("b",), ("a", "b"))
    scheduler.states.remove_choice("a")
    assert (scheduler.reserved_rows, scheduler.reserved_pages) == (2, 6)
    with pytest.raises(LocalProtocolError, match="several choices"):
        scheduler.states.remove_choice("a")
    scheduler.finish("a")
    assert scheduler.reserved_pages == 0


def test_by_default_choices_share_no_pages(scheduler):
    scheduler.submit("a", 321, 127, choices=3)
    assert scheduler.find("a").pages == 3 * 6


def test_more_choices_than_rows_are_refused(scheduler):
    with pytest.raises(InvalidRequest, match="at most 3"):
        scheduler.submit("a", 10, 10, choices=4)


def test_several_choices_wait_for_enough_rows_and_are_not_overtaken(scheduler):
    scheduler.submit("a", 1, 1)
    scheduler.submit("b", 1, 1, choices=3)
    scheduler.submit("c", 1, 1)
    assert scheduler.plan(within(PAGES)) == Plan(("a",), (), ("a",), 0)
    scheduler.finish("a")
    assert scheduler.plan(within(PAGES)).admitted == ("b",)
