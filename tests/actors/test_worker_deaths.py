"""Deaths of workers: what their models, their streams and other models see of them."""

from __future__ import annotations

import pytest

from protocol import errors, messages
from protocol.messages import Paused
from protocol.types import Sampling, WorkerStats
from tests.sim.fakes import SLOW, Script, token
from tests.sim.loop import simulated, until
from tests.sim.world import world


@simulated
async def test_a_killed_worker_restarts_and_its_streams_continue():
    async with world({"demo": [SLOW], "other": [SLOW]}, load=("demo", "other")) as w:
        client = w.client()
        lost = [client.generate(max_tokens=10) for _ in range(3)]
        kept = client.generate("other", max_tokens=20)
        await until(lambda: client.count(lost[0]) == 2)
        w.spawn.last("demo").die(-9)
        await until(lambda: w.state() == "backoff")
        waits = client.generate(max_tokens=3)

        assert (await client.end(waits)).reason == "length"
        assert (await client.end(kept)).reason == "length"
        assert client.count(kept) == 20
        for key in lost:
            assert (await client.end(key)).reason == "length"
            assert client.count(key) == 10
        assert (w.model().restarts, w.state(), w.model().error) == (1, "ready", None)
        assert len(w.spawn.processes["other"]) == 1
        assert w.system.status().granted_bytes == 200


@simulated
async def test_a_dead_workers_counters_are_not_shown():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        key = client.generate(max_tokens=5)
        await until(lambda: w.model().stats.step > 0)
        w.spawn.last("demo").die(-9)
        await until(lambda: w.state() == "backoff")

        assert w.model().stats == WorkerStats()
        assert (await client.end(key)).reason == "length"


@simulated
async def test_a_model_that_served_is_retried_until_memory_is_free():
    async with world({"demo": [Script(), Script(weights=901)]}, load=("demo", "other")) as w:
        client = w.client()
        await client.ask(messages.Pin, model="other")
        w.spawn.last("demo").die(-9)
        await until(lambda: w.state() == "backoff", 1)
        error = (await client.end(client.generate())).error
        assert error.code == "insufficient_memory"
        await until(lambda: w.spawn.attempts["demo"] == 6, 600)
        assert w.state() in {"backoff", "spawning"}
        await until(lambda: w.state() == "backoff", 60)
        assert w.model().error.code == "insufficient_memory"
        with pytest.raises(errors.InsufficientMemory):
            await client.ask(messages.Load, model="demo")

        await client.ask(messages.Unload, model="other")
        await until(lambda: w.state() == "ready", 60)
        assert (await client.end(client.generate())).reason == "length"


@simulated
async def test_kills_from_outside_never_fail_a_model():
    async with world() as w:
        for _ in range(6):
            w.spawn.last("demo").die(-9)
            await until(lambda: w.state() == "backoff", 10)
            await until(lambda: w.state() == "ready", 60)

        assert w.model().restarts == 6


@simulated
async def test_a_crash_loop_fails_only_that_model_and_the_error_has_the_story():
    async with world(load=("demo", "other")) as w:
        client = w.client()
        for _ in range(3):
            await until(lambda: w.state() == "ready", 60)
            w.spawn.last("demo").die(-11)
            await until(lambda: w.state() != "ready", 1)
        await until(lambda: w.state() == "failed", 1)
        error = w.model().error

        assert error.code == "model_failed"
        assert "3 crashes" in error.message
        assert "SIGSEGV" in error.message
        assert any("Exited(returncode=-11" in line for line in error.detail["story"])
        assert (await client.end(client.generate())).error.code == "model_failed"
        assert (await client.end(client.generate("other"))).reason == "length"
        await client.ask(messages.Load, model="demo")
        assert w.state() == "ready"


@simulated
async def test_a_stream_survives_a_process_that_dies_every_few_tokens():
    async with world({"demo": [Script(crash_after=3)]}) as w:
        client = w.client()
        key = client.generate(max_tokens=20, sampling=Sampling(seed=4))
        assert (await client.end(key)).reason == "length"

        assert client.tokens(key) == [token("hello", 4, place) for place in range(20)]
        kinds = [type(event).__name__ for event in client.events[key]]
        assert kinds[0] == "Accepted"
        assert kinds.count("Accepted") == 1
        assert kinds.count("Paused") == kinds.count("Resumed") == 6
        assert w.model().restarts == 6


