"""Admission: queue and grant together, with a daemon that answers late."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.machines.ledger import Ledger, MemoryRequest, WorkerExited
from kvd.worker.scheduling.admission import Admission, Held
from kvd.worker.scheduling.budget import PageBudget
from kvd.worker.scheduling.scheduler import ReservationSizes, Scheduler
from protocol.errors import InsufficientMemory
from protocol.worker import Grant, MemoryRequested

BASE = 1000
PAGE = 10
ROW_PAGES = 3
IDLE = 8


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
            budget_bytes=BASE + budget_pages * PAGE,
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
    assert admission.admit(Held()).queue_positions == ()  # the daemon may still grant it
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
    admission.budget.budget_bytes = BASE + 40 * PAGE
    admission.submit("b", 2368, 64)  # 37 pages, and a tail of 3
    with pytest.raises(InsufficientMemory) as refused:
        admission.submit("c", 2432, 64)
    detail = refused.value.detail
    assert (detail["needed_bytes"], detail["budget_bytes"]) == (BASE + 41 * PAGE, BASE + 40 * PAGE)
    admission.finish("a")
    result = denied(admission, budget_pages=39)
    assert result.refused is not None
    assert result.refused[0] == "b"


def with_two_levels(pages=IDLE) -> Admission:
    """Return an admission with two levels; pages of the lower one are half as large."""
    sizes = ReservationSizes(
        pages_for=lambda length, level: -(-length // 64 // (1 + level)), levels=2
    )
    return Admission(
        Scheduler(max_rows=5, chunk=128, sizes=sizes),
        PageBudget(BASE, PAGE, BASE + pages * PAGE, seq=1),
        row_pages=ROW_PAGES,
        idle_pages=IDLE,
    )


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
    admission.budget.budget_bytes = BASE + 30 * PAGE
    admission.submit("a", 1920, 64)  # 31 pages at level 0, 16 at level 1
    assert admission.scheduler.find("a").level == 1
    admission.granted(Grant(seq=1, total_bytes=0, granted=True, budget_bytes=BASE + 40 * PAGE))
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
    request = admission.give_back_idle(cached=12)
    assert request is not None
    assert request.total_bytes == BASE + (IDLE + 12) * PAGE
    answer(admission, request, granted=True)
    assert not admission.has_work
    assert admission.give_back_idle(cached=12) is None


def test_a_denied_memory_request_is_withdrawn_when_its_request_ends() -> None:
    """Otherwise the daemon would grant it later for nothing."""
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


def test_suspended_and_preempted_requests_are_no_work() -> None:
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


def test_pages_no_longer_kept_are_free_for_others() -> None:
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


class Traffic(RuleBasedStateMachine):
    """One worker's admission against the daemon's own ledger, with messages in flight.

    The pools grow as far as the plan allows. They stay until the engine is idle, or until memory is
    evicted or given back. This is the worst case of an engine.
    """

    @initialize(budget=st.integers(150, 500))
    def start(self, budget: int) -> None:
        self.most = budget
        self.ledger = Ledger(budget_bytes=BASE + budget * PAGE)
        first = BASE + IDLE * PAGE
        self.ledger.handle(MemoryRequest("me", 1, first), 0.0)
        self.admission = with_two_levels(IDLE)
        self.scheduler = self.admission.scheduler
        self.up: list[MemoryRequested] = []
        self.down: list[Grant] = []
        self.queued: set[str] = set()
        self.running: set[str] = set()
        self.preempted: set[str] = set()
        self.held = Held()
        self.names = 0

    def hold(self, *, spare: bool = True) -> None:
        """Hold the reservations, the cached pages and spare pages from before."""
        scheduler, held = self.scheduler, self.held
        pages, rows = scheduler.reserved_pages + held.cached, scheduler.reserved_rows
        self.held = Held(
            max(pages, held.pages if spare else 0),
            max(rows, held.rows if spare else 0),
            held.cached,
        )

    def send(self, request: MemoryRequested | None) -> None:
        if request is not None:
            self.up.append(request)

    @rule(
        length=st.integers(1, 6000),
        new=st.integers(1, 300),
        priority=st.integers(-1, 1),
        choices=st.sampled_from([1, 1, 1, 2, 5]),
    )
    def submit(self, length: int, new: int, priority: int, choices: int) -> None:
        rid = f"r{self.names}"
        self.names += 1
        try:
            self.admission.submit(rid, length, new, priority=priority, choices=choices)
        except InsufficientMemory:
            first, further = self.scheduler.sizes.of(length, new, 0)
            pages = first + (choices - 1) * further
            assert pages > self.most - ROW_PAGES * choices
        else:
            self.queued.add(rid)

    @precondition(lambda self: self.queued or self.running or self.preempted)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """A request in any state finishes or is cancelled."""
        self._finish(
            data.draw(st.sampled_from(sorted(self.queued | self.running | self.preempted)))
        )

    def _finish(self, rid: str) -> None:
        self.admission.finish(rid)
        for where in (self.queued, self.running, self.preempted):
            where.discard(rid)

    @precondition(lambda self: self.able())
    @rule(data=st.data())
    def end_choice(self, data: st.DataObject) -> None:
        self.admission.finish_choice(data.draw(st.sampled_from(self.able())))

    def able(self) -> list[str]:
        """Return the requests of which one of several choices may end."""
        rows = self.scheduler.states.decoding.values()
        return [row.rid for row in rows if row.choices > 1]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.running)))
        pages = self.scheduler.find(rid).pages
        self.admission.preempt(rid, data.draw(st.integers(0, pages)))
        self.running.discard(rid)
        self.preempted.add(rid)

    @precondition(lambda self: self.preempted)
    @rule(data=st.data())
    def requeue(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.preempted)))
        self.admission.requeue_preempted(rid)
        self.preempted.discard(rid)
        self.queued.add(rid)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def suspend_or_resume(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.running)))
        scheduler = self.scheduler
        (scheduler.resume if scheduler.find(rid).suspended else scheduler.suspend)(rid)

    @rule(pages=st.integers(0, 60))
    def give_back(self, pages: int) -> None:
        """The daemon reclaims memory at any time."""
        self.hold(spare=False)
        before = self.admission.budget.granted_bytes
        request, freed = self.admission.give_back(pages, self.held)
        assert freed == before - self.admission.budget.granted_bytes
        assert (request is None) == (freed == 0)
        self.send(request)

    @rule(level=st.integers(0, 2))
    def start_level(self, level: int) -> None:
        self.admission.set_start_level(level)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def step_down(self, data: st.DataObject) -> None:
        """A running request steps down: its reservation shrinks by the predicted savings."""
        rid = data.draw(st.sampled_from(sorted(self.running)))
        if self.scheduler.find(rid).level == 0:
            before, saved = self.scheduler.reserved_pages, self.scheduler.step_down_savings(rid, 1)
            self.admission.step_down(rid, 1)
            assert self.scheduler.reserved_pages == before - saved
            self.hold(spare=False)

    @rule(pages=st.integers(1, 10))
    def cache(self, pages: int) -> None:
        """A prefix is cached if there is room."""
        held = Held(self.held.pages, self.held.rows, self.held.cached + pages)
        scheduler = self.scheduler
        if (
            self.admission.missing_pages(scheduler.reserved_pages, scheduler.reserved_rows, held)
            <= 0
        ):
            self.held = held
            self.hold()

    @precondition(lambda self: self.admission.has_work)
    @rule()
    def step(self) -> None:
        result = self.admission.admit(self.held)
        self.running |= set(result.plan.admitted)
        self.queued -= set(result.plan.admitted)
        self.send(result.memory_request)
        for chunk in result.plan.group:
            self.scheduler.mark_prefilled(chunk.rid, chunk.end)
        self.hold()
        if result.evict_pages:
            assert not result.refused
            self.held = Held(cached=self.held.cached - result.evict_pages)
            self.hold(spare=False)
        if result.refused is not None:
            refused = self.scheduler.find(result.refused[0])
            pages = refused.pages + refused.choices * ROW_PAGES
            assert self.admission.budget.too_large(pages)
            self._finish(result.refused[0])
        if result.swap_out_kept:
            assert not self.running
            for rid in [*self.queued, *self.preempted]:
                self.admission.reduce_kept(rid, 0)
        if result.plan.missing_pages and self.gives_up_spare():
            self.step()
        if self.admission.idle:
            self.held = Held(self.held.cached, 0, self.held.cached)
            self.send(self.admission.give_back_idle(self.held.cached))

    def gives_up_spare(self) -> bool:
        """Free spare pages for the head, as the engine does; tails only without running rows."""
        before, scheduler = self.held, self.scheduler
        rows = max(scheduler.reserved_rows, before.rows if scheduler.reserved_rows else 0)
        self.held = Held(scheduler.reserved_pages + before.cached, rows, before.cached)
        return self.held != before

    @precondition(lambda self: self.up)
    @rule()
    def daemon_reads(self) -> None:
        request = self.up.pop(0)
        self._answer(MemoryRequest("me", request.seq, request.total_bytes))

    def _answer(self, event: MemoryRequest | WorkerExited) -> None:
        for one in self.ledger.handle(event, 0.0):
            if one.model == "me":
                self.down.append(
                    Grant(
                        seq=one.seq,
                        total_bytes=one.total_bytes,
                        granted=one.granted,
                        available_bytes=one.available_bytes,
                        budget_bytes=self.ledger.budget_bytes,
                    )
                )

    @rule(total=st.integers(0, 3000))
    def other_model_asks(self, total: int) -> None:
        self._answer(MemoryRequest("other", 1, total))

    @rule()
    def other_model_leaves(self) -> None:
        self._answer(WorkerExited("other"))

    @precondition(lambda self: self.down)
    @rule()
    def worker_reads(self) -> None:
        self.admission.granted(self.down.pop(0))

    @invariant()
    def nothing_is_held_beyond_the_grant(self) -> None:
        if not hasattr(self, "admission"):
            return
        self.ledger.check()
        self.scheduler.check()
        granted = self.ledger.grants.get("me", 0)
        held = BASE + (self.held.pages + self.held.rows * ROW_PAGES) * PAGE
        idle = self.admission.idle
        assert idle or held <= max(granted, BASE)
        assert self.admission.budget.granted_bytes <= granted

    def teardown(self) -> None:
        """Deliver all messages: all requests end, and the idle worker keeps only its idle pages."""
        if not hasattr(self, "admission"):
            return
        self._answer(WorkerExited("other"))
        for rid in list(self.running):
            self._finish(rid)
        for rid in sorted(self.preempted):
            self.admission.requeue_preempted(rid)
            self.queued.add(rid)
        self.preempted.clear()
        for rid in self.queued:
            self.admission.reduce_kept(rid, 0)  # swapped out
        for _ in range(5000):
            if self.up:
                self.daemon_reads()
            elif self.down:
                self.worker_reads()
            elif self.admission.has_work:
                self.step()
                for rid in list(self.running):
                    self._finish(rid)
            else:
                break
        assert not self.queued, "a request waits without an open memory request"
        assert self.ledger.grants["me"] <= BASE + (IDLE + self.held.cached) * PAGE
        assert "me" not in self.ledger.waiting


Traffic.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestTraffic = Traffic.TestCase
