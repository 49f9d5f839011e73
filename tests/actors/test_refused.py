"""A refused load changes nothing. Changes that other messages make meanwhile are kept."""

from __future__ import annotations

import asyncio

import pytest

from actors import mail
from actors.status import KnownModel
from protocol import errors, messages
from protocol.policy import PolicyChange
from protocol.types import Reclaimable, WorkerStats
from protocol.worker import Stats
from tests.sim.fakes import Script
from tests.sim.loop import simulated, until
from tests.sim.world import SimClient, World, world

BIG = Script(weights=600)
BROKEN = Script(load_error=errors.InvalidModel("config.json is missing", file="x").info())
CROWDED = {"demo": [BIG], "big": [BIG]}
"""Two models, of which only one fits into the budget."""


def known(source: str = "big", *, listed: bool = True) -> dict[str, KnownModel]:
    return {"big": KnownModel(source, listed=listed)}


async def busy(w: World) -> None:
    """Report that `demo`, the other model, runs a request, as a real worker does."""
    w.spawn.last("demo").report(
        Stats(stats=WorkerStats(step=1, reclaimable=Reclaimable(rows=1, base=600)))
    )
    await until(
        lambda: w.system._governor.machine.devices[0].accounts["demo"].idle_since is None, 1
    )


def idle(w: World) -> None:
    w.spawn.last("demo").report(Stats(stats=WorkerStats(step=2, reclaimable=Reclaimable(base=600))))


async def start_load(w: World, client: SimClient, source: str = "big", **fields: object) -> str:
    key = client.start(messages.Load, model=source, alias="big", **fields)
    await until(lambda: w.state("big") == "loading", 5)
    return key


async def cross(w: World, message: object) -> object:
    """Send a message to the registry in the same pass of the event loop as the process's exit."""
    loop, process = asyncio.get_running_loop(), w.spawn.last("big")
    gone = process._on_exit
    crossed: asyncio.Future[asyncio.Task[object]] = loop.create_future()

    def on_exit(end) -> None:
        crossed.set_result(loop.create_task(w.system._registry_ref.ask(message)))
        loop.call_soon(gone, end)  # in the same pass, so that neither actor runs in between

    process._on_exit = on_exit
    return await (await crossed)


@simulated
@pytest.mark.parametrize("listed", [True, False])
async def test_a_refused_load_restores_the_known_model_of_that_name(listed):
    scripts = {"big": [BROKEN, Script()]}
    async with world(scripts, known=known("/a/big", listed=listed)) as w:
        client = w.client()
        load = await start_load(w, client, "/other/thing")
        assert (await client.end(load)).error.code == "invalid_model"

        assert (await client.end(client.generate("big"))).reason == "length"
        assert w.model("big").source == "/a/big"


@simulated
async def test_requests_during_a_refused_load_get_the_known_model():
    async with world({"big": [BROKEN, Script()]}, known=known("/a/big")) as w:
        client = w.client()
        load = await start_load(w, client, "/other/thing")
        key = client.generate("big")
        assert (await client.end(load)).error.code == "invalid_model"

        assert (await client.end(key)).reason == "length"
        assert w.model("big").source == "/a/big"


@simulated
async def test_requests_wait_although_the_load_of_a_model_that_was_given_up_is_refused():
    crashing = [Script(exit_at_load=1)] * 3
    async with world({"demo": [BIG], "big": [*crashing, BIG]}, known=known()) as w:
        client = w.client()
        first = client.generate("big")
        assert (await client.end(first, 60)).error.code == "model_failed"
        await busy(w)
        load = client.start(messages.Load, model="big", alias="big")
        await until(lambda: w.state("big") == "loading", 5)
        waiting = client.generate("big")
        assert (await client.end(load)).error.code == "insufficient_memory"
        idle(w)

        assert (await client.end(waiting, 60)).reason == "length"


@simulated
async def test_requests_for_a_broken_model_fail_with_its_error():
    async with world({"big": [BROKEN]}, known=known()) as w:
        client = w.client()
        load = await start_load(w, client)
        key = client.generate("big")
        assert (await client.end(load)).error.code == "invalid_model"

        assert (await client.end(key, 60)).error.code == "invalid_model"
        assert w.spawn.attempts["big"] == 2


@simulated
async def test_a_pin_during_a_refused_load_is_kept_and_the_policy_of_the_load_is_not():
    async with world(CROWDED, known=known()) as w:
        await busy(w)
        client = w.client()
        load = await start_load(w, client, policy=PolicyChange(priority=3))
        await client.ask(messages.Pin, model="big")
        assert (await client.end(load)).error.code == "insufficient_memory"
        idle(w)

        assert (await client.end(client.generate("big"))).reason == "length"
        assert (w.model("big").pinned, w.model("big").priority) == (True, 0)


@simulated
async def test_the_policy_of_a_joining_load_is_kept_when_both_are_refused():
    async with world(CROWDED, known=known()) as w:
        await busy(w)
        one, two = w.client(), w.client()
        load = await start_load(w, one)
        joined = await start_load(w, two, policy=PolicyChange(priority=3))
        for client, key in ((one, load), (two, joined)):
            assert (await client.end(key)).error.code == "insufficient_memory"
        idle(w)

        assert (await one.end(one.generate("big"))).reason == "length"
        assert w.model("big").priority == 3


@simulated
async def test_an_unload_that_crosses_a_refusal_takes_effect():
    async with world(CROWDED, known=known(listed=False)) as w:
        await busy(w)
        client = w.client()
        load = await start_load(w, client)

        assert await cross(w, mail.UnloadModel("big", force=False)) == 0
        assert (await client.end(load)).error.code == "draining"
        assert w.model("big") is None
        with pytest.raises(errors.UnknownModel):
            await client.ask(messages.Pin, model="big")


@simulated
async def test_an_eviction_that_crosses_a_refusal_makes_no_model_known():
    async with world({"big": [BROKEN]}) as w:
        client = w.client()
        load = await start_load(w, client)
        await cross(w, mail.EvictModel("big", requeue=False))

        assert (await client.end(load)).error.code == "insufficient_memory"
        assert (await client.end(client.generate("big"))).error.code == "unknown_model"
        assert w.spawn.attempts["big"] == 1


@simulated
async def test_a_known_model_stays_known_after_a_failed_load_on_demand():
    """The model is not in the configuration: it is known from an earlier load."""
    scripts = {"big": [BROKEN, Script()]}
    async with world(scripts, known=known("/a/big", listed=False)) as w:
        client = w.client()
        first = await client.end(client.generate("big"))
        assert first.error.code == "invalid_model"

        assert (await client.end(client.generate("big"))).reason == "length"


@simulated
async def test_the_policy_of_a_load_during_an_eviction_is_kept_after_the_reload():
    async with world({"big": [Script(), Script()]}) as w:
        client = w.client()
        await client.end(await start_load(w, client))
        first = w.spawn.last("big")
        w.system._registry_ref.tell(mail.EvictModel("big", requeue=True))
        load = client.start(
            messages.Load, model="big", alias="big", policy=PolicyChange(priority=7, pinned=True)
        )
        await client.end(load)

        assert (w.model("big").priority, w.model("big").pinned) == (7, True)
        assert w.spawn.last("big") is not first
