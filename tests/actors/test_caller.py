"""Calls from inside the process have the same guarantees as requests on a socket."""

from __future__ import annotations

import asyncio

from msgspec.structs import asdict

from actors.saved_requests import SavedRequests
from actors.status import KnownModel
from protocol import messages
from protocol.messages import Event, Generate, is_last
from protocol.types import Sampling
from protocol.worker import CancelRow
from tests.actors.test_attach import MemoryJournal
from tests.sim.fakes import SLOW, expected
from tests.sim.loop import simulated, until
from tests.sim.world import World, world


class Caller:
    """Makes one call and keeps its events."""

    def __init__(self, w: World, **fields) -> None:
        self.events: list[Event] = []
        request = Generate(id="mine", **{"model": "demo", "prompt": "hello"} | fields)
        self.call = w.system.generate(request, self.events.append)
        assert not self.events, "delivered before the call returned"

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
async def test_a_call_gets_the_same_events_as_a_client():
    async with world() as w:
        caller, client = Caller(w, max_tokens=5), w.client()
        done = await caller.end()
        same = client.generate(sampling={"seed": 7}, max_tokens=5)
        await client.end(same)

        def plain(events):
            return [{**asdict(event), "id": ""} for event in events]

        assert caller.tokens == expected(5)
        assert done.id == "mine"
        assert plain(caller.events) == plain(client.events[same])


@simulated
async def test_a_cancelled_call_ends_in_the_worker_and_gets_no_more_events():
    async with world({"demo": [SLOW]}) as w:
        caller = Caller(w, max_tokens=100)
        await until(lambda: len(caller.tokens) >= 2)
        delivered = len(caller.events)
        caller.call.cancel()
        caller.call.cancel()
        await asyncio.sleep(10)

        assert len(caller.events) == delivered
        assert [c for c in w.spawn.last("demo").commands if isinstance(c, CancelRow)]
        assert w.model().requests == 0


@simulated
async def test_a_call_loads_a_known_model_only():
    async with world(load=(), known={"demo": KnownModel("demo")}) as w:
        caller, lost = Caller(w, max_tokens=3), Caller(w, model="nope")
        refused = await lost.end()

        assert isinstance(await caller.end(), messages.Done)
        assert refused.error.code == "unknown_model"


@simulated
async def test_a_forced_stop_delivers_the_last_event():
    async with world({"demo": [SLOW]}) as w:
        caller = Caller(w, max_tokens=100, sampling=Sampling(seed=1))
        await until(lambda: caller.tokens)
        await w.system.stop(force=True)
        assert (await caller.end()).error.code == "draining"


@simulated
async def test_a_callback_that_raises_ends_its_own_call_only():
    async with world({"demo": [SLOW]}, faults=True) as w:

        def fails(_: Event) -> None:
            raise RuntimeError("a bug of the caller's")

        w.system.generate(Generate(id="bad", model="demo", prompt="x", max_tokens=50), fails)
        other = Caller(w, max_tokens=3)

        assert isinstance(await other.end(), messages.Done)
        await until(lambda: w.model().requests == 0)
        assert len(w.notices_of("actor_failed")) == 1


@simulated
async def test_calls_are_not_journaled():
    journal = MemoryJournal()
    async with world({"demo": [SLOW]}, saved_requests=SavedRequests(journal)) as w:
        caller, other = Caller(w, max_tokens=3), Caller(w, max_tokens=50)
        await until(lambda: other.tokens)
        other.call.cancel()
        await caller.end()
        assert caller.events[0].request == ""
        assert journal.records == []
        client = w.client()
        await client.end(client.generate(max_tokens=1))
        assert journal.records
