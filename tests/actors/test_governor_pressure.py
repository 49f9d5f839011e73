"""Idle models, tight memory, the system's pressure, excess over grants, and a lowered budget."""

from __future__ import annotations

import pytest

from actors.machines.governor_events import (
    BudgetChanged,
    Evict,
    MemoryMeasured,
    Reclaim,
    StartLevel,
)
from actors.machines.ledger import GrantDecision, WorkerExited
from protocol.policy import ModelPolicy
from tests.actors.governor_simulation import BUDGET, BUSY, Simulation, of_type


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


def test_prefixes_that_no_row_uses_do_not_make_memory_tight():
    """They are freed before anything else, so no row has to start at a lower level."""
    sim = Simulation(a=9900)
    for prefixes, tight in ((3000, False), (100, True)):
        sim.reclaimable("a", rows=2, levels=(10,), base=900, spare=2000, prefixes=prefixes)
        sim.apply(MemoryMeasured({"a": 9800}))
        assert sim.governor.gauge.tight == tight


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


def test_a_lowered_budget_is_enforced_and_no_model_grows_meanwhile():
    sim = Simulation(a=5000, b=4000)
    sim.reclaimable("a", rows=1, levels=(1000,), preempt=500, base=2000)
    sim.reclaimable("b", base=4000)

    (level,) = of_type(sim.apply(BudgetChanged(4500)), Reclaim)
    assert level.method == "precision"
    commands_seen = sim.give_back(level, 1000)
    assert of_type(commands_seen + sim.wait(1), Evict) == [Evict("b")]
    assert not of_type(sim.request("a", 4100), GrantDecision)[0].granted
    sim.apply(WorkerExited("b"))
    assert sum(sim.grants.values()) <= 4500


def test_no_row_steps_down_when_an_idle_model_must_be_evicted_anyway():
    sim = Simulation(a=5000, b=4000)
    sim.reclaimable("a", rows=1, levels=(1000,), preempt=500, base=2000)
    sim.reclaimable("b", base=4000)

    lowered = sim.apply(BudgetChanged(6000)) + sim.wait(1)
    assert not of_type(lowered, Reclaim)
    assert of_type(lowered, Evict) == [Evict("b")]
