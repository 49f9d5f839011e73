"""Queue and grant together, under a daemon that answers late and to others first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.machines.governor import Governor, Released, Wanted
from kvd.worker.admission import Admission, Held
from kvd.worker.budget import PageBudget
from kvd.worker.scheduler import Scheduler
from protocol.errors import InsufficientMemory, Overloaded
from protocol.worker import Grant, GrantWanted

BASE = 1000
PAGE = 10
ROW_PAGES = 3
REST = 8


def admission_of(pages=REST, rows=5):
    return Admission(
        Scheduler(max_rows=rows, chunk=128),
        PageBudget(BASE, PAGE, BASE + pages * PAGE, seq=1),
        row_pages=ROW_PAGES,
        rest_pages=REST,
    )


def answer(admission, wish, *, granted, budget_pages=100):
    budget = admission.budget
    admission.granted(
        Grant(
            seq=wish.seq,
            total_bytes=wish.total_bytes if granted else budget.granted_bytes,
            granted=granted,
            budget_bytes=BASE + budget_pages * PAGE,
        )
    )


def denied(admission, held=Held(), **more):  # noqa: B008 - a value
    """Take turns until nothing more is asked; all is denied."""
    while (turn := admission.turn(held)).wish is not None and turn.refused is None:
        answer(admission, turn.wish, granted=False, **more)
    return turn


def test_what_is_denied_is_sought_among_cached_prefixes_before_anyone_is_refused() -> None:
    admission = admission_of(pages=20)
    admission.submit("a", 640, 64)  # 10 pages, 3 of a tail
    assert denied(admission, Held(20, 1, cached=16)).evict_pages == 9
    assert admission.has_work
    turn = admission.turn(Held(17, 1, cached=7))
    assert turn.plan.admitted == ("a",)
    assert turn.evict_pages == 0


def test_no_more_is_evicted_than_is_cached() -> None:
    admission = admission_of(pages=20)
    admission.submit("a", 1920, 64)
    assert denied(admission, Held(20, 1, cached=4)).evict_pages == 4
    refused = denied(admission, Held(16, 1)).refused
    assert refused is not None
    assert isinstance(refused[1], Overloaded)


def parked_beside_another_model() -> Admission:
    admission = admission_of(pages=20)
    admission.submit("a", 640, 64)
    assert admission.turn(Held()).plan.admitted == ("a",)
    admission.park("a")
    wish = admission.give_back(8, Held())
    assert wish is not None
    answer(admission, wish, granted=True)
    admission.unpark("a")
    return admission


def test_who_has_begun_waits_where_a_new_request_would_be_refused() -> None:
    admission = parked_beside_another_model()
    turn = denied(admission)
    assert (turn.refused, admission.has_work) == (None, False)
    # The daemon remembers what it denied, and grants it when there is room.
    admission.granted(Grant(seq=admission.budget.seq, total_bytes=BASE + 20 * PAGE, granted=True))
    turn = admission.turn(Held())
    assert (turn.plan.admitted, turn.plan.restored) == (("a",), ("a",))


def test_who_has_begun_is_refused_if_the_whole_budget_is_too_small() -> None:
    admission = parked_beside_another_model()
    refused = denied(admission, budget_pages=12).refused
    assert refused is not None
    assert isinstance(refused[1], InsufficientMemory)


def test_what_a_row_has_left_in_the_room_of_its_place_counts_once() -> None:
    admission = admission_of(pages=20)
    admission.submit("a", 1, 1)
    admission.turn(Held())
    spare = admission.spare(Held(0, 1))
    assert spare > 0
    assert admission.spare(Held(3, 1, cached=3)) == spare - 3
    assert admission.spare(Held(3, 1, cached=3, left=2)) == spare - 1
    wish = admission.want_spare(spare + 2, Held(3, 1, cached=3, left=2))
    assert wish is not None
    assert wish.reason == "3 more pages"
    assert admission.want_spare(spare + 2, Held()) is None  # one is open


def test_spare_tails_count_until_they_are_given_up() -> None:
    admission = admission_of(pages=20)
    admission.submit("a", 640, 64)
    assert admission.turn(Held(0, 4)).plan.wanted_pages == 10 + 4 * ROW_PAGES - 20
    assert admission.turn(Held(0, 3)).plan.admitted == ("a",)


def test_what_rows_hold_is_not_given_back() -> None:
    admission = admission_of(pages=40)
    admission.submit("a", 640, 64)
    admission.submit("b", 640, 64)
    admission.turn(Held())
    assert admission.give_back(0, Held(40, 0)) is None
    wish = admission.give_back(0, Held(5, 1))  # the rows have not grown to what they may be
    assert wish is not None
    assert wish.total_bytes == BASE + 26 * PAGE
    answer(admission, wish, granted=True)
    admission.park("b", kept=4)
    wish = admission.give_back(0, Held(14, 1))
    assert wish is not None
    assert wish.total_bytes == BASE + 17 * PAGE


def test_an_idle_engine_keeps_cached_prefixes() -> None:
    admission = admission_of(pages=40)
    wish = admission.rest(cached=12)
    assert wish is not None
    assert wish.total_bytes == BASE + (REST + 12) * PAGE
    answer(admission, wish, granted=True)
    assert not admission.has_work
    assert admission.rest(cached=12) is None


def test_who_leaves_takes_along_what_was_denied() -> None:
    """The daemon remembers it, and would grant it to nobody."""
    admission = admission_of()
    admission.submit("a", 1920, 64)
    wish = admission.turn(Held()).wish
    assert wish is not None
    answer(admission, wish, granted=False)
    admission.finish("a")
    assert admission.has_work
    wish = admission.rest()
    assert wish is not None
    assert wish.total_bytes == BASE + REST * PAGE


def test_paused_and_parked_rows_are_no_work() -> None:
    admission = admission_of(pages=40)
    admission.submit("a", 640, 64)
    admission.turn(Held())
    assert admission.has_work
    admission.scheduler.pause("a")
    assert not admission.has_work
    admission.scheduler.resume("a")
    assert admission.has_work
    admission.park("a")
    admission.turn(Held())
    assert not admission.has_work
    assert not admission.idle
    admission.unpark("a")
    assert admission.has_work


@pytest.mark.parametrize("event", ["finish", "finish_choice", "park"])
def test_what_becomes_free_here_may_be_asked_for_again(event: str) -> None:
    admission = admission_of(pages=40)
    admission.submit("a", 1, 1, choices=2)
    admission.turn(Held())
    admission.submit("b", 6400, 64)
    denied(admission)
    admission.turn(Held())
    assert admission.budget.denied is not None
    getattr(admission, event)("a")
    assert admission.turn(Held()).wish is not None


def test_what_a_parked_row_no_longer_keeps_is_free_for_others() -> None:
    admission = admission_of(pages=30)
    admission.submit("runs", 1, 1)
    admission.submit("a", 640, 64)
    admission.turn(Held())
    admission.park("a", kept=10)
    admission.submit("b", 960, 64)  # 15 pages, and two tails
    assert denied(admission).plan.wanted_pages == 1
    assert not admission.turn(Held()).plan.admitted
    admission.keep("a", 4)
    assert admission.has_work
    assert admission.turn(Held()).plan.admitted == ("b",)
    admission.scheduler.pause("runs")
    admission.scheduler.pause("b")
    admission.submit("c", 6400, 64)
    denied(admission)
    admission.keep("a", 0)
    assert admission.has_work
    assert admission.turn(Held()).wish is not None


class Traffic(RuleBasedStateMachine):
    """One worker's admission against the daemon's own ledger, with messages in flight.

    The pools grow as far as the plan allows and stay until nobody is there, or something is
    evicted or given back; the worst that an engine does.
    """

    @initialize(budget=st.integers(150, 500))
    def start(self, budget: int) -> None:
        self.governor = Governor(budget_bytes=BASE + budget * PAGE)
        first = BASE + REST * PAGE
        self.governor.handle(Wanted("me", 1, first), 0.0)
        self.admission = admission_of()
        self.scheduler = self.admission.scheduler
        self.up: list[GrantWanted] = []
        self.down: list[Grant] = []
        self.queued: set[str] = set()
        self.running: set[str] = set()
        self.parked: set[str] = set()
        self.held = Held()
        self.names = 0

    def hold(self, *, spare: bool = True) -> None:
        """Hold what rows may take, what is cached, and what is left over from before."""
        scheduler, held = self.scheduler, self.held
        pages, rows = scheduler.reserved + held.cached, scheduler.places
        self.held = Held(
            max(pages, held.pages if spare else 0),
            max(rows, held.rows if spare else 0),
            held.cached,
        )

    def tell(self, wish: GrantWanted | None) -> None:
        if wish is not None:
            self.up.append(wish)

    @rule(
        length=st.integers(1, 6000),
        new=st.integers(1, 300),
        priority=st.integers(-1, 1),
        choices=st.sampled_from([1, 1, 1, 2, 5]),
    )
    def submit(self, length: int, new: int, priority: int, choices: int) -> None:
        rid = f"r{self.names}"
        self.names += 1
        self.admission.submit(rid, length, new, priority=priority, choices=choices)
        self.queued.add(rid)

    @precondition(lambda self: self.queued or self.running or self.parked)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """It finished, or was cancelled in whatever state."""
        self._finish(data.draw(st.sampled_from(sorted(self.queued | self.running | self.parked))))

    def _finish(self, rid: str) -> None:
        self.admission.finish(rid)
        for where in (self.queued, self.running, self.parked):
            where.discard(rid)

    @precondition(lambda self: self.able())
    @rule(data=st.data())
    def end_choice(self, data: st.DataObject) -> None:
        self.admission.finish_choice(data.draw(st.sampled_from(self.able())))

    def able(self) -> list[str]:
        """Rows of which one of several choices may end."""
        rows = self.scheduler._states.decoding.values()
        return [row.rid for row in rows if row.choices > 1]

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def park(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.running)))
        pages = self.scheduler._states.find(rid).pages
        self.admission.park(rid, data.draw(st.integers(0, pages)))
        self.running.discard(rid)
        self.parked.add(rid)

    @precondition(lambda self: self.parked)
    @rule(data=st.data())
    def unpark(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.parked)))
        self.admission.unpark(rid)
        self.parked.discard(rid)
        self.queued.add(rid)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def pause_or_resume(self, data: st.DataObject) -> None:
        rid = data.draw(st.sampled_from(sorted(self.running)))
        scheduler = self.scheduler
        (scheduler.resume if scheduler.is_paused(rid) else scheduler.pause)(rid)

    @rule(pages=st.integers(0, 60))
    def give_back(self, pages: int) -> None:
        self.hold(spare=False)
        self.tell(self.admission.give_back(pages, self.held))

    @rule(pages=st.integers(1, 10))
    def cache(self, pages: int) -> None:
        """A prefix is cached where there is room."""
        held = Held(self.held.pages, self.held.rows, self.held.cached + pages)
        scheduler = self.scheduler
        if self.admission.lacking(scheduler.reserved, scheduler.places, held) <= 0:
            self.held = held
            self.hold()

    @precondition(lambda self: self.admission.has_work)
    @rule()
    def step(self) -> None:
        turn = self.admission.turn(self.held)
        self.running |= set(turn.plan.admitted)
        self.queued -= set(turn.plan.admitted)
        self.tell(turn.wish)
        for chunk in turn.plan.group:
            self.scheduler.prefilled(chunk.rid, chunk.end)
        self.hold()
        if turn.evict_pages:
            assert not turn.refused
            self.held = Held(cached=self.held.cached - turn.evict_pages)
            self.hold(spare=False)
        if turn.refused is not None:
            assert not self.running
            assert not self.held.cached
            self._finish(turn.refused[0])
        if self.admission.idle:
            self.held = Held(self.held.cached, 0, self.held.cached)
            self.tell(self.admission.rest(self.held.cached))

    @precondition(lambda self: self.up)
    @rule()
    def daemon_reads(self) -> None:
        wish = self.up.pop(0)
        self._answer(Wanted("me", wish.seq, wish.total_bytes))

    def _answer(self, event: Wanted | Released) -> None:
        for one in self.governor.handle(event, 0.0):
            if one.model == "me":
                self.down.append(
                    Grant(
                        seq=one.seq,
                        total_bytes=one.total_bytes,
                        granted=one.granted,
                        available_bytes=one.available_bytes,
                        budget_bytes=self.governor.budget_bytes,
                    )
                )

    @rule(total=st.integers(0, 3000))
    def other_model_asks(self, total: int) -> None:
        self._answer(Wanted("other", 1, total))

    @rule()
    def other_model_leaves(self) -> None:
        self._answer(Released("other"))

    @precondition(lambda self: self.down)
    @rule()
    def worker_reads(self) -> None:
        self.admission.granted(self.down.pop(0))

    @invariant()
    def nothing_is_held_beyond_the_grant(self) -> None:
        if not hasattr(self, "admission"):
            return
        self.governor.check()
        self.scheduler.check()
        granted = self.governor.grants.get("me", 0)
        held = BASE + (self.held.pages + self.held.rows * ROW_PAGES) * PAGE
        resting = self.admission.idle
        assert resting or held <= max(granted, BASE)
        assert self.admission.budget.granted_bytes <= granted

    def teardown(self) -> None:
        """Deliver everything: then all have ended, and an idle worker keeps what rest allows."""
        if not hasattr(self, "admission"):
            return
        self._answer(Released("other"))
        for rid in list(self.running):
            self._finish(rid)
        for rid in sorted(self.parked):
            self.admission.unpark(rid)
            self.queued.add(rid)
        self.parked.clear()
        for rid in self.queued:
            self.admission.keep(rid, 0)  # what it kept goes to disk
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
        assert not self.queued, "a request waits, and nothing is under way for it"
        assert self.governor.grants["me"] <= BASE + (REST + self.held.cached) * PAGE
        assert "me" not in self.governor.refused


Traffic.TestCase.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)
TestTraffic = Traffic.TestCase
