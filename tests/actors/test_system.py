"""The whole system on the simulated clock, with fake worker processes. See `tests.sim.world`."""

from __future__ import annotations

import asyncio

import pytest

from actors import mail
from actors.machines import lifecycle_events
from actors.machines.watchdog import WatchdogTimeouts
from actors.status import KnownModel
from actors.system import Settings, SystemFault
from protocol import errors, messages
from protocol.kv import KVSpec
from protocol.messages import Paused
from protocol.types import Alternative, Sampling, TokenLogprob, Usage, WorkerStats
from protocol.worker import (
    CancelRow,
    ChoiceFinished,
    Grant,
    LoadModel,
    Ready,
    RowFailed,
    RowFinished,
    RowPreempted,
    RowPrompt,
    RowQueued,
    RowResumed,
    RowTokens,
    Started,
    Stats,
    Stop,
    Submit,
)
from tests.sim.fakes import INFO, Script, token
from tests.sim.loop import simulated, until
from tests.sim.world import world

SLOW = Script(token_s=1.0)
PATIENCE = WatchdogTimeouts()


def expected(count: int, prompt: str = "hello", seed: int = 7) -> list[int]:
    return [token(prompt, seed, position) for position in range(count)]


# -- requests -----------------------------------------------------------------------------------


@simulated
async def test_a_request_is_accepted_streams_and_ends():
    async with world() as w:
        client = w.client()
        key = client.generate(max_tokens=5)
        done = await client.end(key)

        kinds = [type(event).__name__ for event in client.events[key]]
        assert ["Accepted", *["Tokens"] * 5, "Done"] == kinds
        assert (done.reason, done.usage.completion_tokens) == ("length", 5)
        assert client.events[key][0].seed == 7
        assert expected(5) == client.tokens(key)


@simulated
async def test_a_given_seed_is_kept_and_sampling_reaches_the_worker():
    async with world() as w:
        client = w.client()
        key = client.generate(sampling={"temperature": 0.5, "seed": 42}, stop=["x"], max_tokens=3)
        await client.end(key)

        submit = next(c for c in w.spawn.last("demo").commands if isinstance(c, Submit))
        assert (submit.sampling.seed, submit.sampling.temperature, submit.stop) == (42, 0.5, ["x"])
        assert expected(3, seed=42) == client.tokens(key)


@simulated
async def test_all_fields_of_a_request_reach_the_worker():
    said = {
        "n": 2,
        "stop": ["x"],
        "stop_tokens": [3],
        "ignore_eos": True,
        "min_tokens": 1,
        "logprobs": 2,
        "prompt_logprobs": 0,
        "priority": 5,
        "prefix_salt": "mine",
        "max_tokens": 3,
    }
    async with world() as w:
        client = w.client()
        await client.end(client.generate(**said, sampling={"logit_bias": {"4": 1.0}}))

        submit = next(c for c in w.spawn.last("demo").commands if isinstance(c, Submit))
        assert {name: getattr(submit, name) for name in said} == said
        assert submit.sampling.logit_bias == {4: 1.0}
        assert submit.deadline_s is None


@simulated
async def test_choices_and_logprobs_reach_the_client():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        key = client.generate(n=2, logprobs=1, max_tokens=1)
        process = w.spawn.last("demo")
        await until(lambda: any(isinstance(c, Submit) for c in process.commands))
        rid = next(c.rid for c in process.commands if isinstance(c, Submit))
        logprobs = [TokenLogprob(5, " a", -0.5, top=[Alternative(5, " a", -0.5)])]
        process.report(RowPrompt(rid=rid, index=0, logprobs=logprobs))
        process.report(
            RowTokens(rid=rid, index=0, tokens=[5], text=" a", choice=1, logprobs=logprobs)
        )
        process.report(ChoiceFinished(rid=rid, choice=1, reason="length"))
        await client.end(key)

        _, prompt, tokens, choice, *_ = client.events[key]
        assert prompt == messages.PromptLogprobs(id=key, index=0, logprobs=logprobs)
        assert (tokens.choice, tokens.logprobs) == (1, logprobs)
        assert choice == messages.ChoiceFinished(id=key, choice=1, reason="length")


