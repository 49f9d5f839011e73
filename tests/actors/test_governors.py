"""Several devices, each with a budget: a shortage costs only models on the device that is short."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.machines import governor_events as ev
from actors.machines.gauge import Pressure
from actors.machines.governor import Governor
from actors.machines.governor_events import Evict, HoldRequests, Reclaim, StartLevel
from actors.machines.governors import Governors
from actors.machines.ledger import GrantDecision, Ledger, MemoryRequest, WorkerExited
from protocol.memory_bounds import HOST_BYTES, STARTING_BYTES, limit_bytes
from protocol.policy import ModelPolicy
from protocol.types import Reclaimable
from tests.actors.governor_simulation import BUDGET, BUSY, Simulation, of_type

BOTH = ModelPolicy(ranks=2)
"""A gang with a rank on each of two devices."""


class Devices(Simulation):
    """Several devices, and models on them."""

    def __init__(self, devices: int = 2) -> None:
        super().__init__()
        self.governor = Governors.create(BUDGET, devices)

    def add(self, name: str, granted: int, device: int = 0, **policy: object) -> None:
        self.load(name, granted, ModelPolicy(device=device, **policy))

    def granted(self, device: int) -> int:
        return self.governor.devices[device].ledger.granted_bytes

    def give_back(self, it: Reclaim, freed: int, *, exhausted: bool = False) -> list[ev.Command]:
        total = self.governor.granted_to(it.model) - freed
        answers = self.request(it.model, total)
        return answers + self.apply(ev.ReclaimFinished(it.model, it.seq, freed, exhausted))


def decisions(commands: list[ev.Command], model: str) -> list[tuple[bool, int]]:
    return [
        (it.granted, it.total_bytes) for it in of_type(commands, GrantDecision) if it.model == model
    ]


def test_each_device_has_the_whole_budget():
    it = Devices()
    it.add("one", 9000)
    it.add("two", 8000, device=1)
    assert (it.granted(0), it.granted(1)) == (9000, 8000)
    assert it.governor.granted_bytes == 17_000
    assert it.governor.most_granted_bytes == 9000


def test_a_load_costs_only_models_on_its_device():
    it = Devices()
    it.add("old", 6000)
    it.add("near", 6000, device=1)
    it.wait(60)
    it.apply(ev.LoadRequested("new", ModelPolicy(device=1)))
    commands = it.request("new", 7000) + it.wait(5)
    assert of_type(commands, Evict) == [Evict("near")]
    assert it.recorded("evict").numbers["device"] == 1


def test_a_waiting_request_stops_no_model_on_another_device():
    it = Devices()
    it.add("small", 4000, device=1)
    it.add("wide", 6000)
    it.add("tall", 3000)
    for name in ("wide", "tall", "small"):
        it.reclaimable(name, **BUSY)
    it.request("tall", 9000)
    commands = it.wait(60)
    assert it.governor.devices[0].ledger.first == "tall"
    assert it.governor.devices[1].ledger.first is None
    assert of_type(commands, HoldRequests) == [HoldRequests("wide", held=True)]
    assert decisions(it.request("small", 9500), "small") == [(True, 9500)]


def test_rows_start_lower_only_where_memory_is_tight():
    it = Devices()
    for device, name in enumerate(("near", "far")):
        it.add(name, 3000, device)
        it.reclaimable(name, **BUSY, levels=(500,))
    it.request("near", 9900)
    commands = it.reclaimable("near", **BUSY, levels=(500,))
    assert {it.model for it in of_type(it.commands_seen + commands, StartLevel)} == {"near"}


def test_a_gang_holds_equal_parts_on_its_devices():
    it = Devices()
    it.add("gang", 8001, ranks=2)
    assert (it.granted(0), it.granted(1)) == (4001, 4001)
    assert it.governor.granted_to("gang") == 8002
    assert it.governor.limit_of("gang") == 2 * BUDGET
    it.apply(WorkerExited("gang"))
    assert it.governor.granted_bytes == 0


def test_a_gang_on_one_device_holds_all_there():
    it = Devices(devices=1)
    it.add("gang", 8001, ranks=2)
    assert it.granted(0) == 8001
    account = it.governor.account("gang")
    assert account is not None
    assert it.governor.devices[0].limit_bytes(account) == limit_bytes(8001, 2)


def test_a_gang_gets_all_of_its_parts_or_none():
    it = Devices()
    it.add("gang", 4000, ranks=2)
    it.add("full", 7000, device=1)
    for name in ("gang", "full"):
        it.reclaimable(name, **BUSY)
    assert decisions(it.request("gang", 8000), "gang") == [(False, 4000)]
    assert (it.granted(0), it.granted(1)) == (2000, 9000)
    it.add("other", 7000)  # what the gang waits for is free on this device, and may be used
    assert it.granted(0) == 9000
    commands = it.apply(WorkerExited("full"))
    assert decisions(commands, "gang") == []
    assert decisions(it.apply(WorkerExited("other")), "gang") == [(True, 8000)]


def test_the_device_that_is_short_pays_for_a_gang():
    it = Devices()
    it.add("near", 3000)
    it.add("full", 8000, device=1)
    it.wait(60)
    it.apply(ev.LoadRequested("gang", BOTH))
    commands = it.request("gang", 8000) + it.wait(5)
    assert of_type(commands, Evict) == [Evict("full")]
    assert decisions(it.apply(WorkerExited("full")), "gang") == [(True, 8000)]


def test_no_device_pays_for_a_gang_that_another_one_cannot_grant():
    it = Devices()
    it.add("idle", 8000)
    it.add("used", 8000, device=1)
    it.reclaimable("used", **(BUSY | {"base": 8000}))
    it.add("gang", 1000, ranks=2)
    it.reclaimable("gang", **(BUSY | {"base": 500}))
    it.request("gang", 9000)
    assert of_type(it.wait(9), Evict) == []
    assert it.governor.devices[0].ledger.first is None


def test_a_gang_that_pinned_models_leave_no_room_is_refused_on_both_devices():
    it = Devices()
    it.add("pinned", 7000, device=1, pinned=True)
    it.apply(ev.LoadRequested("gang", BOTH))
    (refused,) = of_type(it.request("gang", 8000), GrantDecision)
    assert not refused.granted
    assert "pinned (pinned) holds" in refused.reason
    assert all("gang" not in device.ledger.waiting for device in it.governor.devices)


def test_a_gang_gives_back_the_bytes_of_all_ranks():
    it = Devices()
    it.add("gang", 12_000, ranks=2)
    it.reclaimable("gang", spare=6000, rows=3, base=2000)
    it.add("new", 9000, device=1)
    assert it.granted(1) == 6000 + 0  # the load waits
    (reclaim,) = of_type(it.commands_seen, Reclaim)
    assert (reclaim.model, reclaim.method) == ("gang", "spare")
    assert reclaim.wanted_bytes >= 2 * 3000 - 2
    account = it.governor.account("gang")
    assert account is not None
    assert (account.reclaimable.rows, account.reclaimable.spare) == (3, 3000)


def test_a_gang_gives_back_for_its_own_load_only_once():
    """Both devices are short: one command serves both."""
    it = Devices()
    it.add("gang", 16_000, ranks=2)
    it.reclaimable("gang", spare=10_000, rows=1, base=2000)
    for device, name in enumerate(("near", "far")):
        it.apply(ev.LoadRequested(name, ModelPolicy(device=device)))
        it.request(name, 5000)
    it.wait(5)
    (reclaim,) = of_type(it.commands_seen, Reclaim)
    assert len({command.seq for command in of_type(it.commands_seen, Reclaim)}) == 1
    commands = it.give_back(reclaim, reclaim.wanted_bytes)
    assert decisions(commands, "near") == [(True, 5000)]
    assert decisions(commands, "far") == [(True, 5000)]


def test_a_gang_is_released_when_no_device_holds_it():
    it = Devices()
    it.add("gang", 12_000, ranks=2)
    it.reclaimable("gang", rows=1, base=2000)
    for device, name in enumerate(("near", "far")):
        it.add(name, 100, device)
        it.reclaimable(name, **(BUSY | {"base": 50}))
        it.request(name, 9000)
    commands = it.wait(60)
    assert of_type(commands, HoldRequests) == [HoldRequests("gang", held=True)]
    assert of_type(it.request("near", 100), HoldRequests) == []
    assert of_type(it.request("far", 100), HoldRequests) == [HoldRequests("gang", held=False)]


def test_a_gang_starts_rows_lower_while_any_of_its_devices_is_tight():
    it = Devices()
    it.add("gang", 4000, ranks=2)
    it.reclaimable("gang", **(BUSY | {"base": 2000}), levels=(500,))
    it.add("full", 2000, device=1)
    it.reclaimable("full", **BUSY)
    it.request("full", 8000)
    it.wait(1)
    levels = [command.level for command in of_type(it.commands_seen, StartLevel)]
    assert levels == [1]
    it.apply(ev.AlarmFired(), 1)  # the calm device does not raise it again
    assert [command.level for command in of_type(it.commands_seen, StartLevel)] == [1]


def test_the_excess_of_a_gang_counts_on_each_device():
    it = Devices()
    it.add("gang", 4000, ranks=2)
    it.apply(ev.MemoryMeasured({"gang": 6000}))
    assert [device.ledger.excess_bytes for device in it.governor.devices] == [1000, 1000]
    it.apply(WorkerExited("gang"))
    assert [device.ledger.excess_bytes for device in it.governor.devices] == [0, 0]


def test_a_gang_above_its_limit_is_ended_once():
    it = Devices()
    it.add("gang", 4000, ranks=2)
    used = 2 * limit_bytes(2000) + 2
    for _ in range(2):
        it.apply(ev.MemoryMeasured({"gang": used}, fresh={"gang": 7}))
    (end,) = of_type(it.commands_seen, ev.EndWorker)
    assert (end.pid, end.used_bytes, end.limit_bytes) == (7, used, 2 * STARTING_BYTES)


def test_a_model_moves_when_it_is_loaded_again():
    it = Devices()
    it.add("model", 6000)
    it.apply(WorkerExited("model"))
    it.add("model", 6000, device=1)
    assert (it.granted(0), it.granted(1)) == (0, 6000)
    it.apply(ev.ModelRemoved("model"))
    assert (it.granted(0), it.granted(1), it.governor.places) == (0, 0, {})


def test_a_held_model_that_moves_gets_requests_again():
    """It was evicted, and is loaded on another device before the request was granted."""
    it = Devices()
    for name, granted in (("moves", 4000), ("stays", 4000), ("waits", 1500)):
        it.add(name, granted)
        it.reclaimable(name, **(BUSY | {"waiting": 0, "base": 1000}))
    it.reclaimable("waits", **(BUSY | {"base": 1000}))
    it.request("waits", 9500)
    held = {command.model for command in of_type(it.wait(60), HoldRequests)}
    assert held == {"moves", "stays"}
    it.reclaimable("moves", base=1000)
    assert of_type(it.wait(5), Evict) == [Evict("moves")]
    it.apply(WorkerExited("moves"))

    commands = it.apply(ev.LoadRequested("moves", ModelPolicy(device=1)))
    assert of_type(commands, HoldRequests) == [HoldRequests("moves", held=False)]
    it.wait(60)
    assert decisions(it.apply(WorkerExited("stays")), "waits") == [(True, 9500)]


def test_the_deadline_is_that_of_the_first_device():
    it = Devices()
    it.add("idle", 100, device=1, idle_ttl_s=50.0)
    assert it.governor.devices[0].deadline is None
    assert it.governor.deadline == it.governor.devices[1].deadline
    assert of_type(it.wait(60), Evict) == [Evict("idle")]


class Hosts(Devices):
    """Two devices with memory of their own, on a host that has room for some processes."""

    def __init__(self, processes: int) -> None:
        super().__init__()
        self.governor = Governors.create(BUDGET, 2, processes * HOST_BYTES)

    @property
    def processes(self) -> int:
        """Processes that the host's memory is charged for."""
        assert self.governor.host is not None
        return self.governor.host.ledger.granted_bytes // HOST_BYTES

    def measure(self, pressure: Pressure = "normal", **host: int) -> list[ev.Command]:
        return self.apply(ev.MemoryMeasured({}, pressure, host=host))


