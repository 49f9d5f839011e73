"""Reports of workers that are early, late, wrong, or about requests of others."""

from __future__ import annotations

import asyncio

from actors import mail
from actors.machines import lifecycle_events
from protocol import errors, messages
from protocol.messages import Paused
from protocol.types import Usage, WorkerStats
from protocol.worker import (
    ChoiceFinished,
    Grant,
    Ready,
    RowFailed,
    RowFinished,
    RowNote,
    RowPreempted,
    RowQueued,
    RowResumed,
    RowTokens,
    Started,
    Stats,
)
from tests.sim.fakes import INFO, SLOW, Script, expected
from tests.sim.loop import simulated, until
from tests.sim.world import world


@simulated
async def test_a_process_may_report_before_its_spawn_returns():
    async with world({"demo": [Script(early=True)]}) as w:
        assert w.state() == "ready"


@simulated
async def test_a_worker_that_breaks_the_protocol_is_killed_and_replaced():
    async with world({"demo": [Script(nonsense=True), Script()]}, load=("demo",), faults=True) as w:
        await until(lambda: w.state() == "backoff", 5)
        await until(lambda: w.state() == "ready", 5)

        (failure,) = w.notices_of("actor_failed")
        assert "InvalidTransition" in type(failure.error).__name__
        assert "Loaded()" in str(failure.error)
        assert w.spawn.processes["demo"][0].signals == ["kill"]
        client = w.client()
        assert (await client.end(client.generate())).reason == "length"


@simulated
async def test_a_report_of_a_choice_that_the_request_does_not_have_costs_only_its_worker():
    async with world(load=("demo",), faults=True) as w:
        client = w.client()
        request = client.generate()
        await until(lambda: client.tokens(request), 5)
        process = w.spawn.last("demo")
        (rid,) = process._rows
        process.report(ChoiceFinished(rid=rid, choice=1, reason="stop"))
        await until(lambda: w.state() == "backoff", 5)

        assert (await client.end(request)).reason == "length"
        assert process.signals == ["kill"]
        assert not w.notices_of("actor_failed")
        assert (await client.end(client.generate())).reason == "length"


@simulated
async def test_a_malformed_call_is_in_the_event_log():
    async with world({"demo": [SLOW]}, load=("demo",)) as w:
        client = w.client()
        request = client.generate()
        await until(lambda: client.tokens(request), 5)
        process = w.spawn.last("demo")
        (rid,) = process._rows
        process.report(RowNote(rid=rid, reason="invalid JSON"))
        done = await client.end(request)
        assert (done.reason, done.notes) == ("length", ["invalid JSON"])
        records = w.system.events.since(0, "demo")
        (record,) = [one for one in records if one.kind == "malformed_call"]
        assert (record.model, record.reason) == ("demo", f"request {rid}: invalid JSON")


@simulated
async def test_messages_for_a_dead_process_do_not_reach_its_successor():
    async with world() as w:
        old = w.spawn.last("demo")
        old.die(-9)
        await until(lambda: w.state() == "backoff", 1)
        old._on_report(Started(pid=old.pid))
        await until(lambda: w.state() == "ready", 10)
        old._on_report(Ready(info=INFO))
        grant = Grant(seq=9, total_bytes=999, granted=True)
        w.system._registry.entries["demo"].worker.tell(mail.SendCommand(grant, life=1))
        await asyncio.sleep(1)

        assert w.model().granted_bytes == 100
        assert w.spawn.last("demo").grant == 100


@simulated
async def test_an_order_to_end_a_process_does_not_end_its_successor():
    async with world() as w:
        old = w.spawn.last("demo")
        old.die(-9)
        await until(lambda: w.state() == "ready" and w.spawn.last("demo") is not old, 10)
        late = lifecycle_events.MemoryExceeded(old.pid, 900 << 20, 400 << 20)
        w.system._registry_ref.tell(mail.EndWorker("demo", late))
        await asyncio.sleep(1)

        assert w.state() == "ready"
        assert w.spawn.last("demo").signals == []
        again = lifecycle_events.MemoryExceeded(w.spawn.last("demo").pid, 900 << 20, 400 << 20)
        w.system._registry_ref.tell(mail.EndWorker("demo", again))
        await until(lambda: w.spawn.last("demo").signals == ["kill"], 1)


@simulated
async def test_a_worker_cannot_report_on_requests_of_another_model():
    async with world({"demo": [SLOW], "other": [Script()]}, load=("demo", "other")) as w:
        client, process = w.client(), w.spawn.last("demo")
        key = client.generate(max_tokens=3)
        await until(lambda: process._rows)
        (rid,) = process._rows
        broken = w.spawn.last("other")
        broken.report(RowTokens(rid=rid, index=0, tokens=[999], text="no"))
        broken.report(RowFinished(rid=rid, reason="stop", usage=Usage(9, 9)))
        done = await client.end(key)

        assert (done.reason, done.usage.completion_tokens) == ("length", 3)
        assert client.tokens(key) == expected(3)
        process.report(RowTokens(rid=rid, index=3, tokens=[999], text="no"))  # it has ended
        assert (await client.end(client.generate(model="other"))).reason == "length"
        assert client.tokens(key) == expected(3)


@simulated
async def test_counters_continue_when_a_model_is_reloaded():
    def steps() -> int:
        return w.metrics.counters.models["demo"].worker.total.step

    async with world() as w:
        client, seen = w.client(), []
        for _ in range(3):
            await client.ask(messages.Load, model="demo")
            w.spawn.last("demo").report(Stats(stats=WorkerStats(step=5)))
            await asyncio.sleep(0.1)
            seen.append(steps())
            await client.ask(messages.Unload, model="demo")
            seen.append(steps())

        assert seen == [5, 5, 10, 10, 15, 15]


@simulated
async def test_clients_get_queued_and_paused_events():
    async with world({"demo": [SLOW]}) as w:
        client, worker = w.client(), w.spawn.last("demo")
        key = client.generate(max_tokens=4)
        await until(lambda: worker._rows)
        for report in (
            RowQueued(rid="1.1", position=2),
            RowQueued(rid="1.1", position=1),
            RowPreempted(rid="1.1", nbytes=7, where="disk"),
            RowPreempted(rid="1.1", nbytes=7, where="disk"),
            RowResumed(rid="1.1"),
        ):
            worker.report(report)
        await asyncio.sleep(0.1)
        assert w.system._router.machine.suspects["demo"].queued == {"1.1"}
        assert (await client.end(key)).reason == "length"
        events = [one for one in client.events[key] if not isinstance(one, messages.Tokens)]
        assert events[1:-1] == [
            messages.Queued(id=key, position=2),
            messages.Queued(id=key, position=1),
            Paused(id=key, reason="memory"),
            messages.Resumed(id=key),
        ]
        assert not w.system._router.machine.suspects["demo"].queued


@simulated
async def test_a_late_report_about_an_ended_request_is_ignored():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        key = client.generate(max_tokens=2)
        late = RowFailed(rid="1.77", error=errors.InternalError("late").info())
        w.spawn.last("demo").report(late)

        assert (await client.end(key)).reason == "length"