@simulated
async def test_a_request_whose_deadline_passes_while_its_model_loads_ends():
    async with world({"demo": [Script(load_s=100.0)]}, load=()) as w:
        client = w.client()
        client.start(messages.Load, model="demo")
        await until(lambda: w.state() == "loading")
        late, patient = client.generate(deadline_s=2.0), client.generate(deadline_s=3000.0)
        began = asyncio.get_running_loop().time()
        error = await client.end(late)

        assert error.error.code == "deadline_exceeded"
        assert asyncio.get_running_loop().time() - began == pytest.approx(2.0, abs=0.01)
        await client.end(patient)
        submits = [c for c in w.spawn.last("demo").commands if isinstance(c, Submit)]
        assert len(submits) == 1
        assert submits[0].deadline_s == pytest.approx(2900.0, abs=5.0), (
            "what is left of the deadline"
        )


@simulated
async def test_sixteen_streams_of_one_client_and_two_models():
    async with world(load=("demo", "other")) as w:
        client = w.client()
        keys = [
            client.generate(("demo", "other")[i % 2], f"p{i}", max_tokens=i + 1) for i in range(16)
        ]
        for i, key in enumerate(keys):
            assert (await client.end(key)).reason == "length"
            assert expected(i + 1, f"p{i}", 7 + i) == client.tokens(key)


@simulated
async def test_cancel_ends_one_and_leaves_the_other():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        one, other = client.generate(max_tokens=100), client.generate(max_tokens=6)
        await until(lambda: client.count(one) == 2)
        cancelled = await client.ask(messages.Cancel, target=one)
        done = await client.end(one)

        assert cancelled.found
        assert done.reason == "cancelled"
        assert (await client.end(other)).reason == "length"
        assert client.count(other) == 6


@simulated
async def test_cancel_of_an_ended_or_unknown_request_is_not_found():
    async with world() as w:
        client = w.client()
        key = client.generate(max_tokens=1)
        await client.end(key)

        assert not (await client.ask(messages.Cancel, target=key)).found
        assert not (await client.ask(messages.Cancel, target="nobody")).found


@simulated
async def test_cancel_of_a_request_that_waits_for_its_model():
    async with world(load=()) as w:
        client = w.client()
        load = client.start(messages.Load, model="demo")
        await until(lambda: w.state() == "loading")
        key = client.generate()
        await client.ask(messages.Cancel, target=key)
        done = await client.end(key)
        await client.end(load)

        assert (done.reason, done.usage.completion_tokens) == ("cancelled", 0)
        assert not any(isinstance(c, Submit) for c in w.spawn.last("demo").commands)


@simulated
async def test_a_disconnect_cancels_the_requests_of_that_client_only():
    async with world({"demo": [SLOW]}) as w:
        leaver, stayer = w.client(), w.client()
        gone = [leaver.generate(max_tokens=1000) for _ in range(3)]
        kept = stayer.generate(max_tokens=5)
        await until(lambda: leaver.count(gone[0]) == 2)
        leaver.disconnect()
        leaver.disconnect()

        assert (await stayer.end(kept)).reason == "length"
        process = w.spawn.last("demo")
        assert sum(isinstance(c, CancelRow) for c in process.commands) == 3
        await until(lambda: w.model().requests == 0)


@simulated
async def test_a_load_continues_when_its_client_disconnects():
    async with world(load=()) as w:
        client = w.client()
        client.start(messages.Load, model="demo")
        await until(lambda: w.state() == "loading")
        client.disconnect()

        await until(lambda: w.state() == "ready", 10)


@simulated
async def test_an_unknown_model_is_refused_with_the_names_that_are_known():
    async with world(known={"lazy": KnownModel("/m/lazy")}) as w:
        names = r"\(loaded: demo; loaded by the next request: lazy\); did you mean 'lazy'\?"
        for kind, fields in (
            (messages.Generate, {"prompt": "x"}),
            (messages.Tokenize, {"prompt": "x"}),
            (messages.Explain, {}),
            (messages.Unload, {}),
        ):
            with pytest.raises(errors.UnknownModel, match=names):
                await w.client().ask(kind, model="lasy", **fields)


