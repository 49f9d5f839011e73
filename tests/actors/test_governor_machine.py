"""The ladder: cheapest bytes first, nobody starves, and the sum of grants stays in the budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.machines import governor_events
from actors.machines.governor import Governor
from actors.machines.governor_events import (
    AlarmFired,
    BudgetChanged,
    Evict,
    HoldRequests,
    LoadRequested,
    MemoryMeasured,
    ModelReady,
    ModelRemoved,
    PolicyChanged,
    Reclaim,
    ReclaimableReported,
    ReclaimFinished,
    StartLevel,
)
from actors.machines.ledger import GrantDecision, Ledger, MemoryRequest, WorkerExited
from protocol.policy import ModelPolicy
from protocol.types import Reclaimable

BUDGET = 10_000


class Desk:
    """A ladder with a clock, that remembers what it was told to do."""

    def __init__(self, **models: int) -> None:
        self.governor = Governor(Ledger(BUDGET))
        self.now = 1000.0
        self.said: list[governor_events.Command] = []
        self.seqs: dict[str, int] = {}
        for name, granted in models.items():
            self.load(name, granted)

    def tell(
        self, event: governor_events.Event, after: float = 0.0
    ) -> list[governor_events.Command]:
        self.now += after
        commands = self.governor.handle(event, self.now)
        self.governor.check()
        self.said += commands
        return [it for it in commands if not isinstance(it, governor_events.RecordEvent)]

    def load(self, name: str, granted: int, policy: ModelPolicy | None = None) -> None:
        self.tell(LoadRequested(name, policy or ModelPolicy()))
        self.want(name, granted)
        self.tell(ModelReady(name))
        self.now += 5.0

    def want(
        self, name: str, total: int, *, resuming: bool = False
    ) -> list[governor_events.Command]:
        self.seqs[name] = self.seqs.get(name, 0) + 1
        return self.tell(MemoryRequest(name, self.seqs[name], total, resuming))

    def reclaimable(self, name: str, **fields: object) -> list[governor_events.Command]:
        return self.tell(ReclaimableReported(name, Reclaimable(**fields)))

    def wait(self, seconds: float) -> list[governor_events.Command]:
        """Ring as the machine wants it."""
        end, commands = self.now + seconds, []
        while (due := self.governor.deadline) is not None and due <= end:
            commands += self.tell(AlarmFired(), max(0.0, due - self.now))
        self.now = end
        return commands + self.tell(AlarmFired())

    def gives(
        self, it: Reclaim, freed: int, *, exhausted: bool = False
    ) -> list[governor_events.Command]:
        answers = self.want(it.model, self.grants[it.model] - freed)
        return answers + self.tell(ReclaimFinished(it.model, it.seq, freed, exhausted))

    @property
    def grants(self) -> dict[str, int]:
        return self.governor.ledger.grants

    def note(self, kind: str) -> governor_events.RecordEvent:
        return next(
            it
            for it in self.said
            if isinstance(it, governor_events.RecordEvent) and it.kind == kind
        )


def only(commands: list[governor_events.Command], kind: type) -> list:
    return [it for it in commands if isinstance(it, kind)]


BUSY = {"rows": 1, "waiting": 1, "base": 2000}


def test_the_rungs_are_climbed_one_by_one():
    desk = Desk(a=5000, b=3000, c=1500)
    desk.reclaimable("c", base=1500)
    desk.reclaimable("b", spare=200, prefixes=300, levels=(400, 500), preempt=900, **BUSY)
    desk.reclaimable("a", **BUSY)
    desk.want("a", 9000)

    desk.tell(AlarmFired(), 0.3)
    (spare,) = only(desk.said, Reclaim)
    assert (spare.model, spare.method, spare.wanted_bytes) == ("b", "spare", 200)
    (prefixes,) = only(desk.gives(spare, 200), Reclaim)
    assert (prefixes.method, prefixes.wanted_bytes) == ("prefixes", 300)
    desk.now += 15  # too much in all, so that it takes its turn as the first wish
    (level,) = only(desk.gives(prefixes, 300), Reclaim)
    assert (level.method, level.level) == ("precision", 1)
    (level,) = only(desk.gives(level, 400, exhausted=True), Reclaim)
    assert (level.method, level.level) == ("precision", 2)
    said = desk.gives(level, 500, exhausted=True)
    assert only(said, Evict) == [Evict("c")]
    said = desk.tell(WorkerExited("c"))
    assert not only(said, Reclaim), "a fair share is left to b"


def test_a_model_is_in_use_before_its_worker_can_say_so():
    desk = Desk(a=5000, b=5000)
    desk.reclaimable("b", base=5000)
    desk.reclaimable("a", **BUSY)
    desk.tell(governor_events.ServingChanged("b", busy=True))
    desk.want("a", 6000)

    assert not only(desk.wait(5), Evict)
    desk.tell(governor_events.ServingChanged("b", busy=False))
    assert only(desk.wait(2), Evict) == [Evict("b")]


def test_a_first_level_is_taken_from_all_before_a_second_from_anybody():
    desk = Desk(a=4000, b=3000, c=3000)
    desk.reclaimable("b", levels=(0, 900), **BUSY)
    desk.reclaimable("c", levels=(200, 900), **BUSY)
    desk.reclaimable("a", **BUSY)
    desk.want("a", 4600)

    (first,) = only(desk.wait(1), Reclaim)

    assert (first.model, first.level, first.wanted_bytes) == ("c", 1, 200)
    (second,) = only(desk.gives(first, 200), Reclaim)
    assert second.level == 2


def test_nothing_that_costs_is_taken_before_a_wish_has_settled():
    desk = Desk(a=5000, b=5000)
    desk.reclaimable("b", levels=(3000,), **BUSY)
    desk.reclaimable("a", **BUSY)

    assert not only(desk.want("a", 6000), Reclaim)
    assert only(desk.wait(0.3), Reclaim)


def test_a_wish_for_which_nobody_waits_costs_nobody_anything():
    desk = Desk(a=5000, b=5000)
    desk.reclaimable("b", spare=1000, levels=(3000,), **BUSY)
    desk.reclaimable("a", rows=1, base=2000)
    desk.want("a", 6000)

    assert not only(desk.wait(100), Reclaim)
    assert desk.governor.ledger.first is None


def test_rows_are_parked_only_down_to_the_fair_share():
    desk = Desk(a=2000, b=8000)
    desk.reclaimable("b", preempt=6000, **BUSY)
    desk.reclaimable("a", **BUSY)
    desk.want("a", 5000)

    (preempt,) = only(desk.wait(1), Reclaim)

    assert (preempt.model, preempt.method, preempt.wanted_bytes) == ("b", "preempt", 3000)


def test_models_that_are_not_there_take_no_share():
    desk = Desk(gone=1000, a=2000, b=7000)
    desk.tell(WorkerExited("gone"))
    desk.tell(governor_events.ServingChanged("never", busy=True))
    desk.reclaimable("b", preempt=6000, **BUSY)
    desk.reclaimable("a", **BUSY)
    desk.want("a", 5000)

    assert set(desk.governor.accounts) == {"gone", "a", "b"}
    (preempt,) = only(desk.wait(1), Reclaim)
    assert (preempt.model, preempt.wanted_bytes) == ("b", 2000)


def test_nobody_is_parked_for_a_row_that_was_parked():
    desk = Desk(a=2000, b=8000)
    desk.reclaimable("b", preempt=6000, **BUSY)
    desk.reclaimable("a", **BUSY)
    desk.want("a", 5000, resuming=True)

    assert not only(desk.wait(200), Reclaim)


def test_lower_priority_is_parked_below_its_share_and_higher_never():
    desk = Desk()
    desk.load("low", 3000, ModelPolicy(priority=-1))
    desk.load("high", 3500, ModelPolicy(priority=1))
    desk.load("me", 3500)
    for name in ("low", "high"):
        desk.reclaimable(name, preempt=1000, **BUSY)
    desk.reclaimable("me", **BUSY)
    desk.want("me", 4500)

    (preempt,) = only(desk.wait(1), Reclaim)
    assert preempt.model == "low"


def test_what_is_on_its_way_is_waited_for():
    desk = Desk(a=5000, b=5000)
    desk.reclaimable("b", spare=1000, prefixes=1000, levels=(1000,), **BUSY)
    desk.reclaimable("a", **BUSY)
    desk.want("a", 6000)

    assert len(only([*desk.said, *desk.wait(30)], Reclaim)) == 1


def test_a_worker_that_does_not_answer_is_not_waited_for_forever():
    desk = Desk(a=4000, b=3000, c=3000)
    desk.reclaimable("b", spare=1000, **BUSY)
    desk.reclaimable("c", prefixes=1000, **BUSY)
    desk.reclaimable("a", **BUSY)
    desk.want("a", 5000)

    methods = [it.method for it in only([*desk.said, *desk.wait(100)], Reclaim)]
    assert methods[:2] == ["spare", "prefixes"]


def test_a_load_evicts_the_least_valuable_idle_model():
    desk = Desk(old=2000, new=2000)
    desk.load("pinned", 2000, ModelPolicy(pinned=True))
    desk.load("dear", 2000, ModelPolicy(priority=1))
    for name in ("old", "new", "pinned", "dear"):
        desk.reclaimable(name, base=2000)
        desk.now += 10
    desk.tell(LoadRequested("me", ModelPolicy(), patient=False))

    assert not desk.want("me", 3500), "it is answered when there is room"
    assert only(desk.wait(1), Evict) == [Evict("old")]
    assert only(desk.tell(WorkerExited("old")), GrantDecision) == [
        GrantDecision("me", 1, 3500, True, 500)
    ]
    assert desk.note("evict").requester == "me"


def test_a_load_waits_for_a_model_that_has_just_become_idle():
    desk = Desk(a=8000)
    desk.reclaimable("a", rows=1, base=8000)
    desk.reclaimable("a", base=8000)
    desk.tell(LoadRequested("me", ModelPolicy(), patient=False))

    assert not only(desk.want("me", 5000), GrantDecision)
    assert only(desk.wait(2), Evict) == [Evict("a")]


def test_a_load_that_finds_no_room_is_refused_with_the_arithmetic():
    desk = Desk(busy=3000)
    desk.load("kept", 4000, ModelPolicy(pinned=True))
    desk.reclaimable("kept", base=4000)
    desk.reclaimable("busy", **BUSY)
    desk.tell(LoadRequested("me", ModelPolicy(), patient=False))

    (answer,) = only(desk.want("me", 5000), GrantDecision)

    assert not answer.granted
    assert "kept (pinned) holds" in answer.reason
    assert "busy (in use) holds" in answer.reason
    assert not only(desk.said, Evict)
    assert desk.note("load_refused").numbers["wanted_bytes"] == 5000


def test_a_patient_load_waits_and_one_that_pinned_models_leave_no_room_for_does_not():
    desk = Desk(busy=8000)
    desk.reclaimable("busy", **BUSY)
    desk.tell(LoadRequested("me"))

    assert not only(desk.want("me", 9000), GrantDecision)
    assert (
        only(desk.tell(PolicyChanged("busy", ModelPolicy(pinned=True))), GrantDecision)[0].granted
        is False
    )


def test_who_is_in_use_is_held_for_a_load_that_waits_and_let_go_after_it():
    desk = Desk(a=5000, b=5000)
    for name in ("a", "b"):
        desk.reclaimable(name, rows=3, base=4000)
    desk.tell(LoadRequested("me"))
    desk.want("me", 4000)

    (hold,) = only(desk.wait(40), HoldRequests)
    assert hold.held
    desk.reclaimable(hold.model, base=4000)  # its rows are through
    assert only(desk.wait(3), Evict) == [Evict(hold.model)]
    said = desk.tell(WorkerExited(hold.model))
    assert only(said, GrantDecision)[0].granted
    assert only(said, HoldRequests) == [HoldRequests(hold.model, held=False)]


def test_a_large_wish_is_not_starved_by_small_ones():
    desk = Desk(a=2000, b=4000, c=3500)
    for name in ("b", "c"):
        desk.reclaimable(name, rows=1, waiting=1, base=1000)
    desk.reclaimable("a", **BUSY)
    desk.want("a", 6000)
    desk.want("b", 4400)
    assert desk.grants["b"] == 4400, "a small one may overtake"
    desk.wait(11)

    desk.want("b", 3000)
    assert not only(desk.want("b", 4000), GrantDecision)[0].granted, "not for ever"
    desk.want("c", 1000)
    assert desk.grants["a"] == 6000


def test_models_that_wait_for_each_other_give_way_to_the_oldest_wish():
    desk = Desk(a=5000, b=5000)
    for name in ("a", "b"):
        desk.reclaimable(name, waiting=2, base=5000)
    desk.want("a", 6000)
    desk.now += 1
    desk.want("b", 6000)

    (evict,) = only(desk.wait(60), Evict)
    assert evict == Evict("b", requeue=True)
    assert only(desk.tell(WorkerExited("b")), GrantDecision)[0].model == "a"


def test_a_request_that_came_as_a_model_went_is_taken_back():
    desk = Desk(a=5000, b=5000)
    desk.reclaimable("b", base=5000)
    desk.reclaimable("a", **BUSY)
    desk.want("a", 6000)
    assert only(desk.wait(2), Evict) == [Evict("b")]

    desk.want("b", 5500)
    assert only(desk.reclaimable("b", waiting=1, base=5000), Evict) == [Evict("b", requeue=True)]
    assert not only(desk.reclaimable("b", waiting=1, base=4999), Evict), "once"


def test_a_model_that_a_user_unloads_finishes_before_whoever_waits_for_it():
    desk = Desk(a=5000, b=5000)
    desk.reclaimable("a", waiting=1, base=5000)
    desk.reclaimable("b", waiting=1, base=5000)
    desk.want("a", 6000)
    desk.wait(20)
    desk.tell(governor_events.UnloadStarted("b"))
    desk.want("b", 5500)

    assert only(desk.wait(60), Evict) == [Evict("a", requeue=True)]
    assert only(desk.tell(WorkerExited("a")), GrantDecision)[0].model == "b"


def test_idle_models_go_after_their_time_but_pinned_ones():
    desk = Desk()
    desk.load("a", 1000, ModelPolicy(idle_ttl_s=60))
    desk.load("b", 1000, ModelPolicy(idle_ttl_s=60, pinned=True))
    for name in ("a", "b"):
        desk.reclaimable(name, base=1000)

    assert not only(desk.wait(45), Evict)
    assert only(desk.wait(20), Evict) == [Evict("a")]
    assert "60 s" in desk.note("evict").reason


def test_new_rows_start_lower_while_memory_is_tight_and_at_the_top_again():
    desk = Desk(a=9900)
    desk.reclaimable("a", rows=9, levels=(10, 10), base=900)
    assert StartLevel("a", 1) in desk.said

    desk.wait(11)
    assert StartLevel("a", 2) in desk.said
    desk.reclaimable("a", rows=9, levels=(10, 10), base=900, spare=1100)  # below the high mark only
    assert StartLevel("a", 0) not in desk.said + desk.wait(30)
    desk.reclaimable("a", rows=9, levels=(10, 10), base=900, spare=3000)
    assert StartLevel("a", 0) not in desk.said + desk.wait(9)
    assert StartLevel("a", 0) in desk.wait(3)


def test_growth_is_foreseen():
    desk = Desk(a=5000)
    for total in range(5000, 9000, 200):
        desk.reclaimable("a", rows=2, levels=(10,), base=1000)
        desk.want("a", total)
        desk.now += 2.0
    note = desk.note("tight")

    assert "soon" in note.reason
    assert note.numbers["granted_bytes"] < 0.95 * BUDGET


@pytest.mark.parametrize(("pressure", "method"), [("warning", "prefixes"), ("critical", "preempt")])
def test_the_system_s_pressure_is_answered(pressure, method):
    desk = Desk(a=5000)
    offered = {"prefixes": 100} if method == "prefixes" else {"preempt": 600}
    desk.reclaimable("a", rows=1, base=2000, **offered)

    said = desk.tell(MemoryMeasured({"a": 5000}, pressure))

    assert [it.method for it in only(said, Reclaim)] == [method]
    assert not only(desk.tell(MemoryMeasured({"a": 5000}, pressure), 1), Reclaim), "one at a time"


def test_what_is_taken_beyond_a_grant_is_nobody_else_s():
    desk = Desk(a=4000, b=4000)
    desk.tell(MemoryMeasured({"a": 5500, "b": 100}))

    assert not only(desk.want("b", 5000), GrantDecision)[0].granted
    assert desk.note("excess").numbers["excess_bytes"] == 1500
    assert only(desk.tell(MemoryMeasured({"a": 4000})), GrantDecision)[0].granted


def test_a_lowered_budget_is_worked_off_and_nobody_grows_meanwhile():
    desk = Desk(a=5000, b=4000)
    desk.reclaimable("a", rows=1, levels=(1000,), preempt=500, base=2000)
    desk.reclaimable("b", base=4000)

    (level,) = only(desk.tell(BudgetChanged(6000)), Reclaim)
    assert level.method == "precision"
    said = desk.gives(level, 1000)
    assert only(said + desk.wait(1), Evict) == [Evict("b")]
    assert not only(desk.want("a", 4100), GrantDecision)[0].granted
    desk.tell(WorkerExited("b"))
    assert sum(desk.grants.values()) <= 6000


MODELS = ["a", "b", "c"]
sizes = st.integers(-10, 12_000)
offers = st.builds(
    Reclaimable,
    spare=st.integers(0, 900),
    prefixes=st.integers(0, 900),
    levels=st.lists(st.integers(0, 900), max_size=2).map(tuple),
    preempt=st.integers(0, 2000),
    rows=st.integers(0, 2),
    waiting=st.integers(0, 2),
    base=st.integers(0, 4000),
)
policies = st.builds(
    ModelPolicy,
    priority=st.integers(-1, 1),
    pinned=st.booleans(),
    idle_ttl_s=st.none() | st.just(5.0),
)
names = st.sampled_from(MODELS)
events = (
    st.builds(LoadRequested, names, policies, st.booleans())
    | st.builds(PolicyChanged, names, policies)
    | st.builds(ModelReady, names)
    | st.builds(governor_events.UnloadStarted, names)
    | st.builds(governor_events.ServingChanged, names, st.booleans())
    | st.builds(ModelRemoved, names)
    | st.builds(MemoryRequest, names, st.integers(0, 9), sizes, st.booleans())
    | st.builds(WorkerExited, names)
    | st.builds(ReclaimableReported, names, offers)
    | st.builds(ReclaimFinished, names, st.integers(0, 9), st.integers(0, 900), st.booleans())
    | st.builds(
        MemoryMeasured,
        st.dictionaries(names, st.integers(0, 9000)),
        st.sampled_from(["normal", "warning", "critical"]),
    )
    | st.builds(BudgetChanged, st.integers(1, 12_000))
    | st.just(AlarmFired())
)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(events, st.sampled_from([0.0, 0.3, 12.0, 35.0])), max_size=50))
def test_whatever_happens_grants_stay_in_the_budget(history):
    governor = Governor(Ledger(BUDGET))
    now = 0.0
    ceiling = BUDGET
    for event, after in history:
        now += after
        before = governor.ledger.granted_bytes
        governor.handle(event, now)
        governor.check()

        granted, budget = governor.ledger.granted_bytes, governor.ledger.budget_bytes
        assert granted <= max(budget, before, 0)
        assert granted <= max(budget, ceiling)
        ceiling = granted