def test_the_host_is_charged_for_every_process_until_its_end():
    it = Hosts(4)
    it.add("one", 9000)
    it.add("gang", 1000, ranks=2)
    assert it.processes == 3
    it.request("one", 5000)
    it.apply(ev.BudgetChanged(20_000))
    assert it.processes == 3
    it.apply(WorkerExited("gang"))
    it.apply(ev.ModelRemoved("one"))
    assert it.processes == 0


def test_a_load_that_the_host_has_no_room_for_unloads_an_idle_model_of_any_device():
    it = Hosts(2)
    it.add("used", 1000)
    it.reclaimable("used", **(BUSY | {"waiting": 0}), spare=900, levels=(500,), preempt=900)
    it.add("idle", 1000, device=1)
    it.wait(60)
    it.apply(ev.LoadRequested("new"))
    commands = it.request("new", 1000) + it.wait(5)
    assert commands == [Evict("idle")]
    assert it.recorded("evict").reason == "host memory: the load of new"
    assert it.granted(0) == 1000, "its device is asked afterwards"
    assert list(it.governor.waiting_loads()) == ["new"]
    assert decisions(it.apply(WorkerExited("idle")), "new") == [(True, 1000)]
    assert (it.processes, it.granted(0), list(it.governor.waiting_loads())) == (2, 2000, [])