@simulated
async def test_a_duplicate_id_is_refused_and_the_first_request_continues():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        key = client.generate(max_tokens=3)
        line = b'{"id":"%s","op":"hello"}\n' % key.encode()
        await until(lambda: client.count(key) == 1)
        client.session._open.add(key)
        seen = len(client.events[key])
        client.connection.receive(line)
        await until(lambda: len(client.events[key]) > seen, 0.5)
        refusal = client.events[key].pop()
        client.session._open.add(key)  # the client's session treats an error as the end

        assert (refusal.error.code, refusal.error.detail["field"]) == ("invalid_request", "id")
        assert (await client.end(key)).reason == "length"
        assert client.count(key) == 3


@simulated
async def test_more_requests_than_a_model_may_hold_are_overloaded():
    async with world({"demo": [SLOW]}, settings=Settings(max_queue=2)) as w:
        client = w.client()
        keys = [client.generate(max_tokens=2) for _ in range(3)]

        with pytest.raises(errors.Overloaded) as refused:
            await client.ask(messages.Generate, model="demo", prompt="x")
        assert refused.value.detail["retry_after_s"] > 0
        assert [type(await client.end(k)).__name__ for k in keys] == ["Done", "Done", "Error"]


@simulated
@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "x" * 6000},
        {"messages": [{"role": "user", "content": "x" * 6000}]},
        {"tokens": [1] * 200},
        {"prompt": "x", "stop": ["y" * 6000]},
    ],
)
async def test_more_bytes_than_a_model_may_hold_are_overloaded(fields):
    async with world({"demo": [SLOW]}, settings=Settings(max_queue_bytes=10_000)) as w:
        client = w.client()
        fields = {"prompt": None, "max_tokens": 2} | fields
        first = client.generate(**fields)
        second = await client.end(client.generate(**fields))

        assert second.error.code == "overloaded"
        assert "the limit is 10000" in second.error.message
        assert (await client.end(first)).reason == "length"
        assert (await client.end(client.generate(**fields))).reason == "length"


@simulated
async def test_garbage_ends_its_own_connection_only():
    async with world({"demo": [SLOW]}) as w:
        bad, good = w.client(), w.client()
        lost, kept = bad.generate(max_tokens=50), good.generate(max_tokens=5)
        await until(lambda: bad.count(lost) == 1)
        bad.connection.receive(b"\xff\xfe nonsense\n")
        await until(lambda: bad.closed, 1)

        assert bad.events[""][0].error.code == "malformed_frame"
        assert (await good.end(kept)).reason == "length"
        await until(lambda: w.model().requests == 0, 10)


@simulated
async def test_a_slow_reader_is_disconnected():
    async with world(settings=Settings(slow_reader_bytes=2000)) as w:
        slow, good = w.client(), w.client()
        slow.reads = False
        slow.generate(max_tokens=1000)
        kept = good.generate(max_tokens=300)
        await until(lambda: slow.closed, 60)

        assert slow.events[""][0].error.code == "slow_reader"
        assert slow.events[""][0].error.retryable
        assert (await good.end(kept)).reason == "length"
        await until(lambda: w.model().requests == 0, 10)


@simulated
async def test_hello_and_status_answer():
    async with world() as w:
        client = w.client()
        hello = await client.ask(messages.Hello, client="test")
        status = (await client.ask(messages.Status)).status

        assert (hello.version, hello.protocol, hello.home) == ("0", 1, "/home/kvd")
        assert (status.state, status.budget_bytes, status.granted_bytes) == ("serving", 1000, 100)
        (model,) = status.models
        assert (
            model.name,
            model.state,
            model.worker_pid,
            model.granted_bytes,
        ) == ("demo", "ready", 101, 100)
        assert model.info.attention_path == "fake"


# -- load and unload ----------------------------------------------------------------------------


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


