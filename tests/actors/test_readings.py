"""Memory readings: a worker's own measurement while it is fresh, else a read of its process."""

from __future__ import annotations

import asyncio

import pytest

from actors.readings import CALM_S, FRESH_S, INTERVAL_S, MAX_SHARE, used_bytes
from protocol.errors import InvalidModel
from protocol.messages import Done
from protocol.types import MemoryUse, WorkerStats
from protocol.worker import Reclaim, Stats
from tests.sim.fakes import Script
from tests.sim.loop import simulated, until
from tests.sim.world import World, world

MIB = 2**20


def measured_bytes(it: World, model: str) -> int:
    return it.system._governor.machine.devices[0].accounts[model].measured_bytes


def send_memory(it: World, model: str, **memory: int) -> None:
    it.spawn.last(model).report(Stats(stats=WorkerStats(memory=MemoryUse(**memory))))


@pytest.mark.parametrize(
    ("separate", "expected"), [(False, 100), (True, 70)], ids=["unified memory", "separate memory"]
)
def test_only_memory_that_the_budget_limits_is_counted(separate, expected):
    memory = MemoryUse(active=50, cache=20)

    assert used_bytes(memory, 100, separate=separate) == expected
    assert used_bytes(memory, 10, separate=False) == 70


@simulated
async def test_a_workers_own_measurement_reaches_the_governor_without_a_read():
    async with world(budget=4 * 1024 * MIB) as it:
        send_memory(it, "demo", footprint=300 * MIB)
        before = it.system._memory.reads
        await until(lambda: measured_bytes(it, "demo") == 300 * MIB, CALM_S + 1)
        assert it.system._memory.reads == before


@simulated
async def test_a_silent_process_is_read():
    async with world(budget=4 * 1024 * MIB) as it:
        process = it.spawn.last("demo")
        send_memory(it, "demo", footprint=300 * MIB)
        it.system._memory.sizes[process.pid] = 900 * MIB
        await until(lambda: measured_bytes(it, "demo") == 300 * MIB, CALM_S + 1)
        await until(lambda: measured_bytes(it, "demo") == 900 * MIB, FRESH_S + 3 * CALM_S)


@simulated
async def test_a_loading_process_is_read():
    async with world({"slow": [Script(load_s=30.0)]}, budget=4 * 1024 * MIB) as it:
        loading = asyncio.create_task(it.system.load("slow"))
        await until(lambda: it.spawn.processes["slow"])
        it.system._memory.sizes[it.spawn.last("slow").pid] = 50 * MIB
        await until(lambda: measured_bytes(it, "slow") == 50 * MIB, 20.0)
        await loading


@simulated
async def test_slow_reads_are_rare():
    async with world(budget=4 * 1024 * MIB) as it:
        memory = it.system._memory
        memory.took_s = 0.5
        await asyncio.sleep(100.0)

        assert 2 <= memory.reads <= 2 + 100 * MAX_SHARE / 0.5


@simulated
async def test_memory_pressure_is_reported_at_once():
    async with world(budget=4 * 1024 * MIB) as it:
        await asyncio.sleep(10.0)
        it.system._memory.pressure = "critical"
        await asyncio.sleep(CALM_S + INTERVAL_S)

        assert it.system._governor.machine.devices[0].gauge.pressure == "critical"


@simulated
async def test_unchanged_values_are_not_reported_again():
    async with world(budget=4 * 1024 * MIB) as it:
        for _ in range(20):
            send_memory(it, "demo", footprint=300 * MIB)
            await asyncio.sleep(1.0)
        story = it.system._governor.history.story(1000)

        assert sum("Measured(" in line for line in story) <= 3, (
            "at most one each before, during and after the load"
        )


@simulated
async def test_a_load_that_takes_memory_without_end_fails_and_no_other_model_pays():
    script = [Script(load_s=300.0, deaf=True)]
    async with world({"hostile": script}, budget=4 * 1024 * MIB) as it:
        first = it.spawn.last("demo")
        loading = asyncio.create_task(it.system.load("hostile"))
        await until(lambda: it.spawn.processes["hostile"])
        hostile = it.spawn.last("hostile")
        it.system._memory.sizes[hostile.pid] = 8 * 1024 * MIB
        started = asyncio.get_running_loop().time()
        with pytest.raises(InvalidModel, match="above its limit of 384 MiB"):
            await loading
        assert asyncio.get_running_loop().time() - started < 5.0
        assert it.spawn.attempts["hostile"] == 1
        assert it.model("hostile") is None
        assert it.spawn.last("demo") is first
        assert not any(isinstance(command, Reclaim) for command in first.commands)


@simulated
async def test_a_worker_above_its_limit_is_replaced_and_its_requests_continue():
    async with world(budget=4 * 1024 * MIB) as it:
        client = it.client()
        key = client.generate(max_tokens=2000)
        await until(lambda: client.tokens(key))
        first = it.spawn.last("demo")
        it.system._memory.sizes[first.pid] = 900 * MIB
        send_memory(it, "demo", footprint=900 * MIB)
        await until(lambda: it.spawn.last("demo") is not first, 60.0)
        ended = await client.end(key)
        assert isinstance(ended, Done)
        assert client.count(key) == 2000
        assert first.signals == ["kill"]


@simulated
async def test_a_value_above_the_limit_is_read_again_before_it_counts():
    async with world(budget=4 * 1024 * MIB) as it:
        process = it.spawn.last("demo")
        it.system._memory.sizes[process.pid] = 100 * MIB
        send_memory(it, "demo", footprint=1000 * MIB)  # older than a grant that has shrunk
        await until(lambda: measured_bytes(it, "demo") == 100 * MIB, CALM_S + 1)
        await asyncio.sleep(10)
        assert it.spawn.last("demo") is process
        assert it.state() == "ready"
