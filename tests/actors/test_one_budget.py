"""The governor in the system: evictions, waiting requests, held requests and recorded events."""

from __future__ import annotations

import asyncio

import pytest

from actors.status import KnownModel
from protocol import errors, messages
from protocol.policy import PolicyChange
from protocol.types import Reclaimable, WorkerStats
from protocol.worker import MemoryRequested, Reclaim, Reclaimed, Stats
from tests.sim.fakes import Script
from tests.sim.loop import simulated, until
from tests.sim.world import world

BIG = Script(weights=600)


def recorded(w, kind: str) -> list[messages.EventRecord]:
    return [it for it in w.system.events.records if it.kind == kind]


@simulated
async def test_a_load_over_the_budget_evicts_the_idle_model_and_a_request_reloads_it():
    async with world({"demo": [BIG], "big": [BIG]}) as w:
        client = w.client()
        await asyncio.sleep(5)
        await client.ask(messages.Load, model="big")

        assert w.model() is None
        assert w.system.status().unloaded == ["demo"]
        (evicted,) = recorded(w, "evict")
        assert (evicted.model, evicted.requester) == ("demo", "big")
        assert evicted.numbers["freed_bytes"] == 600
        assert (await client.end(client.generate())).reason == "length"
        assert w.model("big") is None


@simulated
async def test_two_loads_of_a_model_being_evicted_wait_for_its_end():
    async with world({"demo": [Script(weights=600, kill_s=2)], "big": [BIG]}) as w:
        first, second = w.client(), w.client()
        await asyncio.sleep(5)
        big = first.start(messages.Load, model="big")
        await until(lambda: w.state() == "stopping", 10)
        keys = [(it, it.start(messages.Load, model="demo")) for it in (first, second)]

        assert (await first.end(big)).model.state == "ready"
        for client, key in keys:
            assert (await client.end(key)).model.state == "ready"
        assert w.spawn.attempts["demo"] == 2


@simulated
async def test_a_model_in_use_is_not_evicted_and_the_refusal_names_the_holders():
    async with world({"demo": [Script(weights=600, token_s=1)], "big": [BIG]}) as w:
        client = w.client()
        key = client.generate(max_tokens=200)
        await until(lambda: client.count(key) == 1)
        with pytest.raises(errors.InsufficientMemory):
            await client.ask(messages.Load, model="big")
        (refused,) = recorded(w, "load_refused")

        assert "demo (in use) holds" in refused.reason
        assert refused.numbers["wanted_bytes"] == 600
        await client.ask(messages.Cancel, target=key)


async def busy(w, name: str) -> None:
    """Report a running request, as the real worker does."""
    w.spawn.last(name).report(
        Stats(stats=WorkerStats(step=1, reclaimable=Reclaimable(rows=1, base=600)))
    )
    await until(lambda: w.system._governor.machine.devices[0].accounts[name].idle_since is None, 1)


@simulated
async def test_a_request_for_a_known_model_waits_while_its_load_waits_for_memory():
    known = {"big": KnownModel("big", listed=True)}
    scripts = {"demo": [Script(weights=600)], "big": [BIG]}
    async with world(scripts, known=known) as w:
        await busy(w, "demo")
        client = w.client()
        key = client.generate("big")
        await asyncio.sleep(2000)  # far longer than the watchdog allows a silent load

        assert w.model("big").state == "loading"
        assert w.notices_of("worker_terminated") == []
        w.spawn.last("demo").report(
            Stats(stats=WorkerStats(step=2, reclaimable=Reclaimable(base=600)))
        )
        assert (await client.end(key)).reason == "length"


