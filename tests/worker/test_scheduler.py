"""The scheduler: admission, chunks, turns, and its invariants under random traffic."""

from __future__ import annotations

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.worker.scheduler import Chunk, Plan, Scheduler
from protocol.errors import LocalProtocolError

PAGES = 40
CHUNK = 128


@pytest.fixture
def scheduler():
    made = Scheduler(max_rows=3, chunk=CHUNK)
    yield made
    made.check()


def within(total):
    """Memory of so many pages, for what rows reserve."""
    return lambda pages, rows: pages - total


def run_prefill(scheduler, free=PAGES):
    """Run plans until nothing prefills; return the chunks."""
    chunks = []
    while (chunk := scheduler.plan(within(free)).prefill) is not None:
        chunks.append(chunk)
        scheduler.prefilled(chunk.rid, chunk.end)
    return chunks


def test_an_idle_scheduler_plans_nothing(scheduler):
    assert scheduler.plan(within(PAGES)) == Plan((), None, (), 0)


def test_a_prompt_of_one_token_decodes_at_once(scheduler):
    scheduler.submit("a", 1, 10)
    assert scheduler.plan(within(PAGES)) == Plan(("a",), None, ("a",), 0)


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


def test_prefilling_rows_take_turns(scheduler):
    scheduler.submit("a", 300, 1)
    scheduler.submit("b", 129, 1)
    scheduler.submit("c", 200, 1)
    assert [chunk.rid for chunk in run_prefill(scheduler)] == ["a", "b", "c", "a", "c", "a"]


def test_a_plan_is_repeated_until_its_chunk_ran(scheduler):
    scheduler.submit("a", 300, 1)
    scheduler.submit("b", 300, 1)
    first = scheduler.plan(within(PAGES)).prefill
    assert scheduler.plan(within(PAGES)).prefill == first


def test_decoding_goes_on_beside_a_long_prompt(scheduler):
    scheduler.submit("short", 1, 10)
    scheduler.submit("long", 2000, 10)
    while (plan := scheduler.plan(within(PAGES))).prefill is not None:
        assert "short" in plan.decode
        scheduler.prefilled("long", plan.prefill.end)
    assert plan.decode == ("short", "long")


def test_rows_are_bounded(scheduler):
    for rid in "abcd":
        scheduler.submit(rid, 1, 1)
    assert scheduler.plan(within(PAGES)).admitted == ("a", "b", "c")
    assert scheduler.plan(within(PAGES)) == Plan((), None, ("a", "b", "c"), 0)
    scheduler.finish("b")
    assert scheduler.plan(within(PAGES)) == Plan(("d",), None, ("a", "c", "d"), 0)


@pytest.mark.parametrize(
    ("prompt_len", "max_new", "pages"),
    [(1, 1, 0), (1, 126, 0), (1, 127, 1), (64, 64, 1), (128, 63, 1), (128, 64, 2), (4000, 96, 63)],
)
def test_reservation_is_the_worst_case_less_the_tail(scheduler, prompt_len, max_new, pages):
    assert scheduler.reservation(prompt_len, max_new) == pages


def test_rows_count_beside_their_pages(scheduler):
    """Two pages for each row's tail, say."""
    scheduler.submit("a", 640, 64)
    asked = []

    def lacking(pages, rows):
        asked.append((pages, rows))
        return pages + 2 * rows - 11

    assert scheduler.plan(lacking).wanted_pages == 1
    assert scheduler.head == "a"
    assert asked[0] == (10, 1)
    assert scheduler.plan(within(12)).admitted == ("a",)
    assert scheduler.head is None
    assert scheduler.requests == 1


def test_hopes_for_all_that_have_a_place(scheduler):
    for rid in "abcd":  # three places
        scheduler.submit(rid, 640, 64)
    plan = scheduler.plan(within(7))
    assert (plan.wanted_pages, plan.hoped_pages) == (3, 23)
    plan = scheduler.plan(within(12))
    assert plan.admitted == ("a",)
    assert (plan.wanted_pages, plan.hoped_pages) == (8, 18)


def test_the_head_waits_for_pages_and_is_never_overtaken(scheduler):
    scheduler.submit("big", 640, 64)  # 10 pages
    scheduler.submit("tiny", 1, 1)
    assert scheduler.plan(within(7)) == Plan((), None, (), 3, 3)
    assert scheduler.waiting == 2
    assert scheduler.plan(within(10)).admitted == ("big", "tiny")
    assert scheduler.reserved == 10


def test_pages_are_given_back_once(scheduler):
    scheduler.submit("a", 640, 64)
    scheduler.submit("b", 640, 64)
    assert scheduler.plan(within(10)) == Plan(("a",), Chunk("a", 0, 128), (), 10, 10)
    assert scheduler.finish("a") == 10
    assert scheduler.finish("b") == 0  # it only waited
    with pytest.raises(LocalProtocolError, match="row a is not scheduled"):
        scheduler.finish("a")


def test_what_is_overdrawn_is_wanted_too(scheduler):
    scheduler.submit("a", 640, 64)
    assert scheduler.plan(within(-5)).wanted_pages == 15


@pytest.mark.parametrize("end", [0, 64, 127, 129, 299])
def test_only_the_planned_chunk_can_be_told(scheduler, end):
    scheduler.submit("a", 300, 1)
    scheduler.plan(within(PAGES))
    with pytest.raises(LocalProtocolError, match="no chunk"):
        scheduler.prefilled("a", end)


