"""Texts that wait to be tokenized: a limit for all clients together; dropped with their client."""

from __future__ import annotations

import asyncio

import pytest

from actors import mail
from actors.status import KnownModel
from protocol import messages
from protocol.errors import InvalidModel, Overloaded, UnknownModel
from protocol.messages import Tokenize
from protocol.tools import ChatOptions, Tool
from protocol.types import ChatMessage
from tests.sim.fakes import Script
from tests.sim.loop import simulated, until
from tests.sim.world import World, world

SLOW = {"demo": [Script(load_s=20.0)]}
DEMO = {"demo": KnownModel("demo", listed=True)}


def bounded(w: World, max_bytes: int = 4000) -> World:
    w.system._client_services.tokenizing.max_bytes = max_bytes
    return w


def held(w: World) -> int:
    return w.system._client_services.tokenizing.bytes


@simulated
async def test_a_loaded_model_answers_at_once() -> None:
    async with world() as w:
        client = bounded(w).client()
        assert (await client.ask(messages.Tokenize, model="demo", prompt="Hi!")).count == 3
        assert held(w) == 0


@simulated
async def test_waiting_texts_are_bounded_for_all_clients_together() -> None:
    async with world(SLOW, load=(), known=DEMO) as w:
        one, other = bounded(w).client(), w.client()
        waiting = [one.start(messages.Tokenize, model="demo", prompt="x" * 1000) for _ in range(3)]
        over = other.start(messages.Tokenize, model="demo", prompt="x" * 1000)
        fits = other.start(messages.Tokenize, model="demo", prompt="x")

        refused = await other.end(over)
        assert isinstance(refused, messages.Error)
        assert refused.error.code == Overloaded.code
        assert refused.error.detail["retry_after_s"] == 1.0
        assert 3000 < held(w) <= 4000

        for client, key, count in [*((one, key, 1000) for key in waiting), (other, fits, 1)]:
            reply = await client.end(key)
            assert isinstance(reply, messages.Tokenized)
            assert reply.count == count
        assert held(w) == 0
        assert (await other.ask(messages.Tokenize, model="demo", prompt="x" * 1000)).count == 1000


@simulated
async def test_one_text_of_any_size_may_wait() -> None:
    async with world() as w:
        client = bounded(w, 10).client()
        assert (await client.ask(messages.Tokenize, model="demo", prompt="x" * 100)).count == 100


@simulated
async def test_texts_of_a_disconnected_client_are_dropped() -> None:
    async with world(SLOW, load=(), known=DEMO) as w:
        leaves, stays = bounded(w).client(), w.client()
        for _ in range(3):
            leaves.start(messages.Tokenize, model="demo", prompt="x" * 1000)
        kept = stays.start(messages.Tokenize, model="demo", prompt="x" * 10)
        await until(lambda: held(w) > 3000)
        leaves.disconnect()
        await until(lambda: held(w) < 100)
        (entry,) = w.system._registry.entries.values()
        assert len(entry.texts) == 1
        assert isinstance(await stays.end(kept), messages.Tokenized)


@simulated
async def test_a_text_counts_until_the_process_answers_or_dies() -> None:
    """Otherwise a client could exceed the limit by disconnecting and connecting again."""
    async with world() as w:
        client = bounded(w).client()
        w.spawn.last("demo").suspend()
        client.start(messages.Tokenize, model="demo", prompt="x" * 1000)
        await until(lambda: held(w) > 1000)
        client.disconnect()
        await asyncio.sleep(1.0)
        assert held(w) > 1000
        w.spawn.last("demo").die(-9)
        await until(lambda: held(w) == 0)


@simulated
async def test_settings_of_the_conversation_reach_the_worker() -> None:
    chat = ChatOptions(tools=[Tool("look_up")])
    async with world() as w:
        client = w.client()
        reply = await client.ask(
            messages.Tokenize, model="demo", messages=[ChatMessage("user", "Hi!")], chat=chat
        )
        assert reply.count == len("look_up")


@simulated
async def test_a_text_from_inside_the_process() -> None:
    async with world(SLOW, load=(), known=DEMO) as w:
        bounded(w)
        assert (await w.system.tokenize(Tokenize(id="a", model="demo", prompt="Hi!"))).count == 3
        with pytest.raises(UnknownModel):
            await w.system.tokenize(Tokenize(id="a", model="nope", prompt="Hi!"))
        assert held(w) == 0


@simulated
async def test_a_text_whose_caller_is_cancelled_counts_until_the_process_answers() -> None:
    async with world() as w:
        bounded(w)
        w.spawn.last("demo").suspend()
        request = Tokenize(id="a", model="demo", prompt="x" * 1000)
        caller = asyncio.ensure_future(w.system.tokenize(request))
        await until(lambda: held(w) > 1000)
        caller.cancel()
        await asyncio.sleep(1.0)
        assert held(w) > 1000
        w.spawn.last("demo").die(-9)
        await until(lambda: held(w) == 0)


@simulated
@pytest.mark.parametrize("requeue", [True, False])
async def test_texts_that_wait_for_a_load_that_is_evicted_wait_for_the_next_one(
    requeue: bool,
) -> None:
    async with world(SLOW, load=(), known=DEMO) as w:
        client = bounded(w).client()
        text = client.start(messages.Tokenize, model="demo", prompt="Hi!")
        request = client.generate()
        await until(lambda: w.state() == "loading")
        w.system._registry_ref.tell(mail.EvictModel("demo", requeue))

        assert isinstance(reply := await client.end(text), messages.Tokenized)
        assert (reply.count, w.spawn.attempts["demo"]) == (3, 2)
        assert isinstance(await client.end(request), messages.Done)
        assert held(w) == 0


@simulated
async def test_texts_during_a_refused_load_get_the_known_model() -> None:
    broken = Script(load_error=InvalidModel("config.json is missing").info())
    scripts = {"demo": [broken, Script()]}
    async with world(scripts, load=(), known={"demo": KnownModel("/a/demo")}) as w:
        client = bounded(w).client()
        load = client.start(messages.Load, model="/other/demo")
        await until(lambda: w.state() == "loading")
        text = client.start(messages.Tokenize, model="demo", prompt="Hi!")
        assert isinstance(refused := await client.end(load), messages.Error)
        assert refused.error.code == "invalid_model"

        assert isinstance(reply := await client.end(text), messages.Tokenized)
        assert reply.count == 3
        model = w.model("demo")
        assert model is not None
        assert model.source == "/a/demo"


@simulated
@pytest.mark.parametrize(
    ("script", "code"),
    [
        (Script(exit_at_load=1), "model_failed"),
        (Script(load_error=InvalidModel("broken").info()), "invalid_model"),
    ],
)
async def test_texts_that_wait_for_a_load_that_fails_get_its_error(
    script: Script, code: str
) -> None:
    async with world({"demo": [script] * 3}, load=(), known=DEMO) as w:
        client = bounded(w).client()
        text = client.start(messages.Tokenize, model="demo", prompt="Hi!")
        assert isinstance(refused := await client.end(text), messages.Error)
        assert (refused.error.code, held(w)) == (code, 0)
