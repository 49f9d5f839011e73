"""Queue and grant together, under a daemon that answers late and to others first."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.machines.governor import Governor, Released, Wanted
from kvd.worker.admission import Admission, Held
from kvd.worker.budget import PageBudget
from kvd.worker.scheduler import Scheduler
from protocol.worker import Grant, GrantWanted

BASE = 1000
PAGE = 10
ROW_PAGES = 3
REST = 8


class Traffic(RuleBasedStateMachine):
    """One worker's admission against the daemon's own ledger, with messages in flight.

    The pools grow as far as the plan allows and stay until nobody is there; the worst that an
    engine does.
    """

    @initialize(budget=st.integers(150, 500))
    def start(self, budget: int) -> None:
        self.governor = Governor(budget_bytes=BASE + budget * PAGE)
        first = BASE + REST * PAGE
        self.governor.handle(Wanted("me", 1, first), 0.0)
        self.admission = Admission(
            Scheduler(max_rows=5, chunk=128),
            PageBudget(BASE, PAGE, first, seq=1),
            row_pages=ROW_PAGES,
            rest_pages=REST,
        )
        self.up: list[GrantWanted] = []
        self.down: list[Grant] = []
        self.pages: dict[str, int] = {}
        self.running: list[str] = []
        self.held = Held()
        self.names = 0
        self.refused = 0

    @rule(length=st.integers(1, 6000), new=st.integers(1, 300))
    def submit(self, length: int, new: int) -> None:
        rid = f"r{self.names}"
        self.names += 1
        self.admission.submit(rid, length, new)
        self.pages[rid] = self.admission.scheduler.reservation(length, new)

    @precondition(lambda self: self.pages)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """It finished, or was cancelled in whatever state."""
        self._finish(data.draw(st.sampled_from(sorted(self.pages))))

    def _finish(self, rid: str) -> None:
        self.admission.finish(rid)
        del self.pages[rid]
        if rid in self.running:
            self.running.remove(rid)

    @precondition(lambda self: self.admission.has_work)
    @rule()
    def step(self) -> None:
        turn = self.admission.turn(self.held)
        for rid in turn.plan.admitted:
            self.running.append(rid)
        if turn.plan.prefill is not None:
            self.admission.scheduler.prefilled(turn.plan.prefill.rid, turn.plan.prefill.end)
        reserved = sum(self.pages[rid] for rid in self.running)
        self.held = Held(max(self.held.pages, reserved), max(self.held.rows, len(self.running)))
        if turn.wish is not None:
            self.up.append(turn.wish)
        if turn.refused is not None:
            assert not self.running
            self.refused += 1
            self._finish(turn.refused[0])
        if self.admission.idle:
            self.held = Held()
            wish = self.admission.rest()
            if wish is not None:
                self.up.append(wish)

    @precondition(lambda self: self.up)
    @rule()
    def daemon_reads(self) -> None:
        wish = self.up.pop(0)
        self._answer(Wanted("me", wish.seq, wish.total_bytes))

    def _answer(self, event: Wanted | Released) -> None:
        for answer in self.governor.handle(event, 0.0):
            if answer.model == "me":
                self.down.append(
                    Grant(
                        seq=answer.seq,
                        total_bytes=answer.total_bytes,
                        granted=answer.granted,
                        available_bytes=answer.available_bytes,
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
        self.admission.scheduler.check()
        granted = self.governor.grants.get("me", 0)
        held = BASE + (self.held.pages + self.held.rows * ROW_PAGES) * PAGE
        resting = self.admission.idle
        assert resting or held <= max(granted, BASE)
        assert self.admission.budget.granted_bytes <= granted

    def teardown(self) -> None:
        """Deliver everything: then all have ended, and an idle worker keeps what rest allows."""
        if not hasattr(self, "admission"):
            return
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
        assert not self.pages, "a request waits, and nothing is under way for it"
        assert self.governor.grants["me"] <= BASE + REST * PAGE
        assert "me" not in self.governor.refused


Traffic.TestCase.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestTraffic = Traffic.TestCase
