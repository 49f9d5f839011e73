"""Admission under any order of events, against the daemon's ledger."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.machines.ledger import Ledger, MemoryRequest, WorkerExited
from kvd.worker.scheduling.admission import Held
from protocol.errors import InsufficientMemory
from protocol.worker import Grant, MemoryRequested
from tests.worker.scheduling.helpers import BASE, IDLE, PAGE, ROW_PAGES, with_two_levels
from tests.worker.scheduling.invariants import check_scheduler


class Traffic(RuleBasedStateMachine):
    """One worker's admission against the daemon's own ledger, with messages in flight.

    The pools grow as far as the plan allows. They shrink only when the engine is idle, or when
    memory is evicted or given back. This is the worst case of an engine.
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
        """Hold what is reserved and cached; with ``spare`` at least as much as before."""
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
        """Return the requests that decode several choices, of which one may end."""
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
            growth = self.scheduler.growth
            pages = growth.pages(refused, refused.least_new, refused.level)
            pages += refused.choices * ROW_PAGES
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
        """Free spare pages for the head, as the engine does, and spare tails if no row runs.

        Return whether anything was freed.
        """
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
                        limit_bytes=self.ledger.budget_bytes,
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
        check_scheduler(self.scheduler)
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