@simulated
@pytest.mark.parametrize(
    "known", [{"big": KnownModel("big", listed=True)}, {"big": KnownModel("big")}, {}]
)
async def test_a_refused_load_ends_no_request_for_a_model_that_was_known(known):
    scripts = {"demo": [Script(weights=600)], "big": [BIG, BIG]}
    async with world(scripts, known=known) as w:
        await busy(w, "demo")
        client = w.client()
        load = client.start(messages.Load, model="big")
        await until(lambda: w.model("big") is not None, 5)
        key = client.generate("big")
        refused = await client.end(load)
        assert refused.error.code == "insufficient_memory"
        await asyncio.sleep(10)

        if known:
            assert not [it for it in client.events[key] if messages.is_last(it)]
            w.spawn.last("demo").report(
                Stats(stats=WorkerStats(step=2, reclaimable=Reclaimable(base=600)))
            )
            assert (await client.end(key)).reason == "length"
        else:
            assert (await client.end(key)).error.code == "insufficient_memory"
            assert w.model("big") is None


@simulated
async def test_new_requests_are_held_for_a_waiting_load_and_answered_after_it():
    known = {"big": KnownModel("big")}
    async with world({"demo": [Script(weights=600)], "big": [BIG]}, known=known) as w:
        await busy(w, "demo")
        client = w.client()
        big = client.generate("big")
        await until(lambda: recorded(w, "hold"), 60)
        demo = client.generate()
        await asyncio.sleep(3)

        assert not client.count(demo)
        w.spawn.last("demo").report(
            Stats(stats=WorkerStats(step=2, reclaimable=Reclaimable(base=600)))
        )
        assert (await client.end(big)).reason == "length"
        assert (await client.end(demo)).reason == "length"
        assert recorded(w, "let_go")


@simulated
async def test_queued_requests_return_when_two_models_wait_for_each_other():
    stalled, goes_on = Script(weights=500, token_s=9999), Script(weights=500)
    scripts = {"demo": [stalled, goes_on], "big": [stalled]}
    async with world(scripts, load=("demo", "big")) as w:
        client = w.client()
        await asyncio.sleep(5)
        _, key = (client.generate(name, max_tokens=40) for name in ("big", "demo"))
        await until(lambda: client.events[key])
        for seq, name in enumerate(("big", "demo"), 9):
            request = MemoryRequested(
                seq=seq, total_bytes=800, reason="", reclaimable=Reclaimable(waiting=1)
            )
            w.spawn.last(name).report(request)
            await asyncio.sleep(1)
        await until(lambda: recorded(w, "requeue"), 100)

        assert recorded(w, "requeue")[0].model == "demo"
        w.spawn.last("big").report(MemoryRequested(seq=20, total_bytes=500, reason=""))
        assert (await client.end(key)).reason == "length"
        assert len(client.tokens(key)) == 40


@simulated
async def test_reclaims_reach_the_worker_and_their_results_the_governor():
    async with world({"demo": [Script(weights=400)]}, load=("demo", "other")) as w:
        demo, other = w.spawn.last("demo"), w.spawn.last("other")
        demo.request_memory(800)
        demo.report(
            Stats(stats=WorkerStats(reclaimable=Reclaimable(rows=2, levels=(300,), base=100)))
        )
        await asyncio.sleep(1)
        reclaimable = Reclaimable(rows=1, waiting=1, base=100)
        other.report(MemoryRequested(seq=9, total_bytes=400, reason="", reclaimable=reclaimable))
        await until(lambda: any(isinstance(it, Reclaim) for it in demo.commands), 5)
        order = next(it for it in demo.commands if isinstance(it, Reclaim))

        assert (order.method, order.level) == ("precision", 1)
        demo.request_memory(500)
        demo.report(Reclaimed(seq=order.seq, freed_bytes=300, exhausted=True))
        await until(lambda: other.grant == 400, 5)
        assert w.system.status().granted_bytes == 900
        assert recorded(w, "reclaim_precision")[0].requester == "other"


@simulated
async def test_an_idle_model_is_unloaded_after_its_ttl_unless_pinned():
    async with world(load=()) as w:
        for name, pinned in (("demo", False), ("other", True)):
            policy = PolicyChange(idle_ttl_s=60, pinned=pinned)
            await w.system.load(name, policy=policy)
        await until(lambda: w.model() is None, 100)

        assert w.model("other").pinned
        client = w.client()
        await client.ask(messages.Unpin, model="other")
        await until(lambda: w.model("other") is None, 100)
        assert (await client.end(client.generate("other"))).reason == "length"


