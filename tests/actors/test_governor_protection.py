"""Protected models: they serve for a while after a load before long waits of others count."""

from __future__ import annotations

from actors.machines.governing.state import Times
from actors.machines.governor_events import LoadRequested, ModelReady, Reclaim, ServingChanged
from actors.machines.ledger import GrantDecision
from actors.machines.model_accounts import PROTECTED_LOADS
from protocol.policy import ModelPolicy
from tests.actors.governor_simulation import BUSY, Simulation, of_type

TIMES = Times()


def seconds_to_preemption(sim: Simulation, limit: int) -> int:
    """Return the seconds until rows are preempted; ``limit`` if that does not happen before."""
    for second in range(limit):
        if any(it.method == "preempt" for it in of_type(sim.commands_seen, Reclaim)):
            return second
        sim.wait(1)
    return limit


def waiting_for(sim: Simulation, busy: str, waited_s: float) -> None:
    """Let model ``a`` wait for more than its share; ``busy`` runs rows after ``waited_s``."""
    sim.apply(ServingChanged(busy, busy=True))
    sim.reclaimable("a", **BUSY)
    sim.request("a", 7000)
    sim.wait(waited_s)
    sim.reclaimable(busy, preempt=6000, **BUSY)


def test_rows_of_a_protected_model_are_preempted_later():
    sim = Simulation(a=2000, b=8000)
    waiting_for(sim, "b", TIMES.hold_s)

    assert TIMES.protected_s - 2 <= seconds_to_preemption(sim, 100) <= TIMES.protected_s + 2


def test_a_model_of_higher_priority_does_not_wait_for_it():
    sim = Simulation(b=8000)
    sim.load("a", 2000, ModelPolicy(priority=1))
    waiting_for(sim, "b", TIMES.hold_s)

    assert seconds_to_preemption(sim, 100) <= 1


def test_a_model_that_loads_for_long_is_protected_for_longer():
    sim = Simulation(a=2000)
    load_s = 60
    sim.apply(LoadRequested("b"))
    sim.wait(load_s)
    sim.request("b", 8000)
    sim.apply(ModelReady("b"))
    waiting_for(sim, "b", TIMES.hold_s)

    expected = PROTECTED_LOADS * load_s
    assert expected - 2 <= seconds_to_preemption(sim, 200) <= expected + 2


def test_running_rows_of_a_protected_model_grow_before_the_first_request():
    sim = Simulation(a=1500, b=8000)
    waiting_for(sim, "b", TIMES.due_s + 1)
    assert sim.governor.ledger.first == "a"

    def granted(total: int, *, resuming: bool) -> bool:
        answers = of_type(sim.request("b", total, resuming=resuming), GrantDecision)
        return answers[0].granted

    assert granted(8100, resuming=True)
    assert not granted(8200, resuming=False), "a new row"
    assert granted(8200, resuming=True)
    sim.wait(TIMES.protected_s)
    assert not granted(8300, resuming=True)


def test_back_to_back_requests_do_not_protect_a_model_again():
    sim = Simulation(a=2000, b=8000)
    waiting_for(sim, "b", TIMES.hold_s)
    for _ in range(int(TIMES.protected_s) - 1):
        sim.wait(0.5)
        sim.reclaimable("b", waiting=1, base=2000)
        sim.wait(0.5)
        sim.reclaimable("b", preempt=6000, **BUSY)

    assert 0 < seconds_to_preemption(sim, 100) <= 2
