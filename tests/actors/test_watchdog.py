"""Workers that report nothing, in the whole system on the simulated clock."""

from __future__ import annotations

import asyncio

import pytest

from actors.machines.watchdog import WatchdogTimeouts
from protocol import messages
from tests.sim.fakes import Script
from tests.sim.loop import simulated
from tests.sim.world import world

PATIENCE = WatchdogTimeouts()


@simulated
async def test_a_hung_worker_is_terminated_then_killed_and_its_streams_continue():
    hung = Script(hang_at="token", token_s=1.0)
    async with world({"demo": [hung, Script()]}) as w:
        loop = asyncio.get_running_loop()
        client = w.client()
        key = client.generate(max_tokens=50)
        start = loop.time()
        assert (await client.end(key)).reason == "length"
        waited = loop.time() - start

        assert client.count(key) == 50
        assert w.spawn.processes["demo"][0].signals == ["term", "kill"]
        assert PATIENCE.idle_s < waited < PATIENCE.idle_s + PATIENCE.terminated_s + 5
        assert (await client.end(client.generate())).reason == "length"


@simulated
async def test_an_idle_worker_may_be_silent():
    async with world() as w:
        await asyncio.sleep(10_000)

        assert (w.state(), w.model().restarts) == ("ready", 0)


@pytest.mark.parametrize(("where", "patience"), [("start", 60.0), ("load", 600.0)])
def test_a_worker_that_hangs_before_it_is_ready_is_replaced(where: str, patience: float):
    @simulated
    async def scene():
        async with world({"demo": [Script(hang_at=where), Script()]}, load=()) as w:
            start = asyncio.get_running_loop().time()
            await w.system.load("demo")
            assert patience < asyncio.get_running_loop().time() - start < patience + 20

    scene()


@simulated
async def test_a_long_load_that_reports_progress_is_left_alone():
    async with world({"demo": [Script(load_s=2000)]}) as w:
        assert (w.state(), w.model().restarts) == ("ready", 0)


@simulated
async def test_a_worker_that_ignores_commands_is_killed_at_unload():
    async with world({"demo": [Script(deaf=True, kill_s=7)]}) as w:
        await w.client().ask(messages.Unload, model="demo")

        assert w.spawn.last("demo").signals[:3] == ["term", "kill", "kill"]
