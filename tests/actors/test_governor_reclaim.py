"""The governor's reclaim order: cheapest method first, and the bounds of preemption."""

from __future__ import annotations

from actors.machines import governor_events
from actors.machines.governor_events import AlarmFired, Evict, Reclaim
from actors.machines.ledger import WorkerExited
from protocol.policy import ModelPolicy
from tests.actors.governor_simulation import BUSY, Simulation, of_type


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
