"""Loads, unloads and their memory, in the whole system on the simulated clock."""

from __future__ import annotations

import asyncio
import dataclasses

import msgspec
import pytest

from actors import mail
from actors.status import KnownModel
from protocol import errors, messages
from protocol.kv import KVSpec
from protocol.model_source import is_source
from protocol.policy import ModelPolicy
from protocol.worker import Grant, LoadModel
from tests.sim.fakes import SLOW, Script
from tests.sim.loop import simulated, until
from tests.sim.world import world


@simulated
async def test_a_load_continues_when_its_client_disconnects():
    async with world(load=()) as w:
        client = w.client()
        client.start(messages.Load, model="demo")
        await until(lambda: w.state() == "loading")
        client.disconnect()

        await until(lambda: w.state() == "ready", 10)


@simulated
async def test_a_load_reports_progress_and_the_loaded_model():
    async with world(load=()) as w:
        client = w.client()
        kv = {"k_bits": 4, "v_bits": 4, "floors": {"-1": "k8v8"}, "max_kv_size": 512, "schemes": []}
        key = client.start(messages.Load, model="org/Tiny-1B", kv=kv)
        loaded = await client.end(key)
        fractions = [e.fraction for e in client.events[key] if isinstance(e, messages.Loading)]

        assert fractions == [0.25, 0.5, 0.75, 1.0]
        assert (loaded.model.name, loaded.model.source) == ("Tiny-1B", "org/Tiny-1B")
        command = w.spawn.last("Tiny-1B").commands[0]
        assert isinstance(command, LoadModel)
        assert command.kv == KVSpec(4, 4, floors={-1: "k8v8"}, max_kv_size=512, schemes=())
        assert command.kv == loaded.model.kv


@simulated
async def test_loads_of_the_same_model_join():
    async with world(load=()) as w:
        first, second = w.client(), w.client()
        one = first.start(messages.Load, model="demo")
        await until(lambda: w.state() == "loading")
        two = second.start(messages.Load, model="demo")
        await first.end(one)
        await second.end(two)
        await first.ask(messages.Load, model="demo")

        assert len(w.spawn.processes["demo"]) == 1


CONFIGURED = KnownModel(
    "demo",
    KVSpec(4, 4),
    ModelPolicy(priority=3, idle_ttl_s=60, max_context=320, ranks=2, weight=2.0),
    listed=True,
)


@simulated
@pytest.mark.parametrize("loaded", [True, False])
async def test_a_load_changes_only_what_it_names(loaded):
    async with world(load=(), known={"demo": CONFIGURED}) as w:
        if loaded:
            await w.system.load_known("demo")
        await w.client().ask(messages.Load, model="demo", policy={"pinned": True})

        policy = msgspec.structs.replace(CONFIGURED.policy, pinned=True)
        assert w.system._statuses.known["demo"] == dataclasses.replace(CONFIGURED, policy=policy)
        assert w.system._governor.machine.devices[0].accounts["demo"].policy == policy
        load = next(it for it in w.spawn.last("demo").commands if isinstance(it, LoadModel))
        assert (load.kv, load.max_context, load.ranks) == (KVSpec(4, 4), 320, 2)


@simulated
async def test_a_load_removes_a_limit_only_with_null():
    async with world(load=(), known={"demo": CONFIGURED}) as w:
        await w.client().ask(messages.Load, model="demo", policy={"idle_ttl_s": None})
        expected = msgspec.structs.replace(CONFIGURED.policy, idle_ttl_s=None)
        assert w.system._statuses.known["demo"].policy == expected
        assert w.system._governor.machine.devices[0].accounts["demo"].policy == expected


@simulated
async def test_a_load_of_another_source_has_the_defaults_of_what_describes_a_model():
    async with world(load=(), known={"demo": CONFIGURED}) as w:
        await w.client().ask(messages.Load, model="/models/other", alias="demo")
        assert (w.model().source, w.model().kv) == ("/models/other", KVSpec())
        policy = msgspec.structs.replace(CONFIGURED.policy, max_context=None, ranks=1)
        assert w.system._governor.machine.devices[0].accounts["demo"].policy == policy