@simulated
async def test_a_kill_is_seen_by_the_streams_of_that_model_alone():
    async with world({"demo": [SLOW], "other": [SLOW]}, load=("demo", "other")) as w:
        client = w.client()
        interrupted = [client.generate(prompt=f"p{n}", max_tokens=9) for n in range(3)]
        others = [client.generate("other", prompt=f"p{n}", max_tokens=30) for n in range(3)]
        for place in (2, 5):
            await until(lambda place=place: all(client.count(key) >= place for key in interrupted))
            w.spawn.last("demo").die(-9)
            await until(lambda: w.state() == "ready", 60)
        for key in interrupted + others:
            assert (await client.end(key)).reason == "length"

        for n, key in enumerate(interrupted):
            assert client.tokens(key) == [token(f"p{n}", 7 + n, place) for place in range(9)]
            rests = [event.reason for event in client.events[key] if isinstance(event, Paused)]
            assert rests == ["restart"] * 2
        for key in others:
            kinds = {type(event) for event in client.events[key]}
            assert kinds == {messages.Accepted, messages.Tokens, messages.Done}
        assert all(type(event) is not Paused for key in others for event in client.events[key])


@simulated
async def test_a_poisonous_request_is_found_without_loss_for_others():
    scripts = {"demo": [Script(token_s=0.1, poison={"p5": 3, "p11": 0})]}
    async with world(scripts) as w:
        client = w.client()
        keys = [client.generate(prompt=f"p{n}", max_tokens=12) for n in range(16)]
        ends = [await client.end(key) for key in keys]

        for n, (key, end) in enumerate(zip(keys, ends, strict=True)):
            if n in (5, 11):
                assert end.error.code == "quarantined"
                assert not end.error.retryable
                assert len(end.error.detail["story"]) > 1
                assert "SIGSEGV" in end.error.detail["story"][0]
                assert client.count(key) == {5: 3, 11: 0}[n]
            else:
                assert end.reason == "length"
                expected = [token(f"p{n}", 7 + n, place) for place in range(12)]
                assert client.tokens(key) == expected
        assert w.state() == "ready"
        records = w.system.events.since(0, "demo")
        assert [one.kind for one in records].count("quarantine") == 2
        assert next(one for one in records if one.kind == "replay").numbers == {"requests": 16}
        assert (await client.end(client.generate(prompt="after"))).reason == "length"


@simulated
async def test_a_model_that_every_request_kills_fails_with_its_story():
    scripts = {"demo": [Script(poison={f"p{n}": 0 for n in range(8)})]}
    async with world(scripts, load=("demo", "other")) as w:
        client = w.client()
        keys = [client.generate(prompt=f"p{n}") for n in range(8)]
        ends = [(await client.end(key)).error.code for key in keys]

        assert ends.count("quarantined") == 3
        assert ends.count("model_failed") == 5
        assert w.state() == "failed"
        error = w.model().error
        assert "3 crashes without progress" in error.message
        assert any("Blamed" in line for line in error.detail["story"])
        assert (await client.end(client.generate("other"))).reason == "length"


@simulated
async def test_cancels_and_deadlines_apply_while_a_model_restarts():
    async with world({"demo": [SLOW, Script(load_s=50)]}) as w:
        client = w.client()
        cancelled = client.generate(max_tokens=50, n=2)
        late = client.generate(max_tokens=50, deadline_s=20.0)
        late_there = client.generate(max_tokens=50_000, deadline_s=60.0)
        await until(lambda: client.count(late) > 2)
        w.spawn.last("demo").die(-9)
        await until(lambda: w.state() == "backoff")
        client.start(messages.Cancel, target=cancelled)
        end = await client.end(cancelled, 1)
        assert end.reason == "cancelled"
        assert end.usage.completion_tokens == client.count(cancelled) > 0
        assert end.usage.levels == [0]
        events = [one for one in client.events[cancelled] if type(one) is messages.ChoiceFinished]
        assert [(one.choice, one.reason) for one in events] == [(0, "cancelled"), (1, "cancelled")]
        assert (await client.end(late, 30)).error.code == "deadline_exceeded"
        await until(lambda: w.state() == "ready", 60)
        submit = w.spawn.last("demo").commands[-1]
        assert submit.deadline_s < 10
        assert len(submit.resume[0].tokens) == client.count(late_there)
        assert submit.levels_reported == [0]
        client.start(messages.Cancel, target=late_there)
        assert (await client.end(late_there)).reason == "cancelled"


@simulated
async def test_a_model_that_crashes_while_loading_fails_however_long_it_takes():
    async with world({"demo": [Script(load_s=100, exit_at_load=1)]}, load=()) as w:
        with pytest.raises(errors.ModelFailed, match="status 1"):
            await w.system.load("demo")

        assert (w.state(), w.spawn.attempts["demo"]) == ("failed", 3)
        await w.client().ask(messages.Unload, model="demo")
        assert w.model() is None


@simulated
async def test_a_failed_spawn_is_retried():
    broken = Script(spawn_error=OSError("no more processes"))
    async with world({"demo": [broken, broken, Script()], "bad": [broken]}, load=()) as w:
        await w.system.load("demo")
        with pytest.raises(errors.ModelFailed, match="no more processes"):
            await w.system.load("bad")

        assert w.state() == "ready"