def test_a_model_is_unloaded_once_for_the_host_and_its_device():
    it = Hosts(3)
    it.add("idle", 6000, idle_ttl_s=50.0)
    assert of_type(it.wait(60), Evict) == [Evict("idle")]
    assert of_type(it.measure("critical") + it.wait(60), Evict) == []


def test_a_load_that_waits_for_its_device_keeps_its_charge_at_the_host():
    it = Hosts(2)
    it.add("full", 9000)
    it.reclaimable("full", **(BUSY | {"waiting": 0}))
    it.apply(ev.LoadRequested("waits"))
    assert it.request("waits", 5000) == []
    assert it.processes == 2
    it.apply(WorkerExited("waits"))
    assert it.processes == 1


def test_a_load_is_refused_with_what_holds_the_memory_of_the_host():
    it = Hosts(1)
    it.add("pinned", 1000, pinned=True)
    it.apply(ev.LoadRequested("new", ModelPolicy(device=1)))
    (refused,) = of_type(it.request("new", 1000), GrantDecision)
    assert (refused.granted, refused.host_bytes, refused.available_bytes) == (False, HOST_BYTES, 0)
    assert refused.reason == "pinned (pinned) holds 2,560.0 MiB"
    assert it.governor.loads == {}


def test_a_load_that_ends_while_it_waits_for_the_host_is_forgotten():
    it = Hosts(1)
    it.add("full", 1000)
    it.reclaimable("full", **(BUSY | {"waiting": 0}))
    for event in (WorkerExited("new"), ev.ModelRemoved("new")):
        it.apply(ev.LoadRequested("new"))
        it.request("new", 1000)
        assert list(it.governor.waiting_loads()) == ["new"]
        it.apply(event)
        assert list(it.governor.waiting_loads()) == []
    assert of_type(it.apply(WorkerExited("full")), GrantDecision) == []