@simulated
async def test_another_model_under_the_same_name_is_refused():
    async with world() as w:
        client = w.client()
        with pytest.raises(errors.ModelExists):
            await client.ask(messages.Load, model="/models/demo")
        with pytest.raises(errors.ModelExists):
            await client.ask(messages.Load, model="demo", kv={"k_bits": 4, "v_bits": 4})
        with pytest.raises(errors.ModelExists, match="with k8v8 but different KV settings; unload"):
            await client.ask(messages.Load, model="demo", kv={"max_kv_size": 512})
        with pytest.raises(errors.ModelExists, match="but different ranks; unload"):
            await client.ask(messages.Load, model="demo", policy={"ranks": 2})
        with pytest.raises(errors.ModelExists, match="different max_context and ranks; unload"):
            await client.ask(messages.Load, model="demo", policy={"ranks": 2, "max_context": 9})
        await client.ask(messages.Load, model="/models/demo", alias="demo2")

        assert [m.name for m in w.system.status().models] == ["demo", "demo2"]


@simulated
@pytest.mark.parametrize("source", ["/models/a b", "/models/\x1b[31mred", "/models/--force/"])
async def test_a_folder_whose_name_cannot_be_a_models_name_needs_an_alias(source):
    async with world(load=()) as w:
        client = w.client()
        with pytest.raises(errors.InvalidRequest, match="load it under an alias") as refused:
            await client.ask(messages.Load, model=source)
        assert refused.value.detail["field"] == "alias"
        assert "\x1b" not in refused.value.message
        with pytest.raises(errors.InvalidRequest, match="alias may hold"):
            await w.system.load(source, alias="a\nb")

        loaded = await client.ask(messages.Load, model=source, alias="fine")
        assert (loaded.model.name, loaded.model.source) == ("fine", source)


@simulated
async def test_a_model_that_cannot_be_loaded_leaves_no_trace_and_can_be_tried_again():
    broken = Script(load_error=errors.InvalidModel("config.json is missing", file="x").info())
    async with world({"demo": [broken, Script()]}, load=()) as w:
        client = w.client()
        load = client.start(messages.Load, model="demo")
        await until(lambda: w.state() == "loading")
        waiting = client.generate()

        assert (await client.end(load)).error.code == "invalid_model"
        assert (await client.end(waiting)).error.code == "invalid_model"
        assert w.model() is None
        assert w.system.status().granted_bytes == 0
        await client.ask(messages.Load, model="demo")
        assert (await client.end(client.generate())).reason == "length"


@simulated
async def test_a_load_over_the_budget_is_refused():
    async with world({"big": [Script(weights=901)]}) as w:
        await w.client().ask(messages.Pin, model="demo")
        with pytest.raises(errors.InsufficientMemory) as refused:
            await w.system.load("big")

        assert refused.value.detail["available"] == 900
        assert w.system.status().granted_bytes == 100


@simulated
async def test_unload_finishes_the_requests_and_frees_the_memory():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        key = client.generate(max_tokens=5)
        await until(lambda: client.count(key) == 1)
        unload = client.start(messages.Unload, model="demo")
        await until(lambda: w.state() == "draining")
        late = await client.end(client.generate())
        with pytest.raises(errors.Draining):
            await client.ask(messages.Load, model="demo")

        assert late.error.code == "draining"
        assert (await client.end(key)).reason == "length"
        assert (await client.end(unload)).freed_bytes == 100
        assert w.model() is None
        await asyncio.sleep(0)
        assert w.system.status().granted_bytes == 0
        assert (await client.end(client.generate())).error.code == "unknown_model"


@simulated
@pytest.mark.parametrize("unloaded", [True, False])
async def test_requests_survive_a_worker_that_dies_while_draining_unless_it_is_unloaded(
    unloaded,
):
    async with world({"demo": [SLOW, SLOW]}) as w:
        client = w.client()
        key = client.generate(max_tokens=5)
        await until(lambda: client.count(key) == 1)
        if unloaded:
            client.start(messages.Unload, model="demo")
        else:
            w.system._registry_ref.tell(mail.EvictModel("demo", requeue=False))
        await until(lambda: w.state() == "draining")
        w.spawn.last("demo").die(-9)
        end = await client.end(key)

        if unloaded:
            assert end.error.code == "draining"
            assert w.model() is None
        else:
            assert (end.reason, w.state()) == ("length", "ready")


