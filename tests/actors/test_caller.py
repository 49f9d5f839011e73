"""Completions of those inside the process: the same guarantees as on a socket, without bytes."""

from __future__ import annotations

import asyncio

from actors.known_models import KnownModel
from actors.saved_requests import SavedRequests
from protocol import messages
from protocol.messages import Event, Generate, is_last
from protocol.types import Sampling
from protocol.worker import CancelRow
from tests.actors.test_attach import Book
from tests.actors.test_system import expected
from tests.sim.fakes import Script
from tests.sim.loop import simulated, until
from tests.sim.world import World, world

SLOW = Script(token_s=1.0)


class Caller:
    """Asks once, and keeps what it is told."""

    def __init__(self, w: World, **fields) -> None:
        self.events: list[Event] = []
        request = Generate(id="mine", **{"model": "demo", "prompt": "hello"} | fields)
        self.call = w.system.generate(request, self.events.append)
        assert not self.events, "told before the call returned"

    @property
    def over(self) -> bool:
        return bool(self.events) and is_last(self.events[-1])

    async def end(self) -> Event:
        await until(lambda: self.over)
        return self.events[-1]

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.events if isinstance(e, messages.Tokens) for t in e.tokens]


@simulated
async def test_a_call_hears_what_a_client_would():
    async with world() as w:
        caller, client = Caller(w, max_tokens=5), w.client()
        done = await caller.end()
        same = client.generate(sampling={"seed": 7}, max_tokens=5)
        await client.end(same)

        def plain(events):
            return [{**messages.msgspec.structs.asdict(event), "id": ""} for event in events]

        assert caller.tokens == expected(5)
        assert done.id == "mine"
        assert plain(caller.events) == plain(client.events[same])


@simulated
async def test_a_cancelled_call_ends_in_the_worker_and_hears_nothing_more():
    async with world({"demo": [SLOW]}) as w:
        caller = Caller(w, max_tokens=100)
        await until(lambda: len(caller.tokens) >= 2)
        heard = len(caller.events)
        caller.call.cancel()
        caller.call.cancel()
        await asyncio.sleep(10)

        assert len(caller.events) == heard
        assert [c for c in w.spawn.last("demo").commands if isinstance(c, CancelRow)]
        assert w.model().requests == 0


@simulated
async def test_a_call_brings_a_model_that_is_known_and_no_other():
    async with world(load=(), known={"demo": KnownModel("demo")}) as w:
        caller, lost = Caller(w, max_tokens=3), Caller(w, model="nope")
        refused = await lost.end()

        assert isinstance(await caller.end(), messages.Done)
        assert refused.error.code == "unknown_model"


@simulated
async def test_the_end_is_told_when_the_daemon_is_stopped_by_force():
    async with world({"demo": [SLOW]}) as w:
        caller = Caller(w, max_tokens=100, sampling=Sampling(seed=1))
        await until(lambda: caller.tokens)
        await w.system.stop(force=True)
        assert (await caller.end()).error.code == "draining"


@simulated
async def test_who_fails_at_being_told_costs_itself_alone():
    async with world({"demo": [SLOW]}, faults=True) as w:

        def fails(_: Event) -> None:
            raise RuntimeError("a bug of the caller's")

        w.system.generate(Generate(id="bad", model="demo", prompt="x", max_tokens=50), fails)
        other = Caller(w, max_tokens=3)

        assert isinstance(await other.end(), messages.Done)
        await until(lambda: w.model().requests == 0)
        assert len(w.notices_of("actor_failed")) == 1


@simulated
async def test_nobody_comes_back_for_a_call_so_nothing_of_it_is_written_down():
    book = Book()
    async with world({"demo": [SLOW]}, archive=SavedRequests(book)) as w:
        caller, other = Caller(w, max_tokens=3), Caller(w, max_tokens=50)
        await until(lambda: other.tokens)
        other.call.cancel()
        await caller.end()
        assert caller.events[0].request == ""
        assert book.records == []
        client = w.client()
        await client.end(client.generate(max_tokens=1))
        assert book.records
