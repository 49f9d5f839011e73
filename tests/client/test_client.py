"""The blocking and the asyncio client, against a scripted daemon."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from kvd.client import AsyncClient, Client, options
from kvd.host.home import Home
from protocol import errors
from protocol import messages as m
from protocol.kv import KVSpec
from protocol.tools import Grammar
from protocol.types import Alternative, ChatMessage, Sampling, TokenLogprob, Usage
from tests.cli.stub import MODEL, daemon_status, stub_daemon, well


def failing(error: errors.KvdError):
    def answer(request):
        if isinstance(request, m.Generate):
            yield m.Tokens(id=request.id, index=0, tokens=[1], text="half")
        yield m.Error(id=request.id, error=error.info())

    return answer


def test_every_call_of_the_blocking_client(home: Home):
    with stub_daemon(home.socket, well) as requests, Client(home=home.root) as kvd:
        assert kvd.hello().pid == 4241
        assert kvd.status() == daemon_status(MODEL)
        assert kvd.load("demo", alias="d", kv=KVSpec(8, 4)).result == MODEL
        assert kvd.unload("demo", force=True).freed_bytes == 2**20
        assert kvd.generate("demo", "Hi").text == "Grüße all"
        assert kvd.cancel("nothing") is False
        kvd.drain()
        kvd.shutdown()
    assert [type(request) for request in requests] == [
        m.Hello,
        m.Status,
        m.Load,
        m.Unload,
        m.Generate,
        m.Cancel,
        m.Drain,
        m.Shutdown,
    ]
    assert requests[2] == m.Load(id="3", model="demo", alias="d", kv=KVSpec(8, 4))


async def test_every_call_of_the_asyncio_client(home: Home):
    with stub_daemon(home.socket, well):
        async with AsyncClient(home=home.root) as kvd:
            assert (await kvd.hello()).pid == 4241
            assert await kvd.status() == daemon_status(MODEL)
            load = await kvd.load("demo")
            assert [type(event) async for event in load] == [m.Loading, m.Loaded]
            assert await load.result() == MODEL
            assert (await kvd.unload("demo")).model == "demo"
            assert await (await kvd.generate("demo", "Hi")).text() == "Grüße all"
            assert await kvd.cancel("nothing") is False
            await kvd.drain()
            await kvd.shutdown()


def test_a_completion_yields_its_events_and_collects_text_and_tokens(home: Home):
    with stub_daemon(home.socket, well) as requests, Client(socket=home.socket) as kvd:
        completion = kvd.generate(
            "demo",
            messages=[("system", "Be brief."), ChatMessage("user", "Hi")],
            max_tokens=5,
            stop=["\n"],
            temperature=0.5,
            top_k=3,
            seed=7,
        )
        kinds = [type(event) for event in completion]
    assert kinds == [m.Accepted, m.Tokens, m.Tokens, m.Done]
    assert (completion.tokens, completion.text) == ([1, 2, 3], "Grüße all")
    assert (completion.seed, completion.reason, completion.usage) == (7, "stop", Usage(3, 3))
    assert requests == [
        m.Generate(
            id="1",
            model="demo",
            messages=[ChatMessage("system", "Be brief."), ChatMessage("user", "Hi")],
            max_tokens=5,
            stop=["\n"],
            sampling=Sampling(temperature=0.5, top_k=3, seed=7),
        )
    ]


def test_errors_are_typed_and_keep_the_text_before_them(home: Home):
    died = errors.WorkerDied("the worker died", signal=9)
    with stub_daemon(home.socket, failing(died)), Client(home=home.root) as kvd:
        completion = kvd.generate("demo", "Hi")
        with pytest.raises(errors.WorkerDied) as caught:
            _ = completion.text
        assert caught.value.detail == {"signal": 9}
        assert completion.text_so_far == "half"
        with pytest.raises(errors.WorkerDied):
            kvd.status()


def test_overlapping_requests_are_kept_apart(home: Home):
    def answer(request):
        if request.id == "1":
            return  # answered together with the second
        for number in ("2", "1", "2", "1"):
            yield m.Tokens(id=number, index=0, tokens=[1], text=f"of {number} ")
        for number in ("1", "2"):
            yield m.Done(id=number, reason="stop", usage=Usage(1, 2))

    with stub_daemon(home.socket, answer), Client(home=home.root) as kvd:
        first, second = kvd.generate("demo", "a"), kvd.generate("demo", "b")
        assert first.text == "of 1 of 1 "
        assert second.text == "of 2 of 2 "


async def test_overlapping_requests_of_the_asyncio_client(home: Home):
    def answer(request):
        if request.id == "1":
            return
        for number in ("2", "1"):
            yield m.Tokens(id=number, index=0, tokens=[1], text=f"of {number}")
            yield m.Done(id=number, reason="stop", usage=Usage(1, 1))

    with stub_daemon(home.socket, answer):
        async with AsyncClient(home=home.root) as kvd:
            first, second = await kvd.generate("demo", "a"), await kvd.generate("demo", "b")
            async with asyncio.timeout(5):
                assert await asyncio.gather(first.text(), second.text()) == ["of 1", "of 2"]


def test_without_a_daemon_the_error_names_the_socket_and_the_command(home: Home):
    with pytest.raises(errors.NotRunning, match=r"kvd\.sock; start one with `kvd serve`"):
        Client(home=home.root)


async def test_without_a_daemon_the_asyncio_client_raises_the_same_error(home: Home):
    with pytest.raises(errors.NotRunning, match="kvd serve"):
        async with AsyncClient(home=home.root):
            pass


def hang_up(request):
    if isinstance(request, m.Generate):
        yield m.Tokens(id=request.id, index=0, tokens=[1], text="half")
    yield None


def test_a_daemon_that_disconnects_ends_pending_calls(home: Home):
    with stub_daemon(home.socket, hang_up), Client(home=home.root) as kvd:
        completion = kvd.generate("demo", "Hi")
        with pytest.raises(errors.NotRunning, match="closed the connection"):
            _ = completion.text
        assert completion.text_so_far == "half"
        with pytest.raises(errors.NotRunning):
            kvd.status()


async def test_a_daemon_that_disconnects_ends_pending_calls_in_asyncio(home: Home):
    with stub_daemon(home.socket, hang_up):
        async with AsyncClient(home=home.root) as kvd:
            completion = await kvd.generate("demo", "Hi")
            async with asyncio.timeout(5):
                with pytest.raises(errors.NotRunning, match="closed the connection"):
                    await completion.text()
                with pytest.raises(errors.NotRunning):
                    await kvd.status()


def test_an_error_of_the_connection_ends_all_its_requests(home: Home):
    def answer(request):
        yield m.Error(id="", error=errors.SlowReader("too slow").info())

    with (
        stub_daemon(home.socket, answer),
        Client(home=home.root) as kvd,
        pytest.raises(errors.SlowReader),
    ):
        _ = kvd.generate("demo", "Hi").text


def test_a_daemon_that_does_not_answer_is_not_waited_for_forever(home: Home, monkeypatch):
    monkeypatch.setattr("kvd.client.exchange.QUICK_S", 0.05)

    def silence(request):
        return []

    with (
        stub_daemon(home.socket, silence),
        Client(home=home.root) as kvd,
        pytest.raises(errors.NotRunning, match="does not answer"),
    ):
        kvd.status()


def test_a_request_over_the_frame_limit_is_refused_before_it_is_sent(home: Home):
    with stub_daemon(home.socket, well) as requests, Client(home=home.root) as kvd:
        with pytest.raises(errors.FrameTooLarge):
            kvd.generate("demo", "x" * m.MAX_FRAME_BYTES)
        assert kvd.hello().pid == 4241
    assert len(requests) == 1


def silence(request):
    return []


async def test_closing_the_asyncio_client_ends_pending_calls(home: Home):
    with stub_daemon(home.socket, silence):
        kvd = AsyncClient(home=home.root)
        await kvd.connect()
        completion = await kvd.generate("demo", "Hi")
        waiting = asyncio.create_task(completion.text())
        unloading = asyncio.create_task(kvd.unload("demo"))
        await asyncio.sleep(0)
        async with asyncio.timeout(5):
            await kvd.close()
            for task in (waiting, unloading):
                with pytest.raises(errors.NotRunning, match="this client is closed"):
                    await task
            with pytest.raises(errors.NotRunning, match="this client is closed"):
                await kvd.status()


async def test_a_request_without_an_answer_leaves_nothing_in_the_asyncio_client(
    home: Home, monkeypatch
):
    monkeypatch.setattr("kvd.client.exchange.QUICK_S", 0.05)
    with stub_daemon(home.socket, silence):
        async with AsyncClient(home=home.root) as kvd:
            with pytest.raises(errors.NotRunning, match="does not answer"):
                await kvd.status()
            assert (kvd._arrived, kvd._exchange._waiting) == ({}, {})


def test_a_request_without_an_answer_leaves_nothing_in_the_client(home: Home, monkeypatch):
    monkeypatch.setattr("kvd.client.exchange.QUICK_S", 0.05)
    with stub_daemon(home.socket, silence), Client(home=home.root) as kvd:
        with pytest.raises(errors.NotRunning, match="does not answer"):
            kvd.status()
        assert kvd._connection._exchange._waiting == {}


def test_calls_of_a_closed_client_raise(home: Home):
    with stub_daemon(home.socket, silence):
        kvd = Client(home=home.root)
        completion = kvd.generate("demo", "Hi")
        kvd.close()
        for call in (kvd.status, kvd.drain, lambda: kvd.generate("demo", "Hi"), list):
            with pytest.raises(errors.NotRunning, match="this client is closed"):
                call(completion) if call is list else call()
        kvd.close()


NUMBERS = {
    "max_tokens": (1, 2**31 - 1),
    "n": (1, 16),
    "min_tokens": (0, 2**31 - 1),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
    "priority": (-100, 100),
    "deadline_s": (0, 604_800),
    "keep_alive_s": (-31_536_000, 31_536_000),
    "temperature": (0, 10),
    "top_p": (0, 1),
    "top_k": (0, 2**31 - 1),
    "min_p": (0, 1),
    "seed": (0, 2**63 - 1),
    "repetition_penalty": (0, 10),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
}
SAMPLED = set(Sampling.__struct_fields__)


@pytest.mark.parametrize("name", NUMBERS)
def test_the_clients_ranges_are_those_of_the_protocol(name):
    low, high = NUMBERS[name]
    for value in (low - 1, low, high, high + 1):
        whole = {"sampling": {name: value}} if name in SAMPLED else {name: value}
        raw = {"op": "generate", "id": "1", "model": "m", "prompt": "p", **whole}
        try:
            msgspec.convert(raw, m.Generate)
        except msgspec.ValidationError:
            with pytest.raises(errors.InvalidRequest, match=f"{name} must be") as caught:
                options.check_number(name, value)
            assert caught.value.detail == {"field": name}
        else:
            options.check_number(name, value)
    with pytest.raises(errors.InvalidRequest):
        options.check_number(name, float("nan"))


def test_every_number_has_a_range_and_every_field_is_an_option():
    assert set(options.RANGES) == set(NUMBERS)
    fields = {*m.Generate.__struct_fields__, *SAMPLED}
    others = {"id", "v", "model", "prompt", "messages", "tokens", "sampling"}
    assert set(options.Options.__annotations__) == fields - others


def test_all_options_of_a_request_are_sent(home: Home):
    reported = {
        "max_tokens": 9,
        "n": 2,
        "stop": ("x",),
        "stop_tokens": (3, 4),
        "ignore_eos": True,
        "min_tokens": 2,
        "logprobs": 0,
        "prompt_logprobs": 3,
        "priority": -1,
        "deadline_s": 60.0,
        "prefix_salt": "mine",
        "keep_alive_s": -1.0,
        "grammar": Grammar("regex", "[a-z]+"),
    }
    drawn = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 3,
        "min_p": 0.1,
        "seed": 7,
        "logit_bias": {4: -1.5},
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
    }
    assert {*reported, *drawn, "chat"} == set(options.Options.__annotations__)
    with stub_daemon(home.socket, well) as requests, Client(home=home.root) as kvd:
        _ = kvd.generate("demo", "Hi", **reported, **drawn).text
    lists = {"stop": ["x"], "stop_tokens": [3, 4]}
    assert requests[0] == m.Generate(
        id="1", model="demo", prompt="Hi", sampling=Sampling(**drawn), **{**reported, **lists}
    )


def test_fields_that_contradict_each_other_are_refused_before_they_are_sent(home: Home):
    with stub_daemon(home.socket, well) as requests, Client(home=home.root) as kvd:
        with pytest.raises(errors.InvalidRequest, match="at most max_tokens, 5") as caught:
            kvd.generate("demo", "Hi", min_tokens=6, max_tokens=5)
        assert caught.value.detail == {"field": "min_tokens"}
    assert requests == []


def logprob_of(token):
    return TokenLogprob(token, chr(token), -0.5, top=[Alternative(token, chr(token), -0.5)])


def several(request):
    number = request.id
    yield m.Accepted(id=number, prompt_tokens=3, seed=7)
    yield m.PromptLogprobs(id=number, index=0, logprobs=[TokenLogprob(80, "P")])
    yield m.PromptLogprobs(id=number, index=1, logprobs=[logprob_of(81)])
    for choice, token in ((1, 66), (0, 65), (1, 67)):
        yield m.Tokens(
            id=number,
            index=0,
            tokens=[token],
            text=chr(token),
            choice=choice,
            logprobs=[logprob_of(token)],
        )
        if token == 65:
            yield m.ChoiceFinished(id=number, choice=0, reason="stop")
    yield m.ChoiceFinished(id=number, choice=1, reason="length")
    yield m.Done(id=number, reason="length", usage=Usage(3, 3))


def test_several_choices_are_collected_separately(home: Home):
    with stub_daemon(home.socket, several), Client(home=home.root) as kvd:
        completion = kvd.generate("demo", "Hi", n=2, logprobs=1, prompt_logprobs=1)
        assert completion.text == "A"
    first, second = completion.choices
    assert (first.text, first.tokens, first.reason) == ("A", [65], "stop")
    assert (second.text, second.tokens, second.reason) == ("BC", [66, 67], "length")
    assert [one.token for one in second.logprobs] == [66, 67]
    assert [one.token for one in completion.prompt_logprobs] == [80, 81]
    assert (completion.reason, completion.usage) == ("length", Usage(3, 3))


async def test_several_choices_in_asyncio(home: Home):
    with stub_daemon(home.socket, several):
        async with AsyncClient(home=home.root) as kvd:
            completion = await kvd.generate("demo", "Hi", n=2)
            assert await completion.text() == "A"
            assert [one.text for one in completion.choices] == ["A", "BC"]


def test_a_choice_that_was_not_requested_is_a_protocol_error(home: Home):
    with (
        stub_daemon(home.socket, several),
        Client(home=home.root) as kvd,
        pytest.raises(errors.LocalProtocolError, match="choice 1 of 1"),
    ):
        _ = kvd.generate("demo", "Hi").text


def test_events_pins_and_the_budget(home: Home):
    with stub_daemon(home.socket, well), Client(home=home.root) as client:
        assert [it.kind for it in client.events()] == ["evict"]
        assert client.pin("demo").pinned
        assert not client.pin("demo", pinned=False).pinned
        assert client.configure(budget_bytes=5).budget_bytes == 5
        following = client.events("chat", follow=True)
        assert next(following).model == "chat"
        following.close()
        assert client.status().models


def test_tokenize_and_changes_of_settings(home: Home):
    with stub_daemon(home.socket, well) as requests, Client(home=home.root) as client:
        assert client.tokenize("demo", "abc", limit=2, texts=True).texts == ["a", "b"]
        assert client.tokenize("demo", messages=[("user", "Hi")]).tokens == [72, 105]
        client.configure(settings={"budget": "1GiB", "log_level": None}, table=True)
    assert (requests[-1].settings, requests[-1].table) == (
        {"budget": "1GiB", "log_level": None},
        True,
    )


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_a_setting_that_json_cannot_hold_is_refused(home: Home, value: float):
    with stub_daemon(home.socket, well) as requests, Client(home=home.root) as client:
        sent = len(requests)
        with pytest.raises(errors.InvalidRequest, match="drain_timeout_s must be a finite number"):
            client.configure(settings={"drain_timeout_s": value})
    assert len(requests) == sent


async def test_tokenize_and_changes_of_settings_in_asyncio(home: Home):
    with stub_daemon(home.socket, well) as requests:
        async with AsyncClient(home=home.root) as client:
            assert (await client.tokenize("demo", "abc", limit=0)).count == 3
            await client.configure(settings={"max_rows": 8})
    assert requests[-1].settings == {"max_rows": 8}


async def test_events_pins_and_the_budget_in_asyncio(home: Home):
    with stub_daemon(home.socket, well):
        async with AsyncClient(home=home.root) as client:
            assert [it.kind async for it in client.events()] == ["evict"]
            assert (await client.pin("demo")).pinned
            assert (await client.configure()).budget_bytes == 2**30
            following = client.events("chat", follow=True)
            assert (await anext(following)).model == "chat"
            await following.aclose()
            assert (await client.status()).models
