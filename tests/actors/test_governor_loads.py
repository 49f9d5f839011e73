"""The governor's loads and waiting requests: evictions, refusals, and no starvation."""

from __future__ import annotations

from actors.machines import governor_events
from actors.machines.governor_events import (
    Evict,
    HoldRequests,
    LoadRequested,
    MemoryMeasured,
    PolicyChanged,
)
from actors.machines.ledger import GrantDecision, WorkerExited
from protocol.policy import ModelPolicy
from tests.actors.governor_simulation import BUSY, Simulation, of_type


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
