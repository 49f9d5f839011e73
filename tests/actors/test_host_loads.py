"""Loads that need memory of the host and of a device: what they keep back, and whom they cost."""

from __future__ import annotations

from actors.machines import governor_events as ev
from actors.machines.governor_events import Evict, HoldRequests
from protocol.memory_bounds import HOST_BYTES, STARTING_BYTES
from protocol.policy import ModelPolicy
from tests.actors.governor_simulation import BUSY, of_type
from tests.actors.test_governors import Hosts, decisions


def test_a_loads_own_process_does_not_keep_back_its_charge():
    it = Hosts(1)
    it.apply(ev.LoadRequested("new"))
    it.measure(new=STARTING_BYTES + 2**20)  # less than its charge, before its first request
    assert decisions(it.request("new", 1000), "new") == [(True, 1000)]


def test_a_loads_own_process_costs_no_second_model():
    it = Hosts(2)
    for name in ("one", "two"):
        it.add(name, 1000)
    it.wait(60)
    it.apply(ev.LoadRequested("new", ModelPolicy(device=1)))
    it.measure(new=STARTING_BYTES + 2**20)
    it.request("new", 1000)
    it.wait(5)
    assert len(of_type(it.commands_seen, Evict)) == 1


def test_a_pinned_model_is_not_held_for_the_host():
    it = Hosts(2)
    it.add("a_pinned", 1000, pinned=True)
    it.add("b_used", 1000)
    for name in ("a_pinned", "b_used"):
        it.reclaimable(name, **(BUSY | {"waiting": 0}))
    it.apply(ev.LoadRequested("new", ModelPolicy(device=1)))
    it.request("new", 1000)
    assert of_type(it.wait(60), HoldRequests) == [HoldRequests("b_used", held=True)]


def test_a_load_that_its_device_refuses_costs_no_model():
    it = Hosts(1)
    it.add("idle", 1000)
    it.wait(60)
    it.apply(ev.LoadRequested("huge", ModelPolicy(device=1), patient=False))
    it.request("huge", 1_000_000)
    it.wait(5)
    assert of_type(it.commands_seen, Evict) == []


def test_a_granted_charge_ends_the_excess_of_its_process():
    it = Hosts(3)
    it.add("full", 9000)
    it.reclaimable("full", **(BUSY | {"waiting": 0}))
    it.apply(ev.LoadRequested("waits"))
    it.measure(waits=STARTING_BYTES + HOST_BYTES // 2)
    it.request("waits", 5000)
    assert it.processes == 2
    # The measurement does not change, so it is not reported again.
    it.apply(ev.LoadRequested("other", ModelPolicy(device=1)))
    assert decisions(it.request("other", 1000), "other") == [(True, 1000)]


def test_excess_of_an_idle_model_unloads_it():
    it = Hosts(2)
    for name in ("one", "two"):
        it.add(name, 1000)
    it.wait(60)
    assert of_type(it.measure(one=HOST_BYTES + HOST_BYTES // 2), Evict) == [Evict("one")]
