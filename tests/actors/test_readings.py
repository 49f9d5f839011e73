"""Readings: workers' own words first, ours where they are silent, and nothing twice."""

from __future__ import annotations

import asyncio

import pytest

from actors.readings import CALM_S, FRESH_S, INTERVAL_S, MAX_SHARE, used_bytes
from protocol.types import MemoryUse, WorkerStats
from protocol.worker import Stats
from tests.sim.fakes import Script
from tests.sim.loop import simulated, until
from tests.sim.world import World, world

MIB = 2**20


def told(it: World, model: str) -> int:
    return it.system._governor.machine.accounts[model].measured_bytes


def say(it: World, model: str, **memory: int) -> None:
    it.spawn.last(model).report(Stats(stats=WorkerStats(memory=MemoryUse(**memory))))


@pytest.mark.parametrize(
    ("separate", "expected"), [(False, 100), (True, 70)], ids=["one memory", "a card's own"]
)
def test_what_counts_is_the_memory_that_the_budget_is_of(separate, expected):
    memory = MemoryUse(active=50, cache=20)

    assert used_bytes(memory, 100, separate=separate) == expected
    assert used_bytes(memory, 10, separate=False) == 70


@simulated
async def test_a_workers_own_word_reaches_the_governor_without_a_reading():
    async with world(budget=4 * 1024 * MIB) as it:
        say(it, "demo", footprint=300 * MIB)
        before = it.system._memory.reads
        await until(lambda: told(it, "demo") == 300 * MIB, CALM_S + 1)
        assert it.system._memory.reads == before


@simulated
async def test_a_silent_process_is_read_from_here():
    async with world(budget=4 * 1024 * MIB) as it:
        process = it.spawn.last("demo")
        say(it, "demo", footprint=300 * MIB)
        it.system._memory.sizes[process.pid] = 900 * MIB
        await until(lambda: told(it, "demo") == 300 * MIB, CALM_S + 1)
        await until(lambda: told(it, "demo") == 900 * MIB, FRESH_S + 3 * CALM_S)


@simulated
async def test_a_process_that_loads_is_read_from_here():
    async with world({"slow": [Script(load_s=30.0)]}, budget=4 * 1024 * MIB) as it:
        loading = asyncio.create_task(it.system.load("slow"))
        await until(lambda: it.spawn.processes["slow"])
        it.system._memory.sizes[it.spawn.last("slow").pid] = 50 * MIB
        await until(lambda: told(it, "slow") == 50 * MIB, 20.0)
        await loading


@simulated
async def test_readings_that_take_long_are_seldom():
    async with world(budget=4 * 1024 * MIB) as it:
        memory = it.system._memory
        memory.took_s = 0.5
        await asyncio.sleep(100.0)

        assert 2 <= memory.reads <= 2 + 100 * MAX_SHARE / 0.5


@simulated
async def test_the_systems_pressure_is_told_as_soon_as_it_is_seen():
    async with world(budget=4 * 1024 * MIB) as it:
        await asyncio.sleep(10.0)
        it.system._memory.pressure = "critical"
        await asyncio.sleep(CALM_S + INTERVAL_S)

        assert it.system._governor.machine.gauge.pressure == "critical"


@simulated
async def test_what_does_not_move_is_not_told_again():
    async with world(budget=4 * 1024 * MIB) as it:
        for _ in range(20):
            say(it, "demo", footprint=300 * MIB)
            await asyncio.sleep(1.0)
        story = it.system._governor.history.story(1000)

        assert sum("Measured(" in line for line in story) <= 3, "before, while and after it loads"
