"""Requests of clients, in the whole system on the simulated clock with fake workers."""

from __future__ import annotations

import asyncio

import pytest

from actors.status import KnownModel
from actors.system import Settings
from protocol import errors, messages
from protocol.explain_messages import Explain
from protocol.types import Alternative, TokenLogprob
from protocol.worker import CancelRow, ChoiceFinished, RowPrompt, RowTokens, Submit
from tests.sim.fakes import SLOW, Script, expected
from tests.sim.loop import simulated, until
from tests.sim.world import world


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
async def test_an_unknown_model_is_refused_with_the_names_that_are_known():
    async with world(known={"lazy": KnownModel("/m/lazy")}) as w:
        names = r"\(loaded: demo; loaded by the next request: lazy\); did you mean 'lazy'\?"
        for kind, fields in (
            (messages.Generate, {"prompt": "x"}),
            (messages.Tokenize, {"prompt": "x"}),
            (Explain, {}),
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