@simulated
async def test_an_unloaded_model_is_unknown_even_if_it_was_evicted_before():
    async with world({"demo": [BIG], "big": [BIG]}) as w:
        client = w.client()
        await asyncio.sleep(5)
        await client.ask(messages.Load, model="big")
        assert (await client.ask(messages.Unload, model="demo")).freed_bytes == 0

        assert (await client.end(client.generate())).error.code == "unknown_model"
        with pytest.raises(errors.UnknownModel):
            await client.ask(messages.Pin, model="demo")


@simulated
async def test_the_budget_changes_at_run_time_and_excess_grants_are_reclaimed():
    async with world({"demo": [BIG]}, load=("demo", "other")) as w:
        client = w.client()
        await client.ask(messages.Pin, model="other")
        await asyncio.sleep(5)
        answer = await client.ask(messages.Configure, budget_bytes=300)

        assert (answer.budget_bytes, answer.granted_bytes) == (300, 700)
        await until(lambda: w.system.status().granted_bytes == 100, 10)
        assert w.system.status().budget_bytes == 300
        answer = await client.ask(messages.Configure)
        assert (answer.budget_bytes, answer.granted_bytes) == (300, 100)
        assert recorded(w, "budget")[0].numbers["before_bytes"] == 1000


@simulated
async def test_events_are_listed_followed_and_cancelled():
    async with world({"demo": [BIG], "big": [BIG]}, load=("demo", "other")) as w:
        client = w.client()
        follow = client.start(messages.Events, follow=True, model="demo")
        await asyncio.sleep(5)
        await client.ask(messages.Load, model="big")
        await client.ask(messages.Configure, budget_bytes=2000)
        over = await client.ask(messages.Events)

        answer = [it for it in client.events[follow] if isinstance(it, messages.EventRecord)]
        assert {it.kind for it in answer} == {"evict", "budget"}
        assert over.last == answer[-1].seq
        assert (await client.ask(messages.Cancel, target=follow)).found
        assert isinstance(await client.end(follow), messages.EventsReply)
        later = client.start(messages.Events, since=answer[0].seq)
        await client.end(later)
        assert [it.seq for it in client.events[later][:-1]] == list(
            range(answer[0].seq + 1, over.last + 1)
        )


@simulated
async def test_a_disconnected_follower_is_removed():
    async with world() as w:
        client = w.client()
        client.start(messages.Events, follow=True)
        await asyncio.sleep(0.1)
        client.disconnect()
        await asyncio.sleep(0.1)

        assert not w.system.events.followers


@simulated
async def test_a_violation_is_counted_and_recorded_as_an_error():
    async with world() as w:
        w.system._governor.machine.devices[0].ledger.grants["demo"] = 5000
        await w.client().ask(messages.Configure, budget_bytes=1001)
        w.system._governor.machine.devices[0].ledger.ceiling_bytes = 0
        w.spawn.last("demo").report(Reclaimed(seq=1, freed_bytes=0, exhausted=True))
        await until(lambda: recorded(w, "violation"), 5)

        assert w.system.status().violations >= 1
        assert w.notices_of("governor_violation")[0].level == "error"
        w.system._governor.machine.devices[0].ledger.grants["demo"] = 100
        w.system._governor.violations = 0
        w.system._governor.history = type(w.system._governor.history)(w.system._governor.machine)


@simulated
async def test_drain_ends_requests_that_wait_for_an_evicted_model():
    async with world({"demo": [Script(weights=600, kill_s=5)], "big": [BIG]}) as w:
        client = w.client()
        await asyncio.sleep(5)
        load = client.start(messages.Load, model="big")
        await until(lambda: w.state() == "stopping", 10)
        key = client.generate()
        await w.system.stop()

        assert isinstance(await client.end(load), messages.Error | messages.Loaded)
        assert await client.end(key)