def test_a_row_cannot_be_told_out_of_turn(scheduler):
    scheduler.submit("a", 300, 1)
    scheduler.submit("b", 300, 1)
    scheduler.plan(within(PAGES))
    with pytest.raises(LocalProtocolError, match="row b"):
        scheduler.prefilled("b", 128)


def test_wrong_numbers_and_doubles_are_refused(scheduler):
    scheduler.submit("a", 1, 1)
    with pytest.raises(LocalProtocolError, match="scheduled already"):
        scheduler.submit("a", 1, 1)
    with pytest.raises(LocalProtocolError, match="must be positive"):
        scheduler.submit("b", 0, 1)
    with pytest.raises(LocalProtocolError, match="must be positive"):
        scheduler.submit("b", 1, 0)
    with pytest.raises(LocalProtocolError, match="must be positive"):
        Scheduler(max_rows=0, chunk=1)


class Traffic(RuleBasedStateMachine):
    """Any order of events keeps the invariants, the page account and the queue's order."""

    def __init__(self):
        super().__init__()
        self.scheduler = Scheduler(max_rows=4, chunk=CHUNK)
        self.queue = []
        self.running = {}
        self.ends = {}
        self.free = PAGES
        self.names = 0

    @rule(prompt_len=st.integers(1, 700), max_new=st.integers(1, 300))
    def submit(self, prompt_len, max_new):
        rid = f"r{self.names}"
        self.names += 1
        self.scheduler.submit(rid, prompt_len, max_new)
        self.queue.append(rid)
        self.ends[rid] = prompt_len - 1

    @rule(run=st.booleans())
    def step(self, run):
        before = self.scheduler.reserved
        plan = self.scheduler.plan(within(PAGES))
        assert list(plan.admitted) == self.queue[: len(plan.admitted)]
        del self.queue[: len(plan.admitted)]
        self.running |= dict.fromkeys(plan.admitted, 0)
        self.free -= self.scheduler.reserved - before
        assert self.free >= 0
        assert all(self.running[rid] == self.ends[rid] for rid in plan.decode)
        if len(self.running) == 4 or not self.queue:
            assert plan.wanted_pages == 0
        else:
            assert plan.wanted_pages > 0
        if plan.prefill and run:
            chunk = plan.prefill
            assert chunk.start == self.running[chunk.rid] < chunk.end <= self.ends[chunk.rid]
            assert chunk.end % CHUNK == 0 or chunk.end == self.ends[chunk.rid]
            self.scheduler.prefilled(chunk.rid, chunk.end)
            self.running[chunk.rid] = chunk.end

    @precondition(lambda self: self.queue or self.running)
    @rule(data=st.data())
    def finish(self, data):
        rid = data.draw(st.sampled_from([*self.queue, *self.running]))
        self.free += self.scheduler.finish(rid)
        self.running.pop(rid, None)
        self.queue = [name for name in self.queue if name != rid]

    @invariant()
    def holds(self):
        self.scheduler.check()
        assert self.scheduler.waiting == len(self.queue)
        assert self.scheduler.prefilling + self.scheduler.decoding == len(self.running)
        assert self.free + self.scheduler.reserved == PAGES


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase


@pytest.mark.parametrize("seed", range(5))
def test_mixed_traffic_starves_nobody_and_ends_everyone_once(seed):
    """Long and short prompts, cancels: each row decodes in every step once it is prefilled."""
    draw = random.Random(seed)
    scheduler = Scheduler(max_rows=8, chunk=CHUNK)
    free, pending = 200, [f"r{i}" for i in range(150)]
    left, ended, admitted, chunk_waits = {}, [], [], {}
    submitted = []
    for _ in range(20_000):
        if not pending and not left:
            break
        while pending and draw.random() < 0.5:
            rid = pending.pop(0)
            length = draw.choice([1, 10, 100, 1000, 4000])
            left[rid] = draw.randint(1, 200)
            scheduler.submit(rid, length, left[rid])
            submitted.append(rid)
        before = scheduler.reserved
        plan = scheduler.plan(within(200))
        free -= scheduler.reserved - before
        admitted += plan.admitted
        chunk_waits |= dict.fromkeys(plan.admitted, 0)
        assert plan.prefill is not None or plan.decode or not left
        if plan.prefill:
            scheduler.prefilled(plan.prefill.rid, plan.prefill.end)
            for rid in chunk_waits:
                chunk_waits[rid] += 1
            chunk_waits[plan.prefill.rid] = 0
        for rid in plan.decode:
            chunk_waits.pop(rid, None)
            left[rid] -= 1
        over = [rid for rid in left if left[rid] == 0]
        over += [rid for rid in left if left[rid] and draw.random() < 0.001]
        for rid in over:
            free += scheduler.finish(rid)
            chunk_waits.pop(rid, None)
            del left[rid]
            ended.append(rid)
        assert all(waited <= 8 for waited in chunk_waits.values())
        scheduler.check()
    assert sorted(ended) == sorted(submitted)
    assert len(ended) == 150
    assert admitted == [rid for rid in submitted if rid in set(admitted)]
    assert free == 200
    assert scheduler.reserved == 0
