"""Several devices in the system: models by device, their budgets, time slices and refusals."""

from __future__ import annotations

import asyncio

import pytest

from actors.status import KnownModel
from protocol import messages
from protocol.device import DeviceStatus
from protocol.errors import InsufficientMemory, InvalidModel, ModelExists, UnsupportedModel
from protocol.explain_messages import Explain
from protocol.memory_bounds import HOST_BYTES
from protocol.policy import ModelPolicy, PolicyChange
from protocol.types import MemoryUse, WorkerStats
from protocol.worker import Grant, Stats, TimeSlice, TimeSliceRequested
from tests.actors.test_explain import estimate_model
from tests.sim.fakes import Script
from tests.sim.loop import simulated, until
from tests.sim.world import world

BIG = Script(weights=600)
SCRIPTS = {name: [BIG] for name in ("one", "two", "three", "gang")}
SECOND = PolicyChange(device=1)


@simulated
async def test_models_on_two_devices_have_a_budget_each():
    async with world(SCRIPTS, load=(), devices=2) as w:
        await w.system.load("one")
        await w.system.load("two", policy=SECOND)
        assert [w.spawn.last(name).device for name in ("one", "two")] == [0, 1]
        status = w.system.status()
        assert [(it.name, it.device) for it in status.models] == [("one", 0), ("two", 1)]
        assert status.devices == [DeviceStatus(budget_bytes=1000, granted_bytes=600)] * 2
        assert (status.budget_bytes, status.granted_bytes) == (2000, 1200)
        text = await w.system._metrics()
        assert 'kvd_device_granted_bytes{device="1"} 600' in text

        await asyncio.sleep(5)
        await w.system.load("three", policy=SECOND)
        assert sorted(it.name for it in w.system.status().models) == ["one", "three"]
        (evicted,) = [it for it in w.system.events.records if it.kind == "evict"]
        assert (evicted.model, evicted.numbers["device"]) == ("two", 1)


@simulated
async def test_a_gang_is_charged_to_each_of_its_devices():
    async with world(SCRIPTS, load=(), devices=3) as w:
        await w.system.load("gang", policy=PolicyChange(ranks=2, device=1))
        assert [it.granted_bytes for it in w.system.status().devices] == [0, 300, 300]
        assert w.spawn.last("gang").device == 1
        client = w.client()
        assert (await client.end(client.generate("gang"))).reason == "length"
        await w.system.unload("gang")
        assert [it.granted_bytes for it in w.system.status().devices] == [0, 0, 0]


@simulated
async def test_the_hosts_memory_has_a_budget_beside_the_devices():
    async with world(SCRIPTS, load=(), devices=2, host_bytes=3 * HOST_BYTES) as w:
        await w.system.load("gang", policy=PolicyChange(ranks=2))
        await w.system.load("one")
        status = w.system.status()
        assert status.host_budget == DeviceStatus(
            budget_bytes=3 * HOST_BYTES, granted_bytes=3 * HOST_BYTES
        )
        assert "kvd_host_granted_bytes 8.05306368e+09" in await w.system._metrics()

        await asyncio.sleep(5)
        await w.system.load("three", policy=SECOND)  # device 1 has room for it, the host has not
        (evicted,) = [it for it in w.system.events.records if it.kind == "evict"]
        assert evicted.reason == "host memory: the load of three"
        assert "three" in {it.name for it in w.system.status().models}


@simulated
async def test_a_load_that_the_host_cannot_hold_is_refused_with_its_numbers():
    async with world(SCRIPTS, load=(), devices=2, host_bytes=HOST_BYTES) as w:
        with pytest.raises(InsufficientMemory):
            await w.system.load("gang", policy=PolicyChange(ranks=2))
        (refused,) = [it for it in w.system.events.records if it.kind == "load_refused"]
        assert refused.numbers["wanted_bytes"] == 2 * HOST_BYTES
        grants = [it for it in w.spawn.last("gang").commands if isinstance(it, Grant)]
        assert [it.host_bytes for it in grants] == [2 * HOST_BYTES]


@simulated
async def test_footprints_are_measured_for_the_host_and_allocators_for_the_device():
    mib = 2**20
    async with world(budget=4096 * mib, host_bytes=2 * HOST_BYTES) as w:
        memory = MemoryUse(active=30 * mib, cache=10 * mib, footprint=HOST_BYTES + 50 * mib)
        w.spawn.last("demo").report(Stats(stats=WorkerStats(memory=memory)))
        machine = w.system._governor.machine
        await until(lambda: machine.host.ledger.excess_bytes == 50 * mib, 10)
        assert machine.devices[0].accounts["demo"].measured_bytes == 40 * mib
        w.memory.pressure = "critical"
        await until(lambda: w.system.status().models == [], 20)
        assert machine.devices[0].gauge.pressure == "normal"