def test_processes_that_use_more_of_the_host_than_their_charge_leave_less_to_loads():
    it = Hosts(3)
    for name in ("large", "small"):
        it.add(name, 1000)
        it.reclaimable(name, **(BUSY | {"waiting": 0}))
    it.measure(large=HOST_BYTES + HOST_BYTES // 2, small=HOST_BYTES // 2)
    it.apply(ev.LoadRequested("new"))
    assert it.request("new", 1000) == []
    assert decisions(it.measure(large=HOST_BYTES), "new") == [(True, 1000)]
    it.measure(large=HOST_BYTES, small=20 * HOST_BYTES)
    it.measure(large=HOST_BYTES, small=21 * HOST_BYTES)
    assert of_type(it.commands_seen, ev.EndWorker) == [], "the estimate is no limit"


def test_pressure_of_the_host_unloads_idle_models_of_devices_with_own_memory():
    """Nothing else would free the host's memory: rows are not preempted, and do not step down."""
    it = Hosts(4)
    for device, name in enumerate(("one", "two")):
        it.add(name, 1000, device)
    it.add("used", 3000)
    it.reclaimable("used", **(BUSY | {"waiting": 0}), spare=900, levels=(500,), preempt=900)
    it.wait(60)
    assert of_type(it.measure("critical"), Evict) == [Evict("one")]
    it.apply(WorkerExited("one"))
    assert of_type(it.wait(9), Evict) == []
    assert of_type(it.wait(2), Evict) == [Evict("two")]
    it.apply(WorkerExited("two"))
    it.wait(60)
    assert of_type(it.commands_seen, Reclaim) == []
    assert of_type(it.commands_seen, StartLevel) == []
    assert not any(device.gauge.tight for device in it.governor.devices)
    it.add("new", 100)
    it.measure()
    it.wait(60)
    assert it.governor.deadline is None
    assert of_type(it.wait(60), Evict) == []


def test_pressure_of_the_host_waits_for_models_to_become_idle():
    it = Hosts(4)
    it.add("model", 1000)
    it.reclaimable("model", **(BUSY | {"waiting": 0}))
    it.measure("critical")
    assert of_type(it.wait(30), Evict) == []
    it.reclaimable("model")
    assert of_type(it.wait(12), Evict) == [Evict("model")]


def test_a_model_held_for_the_host_and_for_a_device_is_released_after_both():
    it = Hosts(2)
    for name, granted in (("held", 6000), ("waits", 3000)):
        it.add(name, granted)
        it.reclaimable(name, **(BUSY | {"waiting": 0, "base": 1000}))
    it.reclaimable("waits", **(BUSY | {"base": 1000}))
    it.request("waits", 9500)
    it.apply(ev.LoadRequested("new", ModelPolicy(device=1)))
    it.request("new", 100)
    held = [command.model for command in of_type(it.wait(60), HoldRequests) if command.held]
    assert held.count("held") == 2, "once for each memory"
    assert of_type(it.request("waits", 3000), HoldRequests) == []
    commands = it.apply(WorkerExited("new"))
    assert HoldRequests("held", held=False) in commands


PLACES = {"a": 0, "b": 0, "c": 1, "d": 1}
ACTS = st.lists(
    st.tuples(
        st.sampled_from(sorted(PLACES)),
        st.sampled_from(["load", "ready", "request", "report", "exit", "measure", "budget"]),
        st.integers(0, 12_000),
        st.sampled_from([0.0, 0.3, 2.0, 15.0]),
    ),
    max_size=60,
)


def event_of(model: str, kind: str, number: int, seq: int) -> ev.Event:
    levels = (number // 5, number // 9)
    found = Reclaimable(spare=number // 3, levels=levels, rows=number % 3, waiting=number % 2)
    return {
        "load": ev.LoadRequested(model, ModelPolicy(device=PLACES[model])),
        "ready": ev.ModelReady(model),
        "request": MemoryRequest(model, seq, number),
        "report": ev.ReclaimableReported(model, found),
        "exit": WorkerExited(model),
        "measure": ev.MemoryMeasured({model: number}),
        "budget": ev.BudgetChanged(5000 + number),
    }[kind]


@given(ACTS)
def test_a_device_is_governed_as_if_it_were_alone(acts):
    """Whatever happens, each device's commands are those of a machine that has no other device."""
    together = Governors.create(BUDGET, 2)
    alone = [Governor(Ledger(BUDGET), device) for device in range(2)]
    now = 1000.0
    for seq, (model, kind, number, pause) in enumerate(acts, 1):
        now += pause
        event = event_of(model, kind, number, seq)
        if kind not in {"load", "measure", "budget"} and together.account(model) is None:
            continue
        expected = []
        for device, governor in enumerate(alone):
            if kind == "budget":
                expected += governor.handle(event, now)
            elif kind == "measure":
                own = event if PLACES[model] == device else ev.MemoryMeasured({})
                expected += governor.handle(own, now)
            elif PLACES[model] == device:
                expected += governor.handle(event, now)
        assert together.handle(event, now) == expected
        together.check()


@given(st.lists(st.tuples(st.sampled_from("gab"), st.integers(0, 24_000)), max_size=60))
def test_gangs_and_others_never_exceed_a_budget(requests):
    it = Devices()
    policies = {"g": BOTH, "a": ModelPolicy(), "b": ModelPolicy(device=1)}
    for model, policy in policies.items():
        it.load(model, 100, policy)
        it.reclaimable(model, rows=1, waiting=1, base=50)
    for model, total in requests:
        it.request(model, total)
        it.wait(1)
        for device in range(2):
            assert it.granted(device) <= BUDGET
        gang, one, two = (it.governor.granted_to(name) for name in "gab")
        assert (it.granted(0), it.granted(1)) == (gang // 2 + one, gang // 2 + two)
