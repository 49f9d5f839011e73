"""The governor: cheapest method first, no starvation, and grants stay in the budget."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.machines import governor_events
from actors.machines.governing.state import MAX_OFFENCES
from actors.machines.governor import Governor
from actors.machines.governor_events import (
    AlarmFired,
    BudgetChanged,
    EndWorker,
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
from protocol.memory_bounds import STARTING_BYTES, limit_bytes
from protocol.policy import ModelPolicy
from protocol.types import Reclaimable

BUDGET = 10_000


class Simulation:
    """A governor with a simulated clock. Keeps all commands that the governor returned."""

    def __init__(self, **models: int) -> None:
        self.governor = Governor(Ledger(BUDGET))
        self.now = 1000.0
        self.commands_seen: list[governor_events.Command] = []
        self.seqs: dict[str, int] = {}
        for name, granted in models.items():
            self.load(name, granted)

    def apply(
        self, event: governor_events.Event, after: float = 0.0
    ) -> list[governor_events.Command]:
        self.now += after
        commands = self.governor.handle(event, self.now)
        self.governor.check()
        self.commands_seen += commands
        return [it for it in commands if not isinstance(it, governor_events.RecordEvent)]

    def load(self, name: str, granted: int, policy: ModelPolicy | None = None) -> None:
        self.apply(LoadRequested(name, policy or ModelPolicy()))
        self.request(name, granted)
        self.apply(ModelReady(name))
        self.now += 5.0

    def request(
        self, name: str, total: int, *, resuming: bool = False
    ) -> list[governor_events.Command]:
        self.seqs[name] = self.seqs.get(name, 0) + 1
        return self.apply(MemoryRequest(name, self.seqs[name], total, resuming))

    def reclaimable(self, name: str, **fields: object) -> list[governor_events.Command]:
        return self.apply(ReclaimableReported(name, Reclaimable(**fields)))

    def wait(self, seconds: float) -> list[governor_events.Command]:
        """Advance the clock and fire the alarms that are due."""
        end, commands = self.now + seconds, []
        while (due := self.governor.deadline) is not None and due <= end:
            commands += self.apply(AlarmFired(), max(0.0, due - self.now))
        self.now = end
        return commands + self.apply(AlarmFired())

    def give_back(
        self, it: Reclaim, freed: int, *, exhausted: bool = False
    ) -> list[governor_events.Command]:
        answers = self.request(it.model, self.grants[it.model] - freed)
        return answers + self.apply(ReclaimFinished(it.model, it.seq, freed, exhausted))

    @property
    def grants(self) -> dict[str, int]:
        return self.governor.ledger.grants

    def recorded(self, kind: str) -> governor_events.RecordEvent:
        return next(
            it
            for it in self.commands_seen
            if isinstance(it, governor_events.RecordEvent) and it.kind == kind
        )


def of_type(commands: list[governor_events.Command], kind: type) -> list:
    return [it for it in commands if isinstance(it, kind)]


BUSY = {"rows": 1, "waiting": 1, "base": 2000}


def test_methods_are_used_in_the_reclaim_order():
    sim = Simulation(a=5000, b=3000, c=1500)
    sim.reclaimable("c", base=1500)
    sim.reclaimable("b", spare=200, prefixes=300, levels=(400, 500), preempt=900, **BUSY)
    sim.reclaimable("a", **BUSY)
    sim.request("a", 9000)

    sim.apply(AlarmFired(), 0.3)
    (spare,) = of_type(sim.commands_seen, Reclaim)
    assert (spare.model, spare.method, spare.wanted_bytes) == ("b", "spare", 200)
    (prefixes,) = of_type(sim.give_back(spare, 200), Reclaim)
    assert (prefixes.method, prefixes.wanted_bytes) == ("prefixes", 300)
    # More than can be reclaimed: only free methods are used until this is the first request.
    sim.now += 15
    (level,) = of_type(sim.give_back(prefixes, 300), Reclaim)
    assert (level.method, level.level) == ("precision", 1)
    (level,) = of_type(sim.give_back(level, 400, exhausted=True), Reclaim)
    assert (level.method, level.level) == ("precision", 2)
    commands_seen = sim.give_back(level, 500, exhausted=True)
    assert of_type(commands_seen, Evict) == [Evict("c")]
    commands_seen = sim.apply(WorkerExited("c"))
    assert not of_type(commands_seen, Reclaim), "a fair share is left to b"


def test_a_model_is_in_use_before_its_worker_reports_it():
    sim = Simulation(a=5000, b=5000)
    sim.reclaimable("b", base=5000)
    sim.reclaimable("a", **BUSY)
    sim.apply(governor_events.ServingChanged("b", busy=True))
    sim.request("a", 6000)

    assert not of_type(sim.wait(5), Evict)
    sim.apply(governor_events.ServingChanged("b", busy=False))
    assert of_type(sim.wait(2), Evict) == [Evict("b")]


def test_every_model_steps_down_to_level_1_before_any_reaches_level_2():
    sim = Simulation(a=4000, b=3000, c=3000)
    sim.reclaimable("b", levels=(0, 900), **BUSY)
    sim.reclaimable("c", levels=(200, 900), **BUSY)
    sim.reclaimable("a", **BUSY)
    sim.request("a", 4600)

    (first,) = of_type(sim.wait(1), Reclaim)

    assert (first.model, first.level, first.wanted_bytes) == ("c", 1, 200)
    (second,) = of_type(sim.give_back(first, 200), Reclaim)
    assert second.level == 2


def test_only_free_methods_are_used_for_a_request_younger_than_a_quarter_second():
    sim = Simulation(a=5000, b=5000)
    sim.reclaimable("b", levels=(3000,), **BUSY)
    sim.reclaimable("a", **BUSY)

    assert not of_type(sim.request("a", 6000), Reclaim)
    assert of_type(sim.wait(0.3), Reclaim)


def test_a_request_that_no_client_waits_for_reclaims_nothing():
    sim = Simulation(a=5000, b=5000)
    sim.reclaimable("b", spare=1000, levels=(3000,), **BUSY)
    sim.reclaimable("a", rows=1, base=2000)
    sim.request("a", 6000)

    assert not of_type(sim.wait(100), Reclaim)
    assert sim.governor.ledger.first is None


def test_rows_are_preempted_only_down_to_the_fair_share():
    sim = Simulation(a=2000, b=8000)
    sim.reclaimable("b", preempt=6000, **BUSY)
    sim.reclaimable("a", **BUSY)
    sim.request("a", 5000)

    (preempt,) = of_type(sim.wait(1), Reclaim)

    assert (preempt.model, preempt.method, preempt.wanted_bytes) == ("b", "preempt", 3000)


def test_models_without_a_grant_take_no_fair_share():
    sim = Simulation(gone=1000, a=2000, b=7000)
    sim.apply(WorkerExited("gone"))
    sim.apply(governor_events.ServingChanged("never", busy=True))
    sim.reclaimable("b", preempt=6000, **BUSY)
    sim.reclaimable("a", **BUSY)
    sim.request("a", 5000)

    assert set(sim.governor.accounts) == {"gone", "a", "b"}
    (preempt,) = of_type(sim.wait(1), Reclaim)
    assert (preempt.model, preempt.wanted_bytes) == ("b", 2000)


def test_no_row_is_preempted_for_a_preempted_row():
    sim = Simulation(a=2000, b=8000)
    sim.reclaimable("b", preempt=6000, **BUSY)
    sim.reclaimable("a", **BUSY)
    sim.request("a", 5000, resuming=True)

    assert not of_type(sim.wait(200), Reclaim)


def test_a_model_of_lower_priority_is_preempted_below_its_share_and_one_of_higher_never():
    sim = Simulation()
    sim.load("low", 3000, ModelPolicy(priority=-1))
    sim.load("high", 3500, ModelPolicy(priority=1))
    sim.load("me", 3500)
    for name in ("low", "high"):
        sim.reclaimable(name, preempt=1000, **BUSY)
    sim.reclaimable("me", **BUSY)
    sim.request("me", 4500)

    (preempt,) = of_type(sim.wait(1), Reclaim)
    assert preempt.model == "low"


def test_a_pending_reclaim_is_waited_for():
    sim = Simulation(a=5000, b=5000)
    sim.reclaimable("b", spare=1000, prefixes=1000, levels=(1000,), **BUSY)
    sim.reclaimable("a", **BUSY)
    sim.request("a", 6000)

    assert len(of_type([*sim.commands_seen, *sim.wait(30)], Reclaim)) == 1


def test_a_reclaim_without_an_answer_expires():
    sim = Simulation(a=4000, b=3000, c=3000)
    sim.reclaimable("b", spare=1000, **BUSY)
    sim.reclaimable("c", prefixes=1000, **BUSY)
    sim.reclaimable("a", **BUSY)
    sim.request("a", 5000)

    methods = [it.method for it in of_type([*sim.commands_seen, *sim.wait(100)], Reclaim)]
    assert methods[:2] == ["spare", "prefixes"]


def test_a_load_evicts_the_least_valuable_idle_model():
    sim = Simulation(old=2000, new=2000)
    sim.load("pinned", 2000, ModelPolicy(pinned=True))
    sim.load("dear", 2000, ModelPolicy(priority=1))
    for name in ("old", "new", "pinned", "dear"):
        sim.reclaimable(name, base=2000)
        sim.now += 10
    sim.apply(LoadRequested("me", ModelPolicy(), patient=False))

    assert not sim.request("me", 3500), "answered before it is granted"
    assert of_type(sim.wait(1), Evict) == [Evict("old")]
    assert of_type(sim.apply(WorkerExited("old")), GrantDecision) == [
        GrantDecision("me", 1, 3500, True, 500)
    ]
    assert sim.recorded("evict").requester == "me"


def test_a_load_waits_for_a_model_that_has_just_become_idle():
    sim = Simulation(a=8000)
    sim.reclaimable("a", rows=1, base=8000)
    sim.reclaimable("a", base=8000)
    sim.apply(LoadRequested("me", ModelPolicy(), patient=False))

    assert not of_type(sim.request("me", 5000), GrantDecision)
    assert of_type(sim.wait(2), Evict) == [Evict("a")]


def test_a_load_without_room_is_refused_with_the_numbers():
    sim = Simulation(busy=3000)
    sim.load("kept", 4000, ModelPolicy(pinned=True))
    sim.reclaimable("kept", base=4000)
    sim.reclaimable("busy", **BUSY)
    sim.apply(LoadRequested("me", ModelPolicy(), patient=False))

    (answer,) = of_type(sim.request("me", 5000), GrantDecision)

    assert not answer.granted
    assert "kept (pinned) holds" in answer.reason
    assert "busy (in use) holds" in answer.reason
    assert not of_type(sim.commands_seen, Evict)
    assert sim.recorded("load_refused").numbers["wanted_bytes"] == 5000


def test_a_refused_load_names_memory_beyond_grants():
    sim = Simulation(busy=3000)
    sim.reclaimable("busy", **BUSY)
    sim.apply(LoadRequested("me", ModelPolicy(), patient=False))
    sim.apply(MemoryMeasured({"busy": 3000 + 2**20}))

    (answer,) = of_type(sim.request("me", 7000), GrantDecision)

    assert "workers use 1.0 MiB beyond their grants" in answer.reason


def test_a_patient_load_waits_unless_pinned_models_leave_no_room():
    sim = Simulation(busy=8000)
    sim.reclaimable("busy", **BUSY)
    sim.apply(LoadRequested("me"))

    assert not of_type(sim.request("me", 9000), GrantDecision)
    assert (
        of_type(sim.apply(PolicyChanged("busy", ModelPolicy(pinned=True))), GrantDecision)[
            0
        ].granted
        is False
    )


def test_a_model_in_use_is_held_for_a_waiting_load_and_released_after_it():
    sim = Simulation(a=5000, b=5000)
    for name in ("a", "b"):
        sim.reclaimable(name, rows=3, base=4000)
    sim.apply(LoadRequested("me"))
    sim.request("me", 4000)

    (hold,) = of_type(sim.wait(40), HoldRequests)
    assert hold.held
    sim.reclaimable(hold.model, base=4000)  # its rows are finished
    assert of_type(sim.wait(3), Evict) == [Evict(hold.model)]
    commands_seen = sim.apply(WorkerExited(hold.model))
    assert of_type(commands_seen, GrantDecision)[0].granted
    assert of_type(commands_seen, HoldRequests) == [HoldRequests(hold.model, held=False)]


def test_a_large_request_is_not_starved_by_small_ones():
    sim = Simulation(a=2000, b=4000, c=3500)
    for name in ("b", "c"):
        sim.reclaimable(name, rows=1, waiting=1, base=1000)
    sim.reclaimable("a", **BUSY)
    sim.request("a", 6000)
    sim.request("b", 4400)
    assert sim.grants["b"] == 4400, "a small request may overtake a young large one"
    sim.wait(11)

    sim.request("b", 3000)
    assert not of_type(sim.request("b", 4000), GrantDecision)[0].granted, (
        "overtakes the first request"
    )
    sim.request("c", 1000)
    assert sim.grants["a"] == 6000


def test_models_that_wait_for_each_other_yield_to_the_oldest_request():
    sim = Simulation(a=5000, b=5000)
    for name in ("a", "b"):
        sim.reclaimable(name, waiting=2, base=5000)
    sim.request("a", 6000)
    sim.now += 1
    sim.request("b", 6000)

    (evict,) = of_type(sim.wait(60), Evict)
    assert evict == Evict("b", requeue=True)
    assert of_type(sim.apply(WorkerExited("b")), GrantDecision)[0].model == "a"


def test_a_request_that_arrives_during_an_eviction_is_requeued():
    sim = Simulation(a=5000, b=5000)
    sim.reclaimable("b", base=5000)
    sim.reclaimable("a", **BUSY)
    sim.request("a", 6000)
    assert of_type(sim.wait(2), Evict) == [Evict("b")]

    sim.request("b", 5500)
    assert of_type(sim.reclaimable("b", waiting=1, base=5000), Evict) == [Evict("b", requeue=True)]
    assert not of_type(sim.reclaimable("b", waiting=1, base=4999), Evict), "evicted twice"


def test_a_model_that_a_user_unloads_gets_memory_before_older_requests():
    sim = Simulation(a=5000, b=5000)
    sim.reclaimable("a", waiting=1, base=5000)
    sim.reclaimable("b", waiting=1, base=5000)
    sim.request("a", 6000)
    sim.wait(20)
    sim.apply(governor_events.UnloadStarted("b"))
    sim.request("b", 5500)

    assert of_type(sim.wait(60), Evict) == [Evict("a", requeue=True)]
    assert of_type(sim.apply(WorkerExited("a")), GrantDecision)[0].model == "b"


def test_idle_models_are_unloaded_after_their_ttl_except_pinned_ones():
    sim = Simulation()
    sim.load("a", 1000, ModelPolicy(idle_ttl_s=60))
    sim.load("b", 1000, ModelPolicy(idle_ttl_s=60, pinned=True))
    for name in ("a", "b"):
        sim.reclaimable(name, base=1000)

    assert not of_type(sim.wait(45), Evict)
    assert of_type(sim.wait(20), Evict) == [Evict("a")]
    assert "60 s" in sim.recorded("evict").reason


def test_new_rows_start_lower_while_memory_is_tight_and_at_level_0_afterwards():
    sim = Simulation(a=9900)
    sim.reclaimable("a", rows=9, levels=(10, 10), base=900)
    assert StartLevel("a", 1) in sim.commands_seen

    sim.wait(11)
    assert StartLevel("a", 2) in sim.commands_seen
    sim.reclaimable(
        "a", rows=9, levels=(10, 10), base=900, spare=1100
    )  # below the high watermark, above the low one
    assert StartLevel("a", 0) not in sim.commands_seen + sim.wait(30)
    sim.reclaimable("a", rows=9, levels=(10, 10), base=900, spare=3000)
    assert StartLevel("a", 0) not in sim.commands_seen + sim.wait(9)
    assert StartLevel("a", 0) in sim.wait(3)


def test_growth_is_extrapolated():
    sim = Simulation(a=5000)
    for total in range(5000, 9000, 200):
        sim.reclaimable("a", rows=2, levels=(10,), base=1000)
        sim.request("a", total)
        sim.now += 2.0
    recorded = sim.recorded("tight")

    assert "soon" in recorded.reason
    assert recorded.numbers["granted_bytes"] < 0.95 * BUDGET


@pytest.mark.parametrize(("pressure", "method"), [("warning", "prefixes"), ("critical", "preempt")])
def test_memory_pressure_of_the_system_is_relieved(pressure, method):
    sim = Simulation(a=5000)
    offered = {"prefixes": 100} if method == "prefixes" else {"preempt": 600}
    sim.reclaimable("a", rows=1, base=2000, **offered)

    commands_seen = sim.apply(MemoryMeasured({"a": 5000}, pressure))

    assert [it.method for it in of_type(commands_seen, Reclaim)] == [method]
    assert not of_type(sim.apply(MemoryMeasured({"a": 5000}, pressure), 1), Reclaim), (
        "one at a time"
    )


def test_excess_over_a_grant_is_not_available_to_others():
    sim = Simulation(a=4000, b=4000)
    sim.apply(MemoryMeasured({"a": 5500, "b": 100}))

    assert not of_type(sim.request("b", 5000), GrantDecision)[0].granted
    assert sim.recorded("excess").numbers["excess_bytes"] == 1500
    assert of_type(sim.apply(MemoryMeasured({"a": 4000})), GrantDecision)[0].granted


def test_only_the_worker_with_the_excess_gives_memory_back_for_it():
    sim = Simulation(a=5000, b=4000, idle=500)
    sim.reclaimable("a", spare=100, levels=(300,), preempt=500, **BUSY)
    sim.reclaimable("b", spare=900, levels=(900,), preempt=900, **BUSY)
    sim.reclaimable("idle", base=500)
    sim.wait(5)
    sim.commands_seen.clear()
    sim.apply(MemoryMeasured({"a": 7000}))
    for _ in range(3):
        sim.give_back(of_type(sim.commands_seen, Reclaim)[-1], 50, exhausted=True)
        sim.wait(2)

    assert {(it.model, it.method) for it in of_type(sim.commands_seen, Reclaim)} == {
        ("a", "spare"),
        ("a", "precision"),
        ("a", "preempt"),
    }
    assert not of_type(sim.commands_seen, Evict)


PID = 7


def measured(pressure="normal", **used: int) -> MemoryMeasured:
    return MemoryMeasured(used, pressure, dict.fromkeys(used, PID))


def test_a_worker_above_its_limit_is_ended_after_two_measurements():
    sim = Simulation(a=5000, idle=4000)
    sim.reclaimable("a", rows=1, levels=(300,), preempt=500, base=2000)
    limit = limit_bytes(5000)
    sim.apply(measured(a=limit + 1))
    sim.apply(measured(a=limit))
    assert not of_type(sim.apply(measured(a=limit + 1)), EndWorker)
    assert sim.apply(measured(a=limit + 2), 1) == [EndWorker("a", PID, limit + 2, limit)]
    assert sim.recorded("over_limit").numbers["limit_bytes"] == limit
    assert of_type(sim.apply(measured(a=limit + 2), 1), EndWorker) == []
    assert of_type(sim.apply(measured(a=limit + 2), 1), EndWorker)  # it still lives
    sim.apply(WorkerExited("a"))
    assert of_type(sim.request("idle", 9000), GrantDecision)[0].granted


def test_a_loading_worker_without_a_grant_is_measured_too():
    sim = Simulation(a=5000)
    sim.apply(LoadRequested("b"))
    assert not sim.apply(measured(b=STARTING_BYTES))
    assert sim.governor.ledger.excess_bytes == 0
    sim.apply(measured(b=STARTING_BYTES + 5))
    assert sim.governor.ledger.excess_bytes == 5
    (ended,) = sim.apply(measured(b=STARTING_BYTES + 5))
    assert ended == EndWorker("b", PID, STARTING_BYTES + 5, STARTING_BYTES)


def test_no_other_model_pays_for_a_worker_above_its_limit():
    sim = Simulation(idle=3000, busy=4000)
    sim.reclaimable("busy", spare=100, prefixes=900, levels=(900,), preempt=900, **BUSY)
    sim.wait(5)
    sim.commands_seen.clear()
    sim.apply(LoadRequested("hostile", patient=False))
    for pressure in ("normal", "critical"):
        sim.apply(measured(pressure, hostile=8 << 30, busy=3000, idle=3000))
        sim.request("busy", 5000)
        sim.wait(20)

    assert not of_type(sim.commands_seen, Evict) + of_type(sim.commands_seen, Reclaim)
    assert not sim.governor.gauge.tight
    waiting = sim.governor.ledger.waiting
    assert waiting["busy"].total_bytes == 5000
    assert of_type(sim.apply(WorkerExited("hostile")), GrantDecision)[0].granted


def test_a_load_is_not_refused_because_of_a_worker_above_its_limit():
    sim = Simulation(a=4000)
    sim.apply(LoadRequested("hostile"))
    sim.apply(measured(hostile=8 << 30))
    sim.apply(LoadRequested("b", patient=False))
    assert not sim.request("b", 5000)
    assert of_type(sim.apply(WorkerExited("hostile")), GrantDecision)[0].granted


def test_a_value_that_may_be_older_than_the_grant_ends_no_worker():
    sim = Simulation(a=5000, idle=4000)
    sim.request("a", 3000)
    for _ in range(5):
        assert not of_type(sim.apply(MemoryMeasured({"a": 4 << 30}), 1), EndWorker)
    assert not sim.governor.offending_bytes


def test_other_models_wait_only_so_long_for_a_worker_that_cannot_be_killed():
    sim = Simulation(a=5000, idle=4000)
    for _ in range(MAX_OFFENCES):
        sim.apply(measured(a=8 << 30), 1)
        assert sim.governor.offending_bytes
    sim.apply(measured(a=8 << 30), 1)
    assert not sim.governor.offending_bytes


def test_a_lowered_budget_is_enforced_and_no_model_grows_meanwhile():
    sim = Simulation(a=5000, b=4000)
    sim.reclaimable("a", rows=1, levels=(1000,), preempt=500, base=2000)
    sim.reclaimable("b", base=4000)

    (level,) = of_type(sim.apply(BudgetChanged(6000)), Reclaim)
    assert level.method == "precision"
    commands_seen = sim.give_back(level, 1000)
    assert of_type(commands_seen + sim.wait(1), Evict) == [Evict("b")]
    assert not of_type(sim.request("a", 4100), GrantDecision)[0].granted
    sim.apply(WorkerExited("b"))
    assert sum(sim.grants.values()) <= 6000


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
        st.dictionaries(names, st.integers(0, 9000) | st.integers(0, 1 << 40)),
        st.sampled_from(["normal", "warning", "critical"]),
    )
    | st.builds(BudgetChanged, st.integers(1, 12_000))
    | st.just(AlarmFired())
)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(events, st.sampled_from([0.0, 0.3, 12.0, 35.0])), max_size=50))
def test_grants_stay_in_the_budget_after_any_events(history):
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
