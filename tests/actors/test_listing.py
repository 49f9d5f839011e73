"""A reloaded configuration adds, changes and removes models, both loaded and unloaded ones."""

from __future__ import annotations

import pytest

from actors import mail
from actors.status import KnownModel
from protocol import messages
from protocol.kv import KVSpec
from protocol.policy import ModelPolicy
from tests.sim.loop import simulated, until
from tests.sim.world import World, world

DEMO = KnownModel("demo", listed=True)


def known(w: World, name: str = "demo") -> KnownModel | None:
    return w.system._statuses.known.get(name)


@simulated
async def test_a_new_model_is_known_without_being_loaded() -> None:
    async with world(load=()) as w:
        assert await w.system.add_configured_model("demo", DEMO, {})
        assert known(w) == DEMO
        assert w.system.status().unloaded == ["demo"]
        await w.system.remove_configured_model("demo")
        assert w.system.status().unloaded == []


@simulated
async def test_the_given_policy_fields_of_a_loaded_model_change() -> None:
    async with world(known={"demo": DEMO}) as w:
        await w.system.add_configured_model("demo", DEMO, {"pinned": True})
        await w.system.add_configured_model("demo", DEMO, {"priority": 3, "weight": 2.0})
        found = known(w)
        assert found is not None
        assert found.policy == ModelPolicy(pinned=True, priority=3, weight=2.0)
        assert w.system._governor.machine.devices[0].accounts["demo"].policy == found.policy
        assert w.system._registry.entries["demo"].known == found


@simulated
async def test_a_loaded_model_keeps_its_source_and_settings() -> None:
    async with world(known={"demo": DEMO}) as w:
        other = KnownModel("demo", KVSpec(4, 4), ModelPolicy(priority=1), listed=True)
        assert not await w.system.add_configured_model("demo", other, {"priority": 1})
        found = known(w)
        assert found is not None
        assert (found.kv, found.policy.priority) == (KVSpec(), 1)
        longer = KnownModel("demo", policy=ModelPolicy(max_context=64), listed=True)
        assert not await w.system.add_configured_model("demo", longer, {})
        shared = KnownModel("demo", policy=ModelPolicy(ranks=2), listed=True)
        assert not await w.system.add_configured_model("demo", shared, {})


@simulated
async def test_source_and_settings_change_while_the_model_is_not_loaded() -> None:
    async with world(load=(), known={"demo": DEMO}) as w:
        other = KnownModel("demo", KVSpec(4, 4), ModelPolicy(max_context=64, ranks=2), listed=True)
        assert await w.system.add_configured_model("demo", other, {})
        assert known(w) == other
        assert await w.system.add_configured_model("demo", DEMO, {})  # names no ranks
        assert known(w) == DEMO


@simulated
async def test_a_model_that_a_client_loaded_under_the_same_name_is_left_unchanged() -> None:
    async with world() as w:
        other = KnownModel("other", policy=ModelPolicy(pinned=True), listed=True)
        before = known(w)
        assert not await w.system.add_configured_model("demo", other, {"pinned": True})
        assert known(w) == before


@simulated
async def test_a_loaded_model_removed_from_the_configuration_stays_loaded_but_unlisted() -> None:
    async with world(known={"demo": DEMO}) as w:
        await w.system.remove_configured_model("demo")
        found = known(w)
        assert found is not None
        assert not found.listed
        assert w.state("demo") == "ready"


@simulated
@pytest.mark.parametrize("evicted", [False, True])
async def test_a_configured_model_stays_known_after_an_unload(evicted: bool) -> None:
    async with world(known={"demo": DEMO}) as w:
        client = w.client()
        if evicted:
            w.system._registry_ref.tell(mail.EvictModel("demo", requeue=True))
            await until(lambda: w.state("demo") is None, 60)
        await client.ask(messages.Unload, model="demo")
        assert w.system.status().unloaded == ["demo"]

        assert (await client.end(client.generate("demo"))).reason == "length"
        assert w.state("demo") == "ready"


@simulated
async def test_an_unload_of_another_source_restores_the_configured_one() -> None:
    async with world(load=(), known={"demo": DEMO}) as w:
        client = w.client()
        await client.ask(messages.Load, model="/other/thing", alias="demo")
        await client.ask(messages.Pin, model="demo")
        await client.ask(messages.Unload, model="demo")

        found = known(w)
        assert found is not None
        assert (found.source, found.listed, found.policy.pinned) == ("demo", True, True)


@simulated
async def test_a_model_that_left_the_configuration_is_unknown_after_its_unload() -> None:
    async with world(known={"demo": DEMO}) as w:
        await w.system.remove_configured_model("demo")
        await w.client().ask(messages.Unload, model="demo")
        assert known(w) is None


@simulated
async def test_a_budget_takes_effect_at_once() -> None:
    async with world() as w:
        await w.system.set_budget(123_456)
        assert w.system.status().budget_bytes == 123_456
