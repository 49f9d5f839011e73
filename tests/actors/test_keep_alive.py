"""``keep_alive_s`` of requests: how long a model stays loaded without requests."""

from __future__ import annotations

import asyncio

import pytest

from protocol import messages
from protocol.policy import PolicyChange
from tests.sim.fakes import Script
from tests.sim.loop import simulated, until
from tests.sim.world import world


async def answered(w, **fields) -> None:
    client = w.client()
    assert (await client.end(client.generate(**fields))).reason == "length"


@simulated
async def test_a_request_sets_the_idle_limit_until_the_model_is_unloaded():
    async with world() as w:
        await answered(w, keep_alive_s=50.0)
        await asyncio.sleep(40)
        assert 0 < w.model().expires_in_s < 11
        await asyncio.sleep(12)
        assert w.model() is None

        await answered(w)  # loads it again, without the limit
        await asyncio.sleep(1000)
        assert w.model().expires_in_s is None


@simulated
async def test_the_newest_value_counts_and_a_request_without_one_changes_nothing():
    async with world() as w:
        await answered(w, keep_alive_s=10.0)
        await answered(w, keep_alive_s=500.0)
        await answered(w)
        await asyncio.sleep(490)
        assert w.model().state == "ready"
        await asyncio.sleep(20)
        assert w.model() is None


@simulated
async def test_0_unloads_an_idle_model_and_waits_for_running_requests():
    async with world({"demo": [Script(token_s=1)]}) as w:
        client = w.client()
        long = client.generate(max_tokens=30)
        await until(lambda: client.count(long) > 0, 10)
        await client.end(client.generate(max_tokens=1, keep_alive_s=0.0))
        assert (await client.end(long)).reason == "length"
        assert client.count(long) == 30
        await until(lambda: w.model() is None, 5)


@simulated
@pytest.mark.parametrize("seconds", [0.0, 20.0])
async def test_the_time_before_a_request_does_not_count(seconds: float):
    """The limit may arrive before the governor knows that the model is busy."""
    async with world() as w:
        await answered(w)
        await asyncio.sleep(100)
        await answered(w, keep_alive_s=seconds)
        assert w.state() == "ready"
        await asyncio.sleep(seconds - 1)
        assert w.state() == "ready"
        await until(lambda: w.model() is None, 5)


@simulated
async def test_a_limit_without_a_request_counts_from_now_on():
    async with world() as w:
        await answered(w)
        await asyncio.sleep(100)
        w.system.keep_loaded("demo", 20.0)
        await asyncio.sleep(19)
        assert w.state() == "ready"
        await until(lambda: w.model() is None, 5)


@simulated
async def test_a_negative_value_replaces_the_models_own_limit():
    async with world(load=()) as w:
        await w.system.load("demo", policy=PolicyChange(idle_ttl_s=60))
        await asyncio.sleep(50)
        assert 0 < w.model().expires_in_s < 12
        await answered(w, keep_alive_s=-1.0)
        await asyncio.sleep(500)
        assert w.model().expires_in_s is None


@simulated
async def test_pinning_keeps_the_limit_and_a_pinned_model_stays():
    async with world() as w:
        client = w.client()
        await answered(w, keep_alive_s=30.0)
        await client.ask(messages.Pin, model="demo")
        await asyncio.sleep(100)
        assert w.model().expires_in_s is None
        await client.ask(messages.Unpin, model="demo")
        await until(lambda: w.model() is None, 5)


@simulated
async def test_a_model_without_a_limit_is_still_evicted_for_another_one():
    big = Script(weights=600)
    async with world({"demo": [big], "big": [big]}) as w:
        await answered(w, keep_alive_s=-1.0)
        await asyncio.sleep(5)
        await w.client().ask(messages.Load, model="big")
        assert w.model() is None


@simulated
async def test_embeddings_set_it_too():
    async with world() as w:
        client = w.client()
        key = client.start(messages.Embed, model="demo", prompt="hello", keep_alive_s=5.0)
        await client.end(key)
        await until(lambda: w.model() is None, 10)


@simulated
async def test_a_text_that_arrives_while_0_unloads_the_model_loads_it_again():
    async with world({"demo": [Script(kill_s=2.0)]}) as w:
        await answered(w, keep_alive_s=0.0)
        await until(lambda: w.state() not in ("ready", None), 5)
        client = w.client()
        texts = [client.start(messages.Tokenize, model="demo", prompt="Hi!") for _ in range(2)]
        assert [(await client.end(text)).count for text in texts] == [3, 3]
        assert w.state() == "ready"


@simulated
async def test_an_unload_by_a_client_refuses_texts_that_waited_for_the_reload():
    async with world({"demo": [Script(kill_s=2.0)]}) as w:
        await answered(w, keep_alive_s=0.0)
        await until(lambda: w.state() not in ("ready", None), 5)
        client = w.client()
        text = client.start(messages.Tokenize, model="demo", prompt="Hi!")
        await client.ask(messages.Unload, model="demo")
        assert (await client.end(text)).error.code == "draining"
        assert w.model() is None