# -- deaths of workers -----------------------------------------------------------------------------


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
        struck = [client.generate(prompt=f"p{n}", max_tokens=9) for n in range(3)]
        spared = [client.generate("other", prompt=f"p{n}", max_tokens=30) for n in range(3)]
        for place in (2, 5):
            await until(lambda place=place: all(client.count(key) >= place for key in struck))
            w.spawn.last("demo").die(-9)
            await until(lambda: w.state() == "ready", 60)
        for key in struck + spared:
            assert (await client.end(key)).reason == "length"

        for n, key in enumerate(struck):
            assert client.tokens(key) == [token(f"p{n}", 7 + n, place) for place in range(9)]
            rests = [event.reason for event in client.events[key] if isinstance(event, Paused)]
            assert rests == ["restart"] * 2
        for key in spared:
            kinds = {type(event) for event in client.events[key]}
            assert kinds == {messages.Accepted, messages.Tokens, messages.Done}
        assert all(type(event) is not Paused for key in spared for event in client.events[key])


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
        records = w.system._events.since(0, "demo")
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


@simulated
async def test_unload_of_a_model_with_a_dead_process_frees_nothing():
    async with world() as w:
        w.spawn.last("demo").die(-9)
        await until(lambda: w.state() == "backoff", 1)

        assert (await w.client().ask(messages.Unload, model="demo")).freed_bytes == 0


# -- silent workers --------------------------------------------------------------------------------


@simulated
async def test_a_hung_worker_is_terminated_then_killed_and_its_streams_continue():
    hung = Script(hang_at="token", token_s=1.0)
    async with world({"demo": [hung, Script()]}) as w:
        loop = asyncio.get_running_loop()
        client = w.client()
        key = client.generate(max_tokens=50)
        start = loop.time()
        assert (await client.end(key)).reason == "length"
        waited = loop.time() - start

        assert client.count(key) == 50
        assert w.spawn.processes["demo"][0].signals == ["term", "kill"]
        assert PATIENCE.idle_s < waited < PATIENCE.idle_s + PATIENCE.terminated_s + 5
        assert (await client.end(client.generate())).reason == "length"


@simulated
async def test_an_idle_worker_may_be_silent():
    async with world() as w:
        await asyncio.sleep(10_000)

        assert (w.state(), w.model().restarts) == ("ready", 0)


@pytest.mark.parametrize(("where", "patience"), [("start", 60.0), ("load", 600.0)])
def test_a_worker_that_hangs_before_it_is_ready_is_replaced(where: str, patience: float):
    @simulated
    async def scene():
        async with world({"demo": [Script(hang_at=where), Script()]}, load=()) as w:
            start = asyncio.get_running_loop().time()
            await w.system.load("demo")
            assert patience < asyncio.get_running_loop().time() - start < patience + 20

    scene()


@simulated
async def test_a_long_load_that_reports_progress_is_left_alone():
    async with world({"demo": [Script(load_s=2000)]}) as w:
        assert (w.state(), w.model().restarts) == ("ready", 0)


@simulated
async def test_a_worker_that_ignores_commands_is_killed_at_unload():
    async with world({"demo": [Script(deaf=True, kill_s=7)]}) as w:
        await w.client().ask(messages.Unload, model="demo")

        assert w.spawn.last("demo").signals[:3] == ["term", "kill", "kill"]


# -- memory -------------------------------------------------------------------------------------


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


# -- drain and shutdown ----------------------------------------------------------------------------


@simulated
async def test_drain_finishes_running_requests_and_accepts_no_more():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        key = client.generate(max_tokens=5)
        await until(lambda: client.count(key) == 1)
        drain = client.start(messages.Drain)
        await until(lambda: w.system.status().state == "draining", 1)
        with pytest.raises(errors.Draining):
            await client.ask(messages.Generate, model="demo", prompt="x")
        with pytest.raises(errors.Draining):
            await client.ask(messages.Load, model="other")

        assert not client.events[drain]
        assert (await client.end(key)).reason == "length"
        await client.end(drain)
        assert isinstance(await client.ask(messages.Drain), messages.Drained)
        assert w.state() == "ready"