@simulated
async def test_a_machine_with_one_device_shows_none():
    async with world() as w:
        status = w.system.status()
        assert (status.devices, status.models[0].device) == ([], None)
        assert status.host_budget is None
        assert "kvd_device_budget_bytes{" not in await w.system._metrics()


@pytest.mark.parametrize(
    ("devices", "policy", "reason"),
    [
        (1, PolicyChange(device=1), "needs device 1, and this machine has only device 0"),
        (2, PolicyChange(device=2), "needs device 2, and this machine has devices 0 to 1"),
        (2, PolicyChange(device=1, ranks=2), "needs device 2"),
    ],
)
@simulated
async def test_a_device_that_does_not_exist_is_refused(devices, policy, reason):
    async with world(SCRIPTS, load=(), devices=devices) as w:
        with pytest.raises(UnsupportedModel, match=reason):
            await w.system.load("one", policy=policy)
        assert w.system.status().models == []
        await w.system.load("one")


@simulated
async def test_a_request_for_a_configured_model_on_a_missing_device_ends():
    known = {"far": KnownModel("/far", policy=ModelPolicy(device=3), listed=True)}
    async with world(load=(), known=known, devices=2) as w:
        client = w.client()
        end = await client.end(client.generate("far"))
        assert isinstance(end, messages.Error)
        assert (end.error.code, w.model("far")) == ("unsupported_model", None)


@pytest.mark.parametrize("devices", [1, 2])
@simulated
async def test_a_text_for_a_configured_model_on_a_missing_device_is_refused(devices):
    known = {"far": KnownModel("/far", policy=ModelPolicy(device=3), listed=True)}
    async with world(known=known, devices=devices) as w:
        client = w.client()
        with pytest.raises(UnsupportedModel, match="needs device 3"):
            await client.ask(messages.Tokenize, model="far", prompt="Hi!")
        assert w.model("far") is None
        assert (await client.end(client.generate())).reason == "length"


@simulated
async def test_a_text_during_a_refused_load_ends_if_the_configured_device_is_missing():
    """A client's load names a device that exists; the configuration does not."""
    known = {"far": KnownModel("/far", policy=ModelPolicy(device=3), listed=True)}
    broken = Script(load_error=InvalidModel("config.json is missing").info())
    async with world({"far": [broken]}, known=known, devices=2) as w:
        client = w.client()
        load = client.start(messages.Load, model="far", policy=SECOND)
        await until(lambda: w.state("far") == "loading", 5)
        text = client.start(messages.Tokenize, model="far", prompt="Hi!")
        assert (await client.end(load)).error.code == "invalid_model"
        assert (await client.end(text)).error.code == "unsupported_model"
        assert w.model("far") is None
        assert (await client.end(client.generate())).reason == "length"


@simulated
async def test_a_loaded_model_does_not_move_to_another_device():
    async with world(SCRIPTS, load=("one",), devices=2) as w:
        with pytest.raises(ModelExists, match="different device"):
            await w.system.load("one", policy=SECOND)
        await w.system.unload("one")
        await w.system.load("one", policy=SECOND)
        assert [it.granted_bytes for it in w.system.status().devices] == [0, 600]


@simulated
async def test_the_budget_is_that_of_each_device():
    async with world(SCRIPTS, load=(), devices=2) as w:
        client = w.client()
        await w.system.load("two", policy=SECOND)
        changed = await client.ask(messages.Configure, budget_bytes=1500)
        assert (changed.budget_bytes, changed.granted_bytes) == (1500, 600)
        assert [it.budget_bytes for it in w.system.status().devices] == [1500, 1500]


@simulated
async def test_workers_on_different_devices_do_not_wait_for_each_other():
    async with world(SCRIPTS, load=("one",), devices=2) as w:
        await w.system.load("two", policy=SECOND)
        processes = [w.spawn.last(name) for name in ("one", "two")]
        for process in processes:
            process._on_report(TimeSliceRequested(step_s=1.0))

        def slices(process) -> list[float | None]:
            return [it.slice_s for it in process.commands if isinstance(it, TimeSlice)]

        await until(lambda: all(map(slices, processes)), 5)
        assert [slices(process) for process in processes] == [[None], [None]]


@simulated
async def test_explain_counts_the_budget_of_the_models_device():
    async with world(SCRIPTS, load=(), estimate_model=estimate_model, devices=2) as w:
        await w.system.load("two", policy=SECOND)
        client = w.client()

        async def ask(**fields):
            return (await client.ask(Explain, model="/m", rows=2, **fields)).forecast

        first, second = await ask(), await ask(device=1)
        assert (first.device, first.available_bytes) == (0, 1000)
        assert (second.device, second.available_bytes) == (1, 400)
        assert first.levels == second.levels
        both = await ask(ranks=2)  # an estimate of 200 bytes of base, and the device with less room
        assert (both.device, both.base_bytes, both.budget_bytes) == (1, 100, 1000)
        with pytest.raises(UnsupportedModel):
            await ask(device=1, ranks=2)