@simulated
async def test_a_forced_unload_ends_the_requests_at_once():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        key = client.generate(max_tokens=500)
        await until(lambda: client.count(key) == 1)
        await client.ask(messages.Unload, model="demo", force=True)
        error = (await client.end(key)).error

        assert (error.code, error.message) == ("draining", "demo was stopped to be unloaded")


@simulated
async def test_unload_while_loading_ends_the_load():
    async with world(load=()) as w:
        client = w.client()
        load = client.start(messages.Load, model="demo")
        await until(lambda: w.state() == "loading")
        waiting = client.generate()
        await client.ask(messages.Unload, model="demo")

        assert (await client.end(load)).error.code == "draining"
        assert (await client.end(waiting)).error.code == "draining"


@simulated
async def test_unload_at_once_after_load_kills_the_process_that_was_about_to_start():
    async with world(load=()) as w:
        client = w.client()
        load = client.start(messages.Load, model="demo")
        unload = client.start(messages.Unload, model="demo")

        assert (await client.end(load)).error.code == "draining"
        assert isinstance(await client.end(unload), messages.Unloaded)
        assert w.spawn.last("demo").signals == ["kill"]


@simulated
async def test_unload_of_an_unknown_model_is_refused():
    async with world() as w:
        with pytest.raises(errors.UnknownModel):
            await w.client().ask(messages.Unload, model="nope")


@simulated
async def test_unload_of_a_model_with_a_dead_process_frees_nothing():
    async with world() as w:
        w.spawn.last("demo").die(-9)
        await until(lambda: w.state() == "backoff", 1)

        assert (await w.client().ask(messages.Unload, model="demo")).freed_bytes == 0


@simulated
async def test_grants_over_the_budget_are_refused_until_memory_is_free():
    async with world(load=("demo", "other")) as w:
        demo, other = w.spawn.last("demo"), w.spawn.last("other")
        demo.request_memory(800)
        other.request_memory(300)
        await until(lambda: isinstance(other.commands[-1], Grant) and demo.grant == 800, 1)
        refused = other.commands[-1]
        assert (
            refused.granted,
            refused.total_bytes,
            refused.available_bytes,
            refused.budget_bytes,
        ) == (False, 100, 100, 1000)
        demo.request_memory(100)
        await until(lambda: other.grant == 300, 1)

        assert other.commands[-1].granted
        assert refused.seq == other.commands[-1].seq
        assert w.system.status().granted_bytes == 400


@simulated
async def test_memory_is_released_only_after_the_exit():
    async with world({"demo": [Script(deaf=True, kill_s=3, weights=600)]}) as w:
        client = w.client()
        unload = client.start(messages.Unload, model="demo", force=True)
        await until(lambda: w.spawn.last("demo").signals == ["term", "kill"], 20)

        assert w.system.status().granted_bytes == 600
        w.spawn.scripts["big"] = [Script(weights=600, load_s=0.1)]
        load = client.start(messages.Load, model="big")
        await until(lambda: w.state("big") == "loading", 2)
        assert w.system.status().granted_bytes == 600
        assert (await client.end(unload)).freed_bytes == 600
        assert (await client.end(load)).model.granted_bytes == 600


@simulated
async def test_the_prefix_cache_may_take_a_quarter_of_the_budget():
    async with world(load=("a",), budget=1000) as w:
        command = next(it for it in w.spawn.last("a").commands if isinstance(it, LoadModel))
        assert command.prefix_bytes == 250


@simulated
@pytest.mark.parametrize("alias", [None, "other"])
async def test_a_text_that_is_no_source_is_refused_before_a_process_starts(alias):
    async with world(load=()) as w:
        w.system._statuses.may_load = is_source
        with pytest.raises(errors.UnknownModel, match="there is no model 'dmo'; did you mean"):
            await w.client().ask(messages.Load, model="dmo", alias=alias)
        assert not w.spawn.attempts
        assert w.system.status().models == []


@simulated
async def test_a_model_of_the_models_folder_is_loaded_by_its_name():
    async with world(load=()) as w:
        w.system._statuses.find_model = {"mine": "/models/mine"}.get
        assert (await w.system.load_known("mine")).source == "/models/mine"
        loaded = await w.client().ask(messages.Load, model="mine", alias="second")
        assert (loaded.model.name, loaded.model.source) == ("second", "/models/mine")
        with pytest.raises(errors.UnknownModel, match="there is no model 'yours'"):
            await w.system.load_known("yours")