@simulated
async def test_shutdown_drains_stops_the_workers_and_replies():
    async with world({"demo": [SLOW]}, load=("demo", "other")) as w:
        client, idle = w.client(), w.client()
        key = client.generate(max_tokens=5)
        unload = idle.start(messages.Unload, model="demo")
        await until(lambda: client.count(key) == 1)
        bye = client.start(messages.Shutdown)
        await w.system.finished

        assert client.events[key][-1].reason == "length"
        assert isinstance(client.events[bye][-1], messages.ShutdownReply)
        assert isinstance(idle.events[unload][-1], messages.Unloaded)
        assert client.closed
        assert idle.closed
        assert any(isinstance(c, Stop) for c in w.spawn.last("other").commands)
        client.connection.receive(b"late\n")
        client.connection.closed()


@simulated
async def test_a_second_forced_stop_ends_the_drain_of_the_first():
    async with world({"demo": [SLOW]}) as w:
        client = w.client()
        key = client.generate(max_tokens=10_000)
        await until(lambda: client.count(key) == 1)
        first = asyncio.ensure_future(w.system.stop())
        await asyncio.sleep(5)
        assert not first.done()
        await w.system.stop(force=True)
        await first

        error = client.events[key][-1].error
        assert (error.code, error.message) == ("draining", "the daemon stops")


@simulated
async def test_a_forced_stop_ends_waiting_requests_with_its_reason():
    async with world({"new": [Script(load_s=100)]}) as w:
        client = w.client()
        load = client.start(messages.Load, model="new")
        await until(lambda: w.state("new") == "loading", 10)
        waiting = client.generate("new")
        await until(lambda: w.model("new").requests == 1, 10)
        await w.system.stop(force=True)

        assert client.events[load][-1].error.message == "the daemon stops"
        assert "the daemon takes no new work" in client.events[waiting][-1].error.message


@pytest.mark.parametrize("passes", range(6))
@simulated
async def test_a_request_that_a_forced_stop_overtakes_may_be_sent_again(passes: int):
    """The stop arrives between the request and the load that it causes."""
    async with world(load=(), known={"demo": KnownModel("demo")}) as w:
        key = w.client().generate()
        for _ in range(passes):
            await asyncio.sleep(0)
        await w.system.stop(force=True)

        error = w.clients[0].events[key][-1].error
        assert error.code == "draining"
        assert "the daemon takes no new work" in error.message


@simulated
async def test_stop_in_the_middle_of_everything_leaves_nothing_behind():
    scripts = {
        "crashing": [Script(exit_at_load=1)],
        "loading": [Script(load_s=1e4)],
        "deaf": [Script(deaf=True)],
    }
    async with world(scripts, load=("demo",)) as w:
        client = w.client()
        loads = [client.start(messages.Load, model=name) for name in scripts]
        await asyncio.sleep(2.5)
        await w.system.stop()

        assert all(isinstance(client.events[key][-1], messages.Error) for key in loads[:2])
        assert w.system.status().models == []


@simulated
async def test_an_inconsistent_core_actor_ends_the_system_and_its_workers():
    async with world(faults=True) as w:
        w.system._governor.machine.ledger.grants["ghost"] = 5000
        w.system._worker_services.governor.tell("nonsense")
        with pytest.raises(SystemFault, match="above the budget"):
            await w.system.finished

        assert w.spawn.last("demo").signals == ["kill"]
        w.system._governor.machine.ledger.grants.clear()


@simulated
async def test_a_core_actor_with_consistent_state_survives_a_failure():
    async with world(faults=True) as w:
        client = w.client()
        key = client.generate(max_tokens=30)
        await until(lambda: client.count(key) == 1)
        w.system._client_services.router.tell("nonsense")

        assert (await client.end(key)).reason == "length"
        assert w.notices_of("actor_failed")[0].fields["actor"] == "router"
        for _ in range(4):
            w.system._client_services.router.tell("nonsense")
        with pytest.raises(SystemFault):
            await w.system.finished


@simulated
async def test_a_failing_client_actor_ends_its_connection_only():
    async with world({"demo": [SLOW]}, faults=True) as w:
        bad, good = w.client(), w.client()
        lost, kept = bad.generate(max_tokens=1000), good.generate(max_tokens=3)
        await until(lambda: bad.count(lost) == 1)
        bad.connection._client.tell("nonsense")

        assert (await good.end(kept)).reason == "length"
        assert bad.closed
        assert bad.events[""][0].error.code == "internal"
        await until(lambda: w.model().requests == 0, 10)
