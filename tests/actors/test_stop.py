"""Drain, shutdown and forced stops of the whole system."""

from __future__ import annotations

import asyncio

import pytest

from actors.status import KnownModel
from protocol import errors, messages
from protocol.worker import Stop
from tests.sim.fakes import SLOW, Script
from tests.sim.loop import simulated, until
from tests.sim.world import world


@simulated
async def test_drain_finishes_running_requests_and_accepts_no_more():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        key = client.generate(max_tokens=5)
        await until(lambda: client.count(key) == 1)
        drain = client.start(messages.Drain)
        await until(lambda: w.system.status().state == "draining", 1)
        with pytest.raises(errors.Draining):
            await client.ask(messages.Generate, model="demo", prompt="x")
        with pytest.raises(errors.Draining):
            await client.ask(messages.Load, model="other")

        assert not client.events[drain]
        assert (await client.end(key)).reason == "length"
        await client.end(drain)
        assert isinstance(await client.ask(messages.Drain), messages.Drained)
        assert w.state() == "ready"


@simulated
async def test_shutdown_drains_stops_the_workers_and_replies():
    async with world({"demo": [SLOW]}, load=("demo", "other")) as w:
        client, idle = w.client(), w.client()
        key = client.generate(max_tokens=5)
        unload = idle.start(messages.Unload, model="demo")
        await until(lambda: client.count(key) == 1)
        bye = client.start(messages.Shutdown)
        await w.system.finished

        assert client.events[key][-1].reason == "length"
        assert isinstance(client.events[bye][-1], messages.ShutdownReply)
        assert isinstance(idle.events[unload][-1], messages.Unloaded)
        assert client.closed
        assert idle.closed
        assert any(isinstance(c, Stop) for c in w.spawn.last("other").commands)
        client.connection.receive(b"late\n")
        client.connection.closed()


@simulated
async def test_a_second_forced_stop_ends_the_drain_of_the_first():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        key = client.generate(max_tokens=10_000)
        await until(lambda: client.count(key) == 1)
        first = asyncio.ensure_future(w.system.stop())
        await asyncio.sleep(5)
        assert not first.done()
        await w.system.stop(force=True)
        await first

        error = client.events[key][-1].error
        assert (error.code, error.message) == ("draining", "the daemon stops")


@simulated
async def test_a_forced_stop_ends_waiting_requests_with_its_reason():
    async with world({"new": [Script(load_s=100)]}) as w:
        client = w.client()
        load = client.start(messages.Load, model="new")
        await until(lambda: w.state("new") == "loading", 10)
        waiting = client.generate("new")
        await until(lambda: w.model("new").requests == 1, 10)
        await w.system.stop(force=True)

        assert client.events[load][-1].error.message == "the daemon stops"
        assert "the daemon takes no new work" in client.events[waiting][-1].error.message


@pytest.mark.parametrize("passes", range(6))
@simulated
async def test_a_request_that_a_forced_stop_overtakes_may_be_sent_again(passes: int):
    """The stop arrives between the request and the load that it causes."""
    async with world(load=(), known={"demo": KnownModel("demo")}) as w:
        key = w.client().generate()
        for _ in range(passes):
            await asyncio.sleep(0)
        await w.system.stop(force=True)

        error = w.clients[0].events[key][-1].error
        assert error.code == "draining"
        assert "the daemon takes no new work" in error.message


@simulated
async def test_stop_in_the_middle_of_everything_leaves_nothing_behind():
    scripts = {
        "crashing": [Script(exit_at_load=1)],
        "loading": [Script(load_s=1e4)],
        "deaf": [Script(deaf=True)],
    }
    async with world(scripts, load=("demo",)) as w:
        client = w.client()
        loads = [client.start(messages.Load, model=name) for name in scripts]
        await asyncio.sleep(2.5)
        await w.system.stop()

        assert all(isinstance(client.events[key][-1], messages.Error) for key in loads[:2])
        assert w.system.status().models == []
