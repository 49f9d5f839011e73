"""Workers above their limit are ended, and no other model pays for them."""

from __future__ import annotations

from actors.machines.governing.state import MAX_OFFENCES
from actors.machines.governor_events import EndWorker, Evict, LoadRequested, MemoryMeasured, Reclaim
from actors.machines.ledger import GrantDecision, WorkerExited
from protocol.memory_bounds import STARTING_BYTES, limit_bytes
from tests.actors.governor_simulation import BUSY, Simulation, of_type

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
