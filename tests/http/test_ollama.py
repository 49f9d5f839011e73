"""Ollama's API with the ollama package, against a daemon on the fake engine and a scripted one."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx
import ollama
import pytest

from protocol import messages
from protocol.errors import DeadlineExceeded, UnknownModel
from protocol.parts import PartStart
from protocol.types import ChatAbilities, ModelInfo, ModelStatus, Usage
from tests.http.live import Live
from tests.http.stage import Scripted, fails, hangs, says, serving
from tests.process.helpers import wait_for

HELLO = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city", "days"],
}


def weather(city: str, days: int) -> str:
    """Return the weather.

    Args:
        city: the city
        days: number of days
    """
    return f"{city} {days}"


@pytest.fixture
def ai(live: Live):
    with ollama.Client(host=live.url) as client:
        yield client


def test_chat_whole_and_streamed(ai: ollama.Client):
    asked: Any = {"model": "fast", "messages": HELLO, "options": {"seed": 3, "num_predict": 12}}
    whole = ai.chat(**asked)
    assert (whole.done, whole.done_reason, whole.model) == (True, "length", "fast")
    assert (whole.prompt_eval_count, whole.eval_count) == (9, 12)
    assert whole.total_duration >= whole.eval_duration > 0
    pieces = list(ai.chat(**asked, stream=True))
    assert len(pieces) > 3
    assert "".join(piece.message.content for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count == 12


def test_the_same_tokens_as_on_the_socket(live: Live, ai: ollama.Client):
    options = {"seed": 3, "num_predict": 9, "temperature": 0.5, "stop": ["zz"]}
    answer = ai.chat(model="fast", messages=HELLO, options=options)
    with live.client() as kvd:
        same = kvd.generate(
            "fast", messages=[("user", "Hi")], max_tokens=9, temperature=0.5, seed=3
        )
        assert answer.message.content == same.text


async def test_the_async_client(live: Live):
    text = ""
    async with ollama.AsyncClient(host=live.url) as ai:
        async for piece in await ai.chat(model="fast:latest", messages=HELLO, stream=True):
            text += piece.message.content
    assert text


def test_generate(ai: ollama.Client):
    options = {"seed": 1, "num_predict": 6}
    whole = ai.generate(model="fast", prompt="Hi", system="Be brief", options=options)
    assert whole.response
    assert whole.done_reason == "length"
    stream = ai.generate(model="fast", prompt="Hi", system="Be brief", options=options, stream=True)
    assert "".join(piece.response for piece in stream) == whole.response
    raw = ai.generate(model="fast", prompt="Hi", raw=True, options=options)
    assert (raw.prompt_eval_count, whole.prompt_eval_count) == (2, 26)


def test_tool_calls_are_objects_and_results_go_back(ai: ollama.Client):
    question = [{"role": "user", "content": 'call weather {"city": "Paris", "days": 2}'}]
    answer = ai.chat(model="fast", messages=question, tools=[weather], options={"seed": 4})
    (call,) = answer.message.tool_calls
    assert (call.function.name, call.function.arguments) == (
        "weather",
        {"city": "Paris", "days": 2},
    )
    assert answer.done_reason == "stop"
    result = {"role": "tool", "tool_name": "weather", "content": weather("Paris", 2)}
    more = ai.chat(model="fast", messages=[*question, answer.message, result], tools=[weather])
    assert more.message.content
    assert not more.message.tool_calls


def test_streamed_tool_calls_and_thinking_add_up_to_the_whole_answer(ai: ollama.Client):
    asked: Any = {"model": "fast", "messages": HELLO, "tools": [weather], "think": True}
    asked["options"] = {"seed": 6}
    whole = ai.chat(**asked).message
    pieces = [piece.message for piece in ai.chat(**asked, stream=True)]
    assert whole.thinking
    assert "".join(piece.thinking or "" for piece in pieces) == whole.thinking
    assert "".join(piece.content for piece in pieces) == whole.content
    calls = [call.function for piece in pieces for call in piece.tool_calls or ()]
    assert calls == [call.function for call in whole.tool_calls]
    assert calls


def test_no_thinking_if_asked_so(ai: ollama.Client):
    answer = ai.chat(model="fast", messages=HELLO, tools=[weather], think=False)
    assert not answer.message.thinking


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
def test_think_may_be_an_effort(ai: ollama.Client, effort: Any):
    assert ai.chat(model="fast", messages=HELLO, think=effort).message.thinking


def test_format(ai: ollama.Client):
    options = {"seed": 2}
    answer = ai.chat(model="fast", messages=HELLO, format=SCHEMA, options=options)
    found = json.loads(answer.message.content)
    assert isinstance(found["city"], str)
    assert isinstance(found["days"], int)
    for wanted in ("json", SCHEMA):
        answer = ai.generate(model="fast", prompt="Hi", format=wanted, options=options)
        assert isinstance(json.loads(answer.response), dict)


def test_logprobs(ai: ollama.Client):
    options = {"num_predict": 3}
    answer = ai.chat(model="fast", messages=HELLO, logprobs=True, top_logprobs=2, options=options)
    assert len(answer.logprobs) == 3
    assert all(len(one.top_logprobs) == 2 for one in answer.logprobs)


def test_embeddings(live: Live, ai: ollama.Client):
    answer = ai.embed(model="fast", input=["Hello", "there"])
    with live.client() as kvd:
        assert answer.embeddings == [kvd.embed("fast", "Hello"), kvd.embed("fast", "there")]
    assert answer.prompt_eval_count == 10
    assert ai.embed(model="fast", input="Hello").embeddings == answer.embeddings[:1]
    assert ai.embeddings(model="fast", prompt="Hello").embedding == answer.embeddings[0]
    (short,) = ai.embed(model="fast", input="Hello", dimensions=4).embeddings
    assert math.isclose(math.hypot(*short), 1.0, rel_tol=1e-6)
    assert len(short) == 4


def test_models(ai: ollama.Client):
    named = {model.model: model for model in ai.list().models}
    assert {"fast", "slow", "on-demand", "broken"} <= named.keys()
    assert len(named["fast"].digest) == 64
    running = {model.name: model for model in ai.ps().models}
    assert "broken" not in running  # the only model that no test can load
    assert running["fast"].context_length == 16_384
    shown = ai.show("fast")
    assert shown.modelinfo["general.architecture"] == "Fake"
    assert shown.modelinfo["Fake.context_length"] == 16_384
    assert shown.capabilities == ["completion", "embedding", "tools", "thinking"]
    assert ai.show("broken:latest").capabilities == ["completion"]


def test_a_request_without_messages_loads_the_model(live_alone: Live):
    with ollama.Client(host=live_alone.url) as ai:
        assert ai.generate(model="on-demand").done_reason == "load"
        assert live_alone.model("on-demand").state == "ready"
        assert ai.chat(model="on-demand", messages=[]).done_reason == "load"
        running = {model.name: model for model in ai.ps().models}
        assert running["on-demand"].expires_at.year == 9999

        ai.chat(model="on-demand", messages=HELLO, keep_alive="1h30m")
        (model,) = [model for model in ai.ps().models if model.name == "on-demand"]
        left = model.expires_at - datetime.now(UTC)
        assert timedelta(minutes=89) < left < timedelta(minutes=91)

        assert ai.generate(model="on-demand", keep_alive=0).done_reason == "unload"
        with live_alone.client() as kvd:
            wait_for("it is unloaded", lambda: "on-demand" in kvd.status().unloaded)
        assert ai.generate(model="on-demand", keep_alive=0).done_reason == "unload"


async def test_embeddings_take_keep_alive_and_the_last_value_counts(home):
    async with serving(home) as stage:
        for value in ("5m", 7, -1):
            await post(stage.url, "/api/generate", keep_alive=value)
        reply = await post(stage.url, "/api/embed", input=[], keep_alive="soon")
    assert stage.backend.kept == {"m": -1.0}
    assert reply.status_code == 400
    assert "'soon' is not a time to stay loaded" in reply.json()["error"]


def test_errors_have_ollamas_form(ai: ollama.Client):
    with pytest.raises(ollama.ResponseError, match=r"^there is no model 'nope'") as missing:
        ai.chat(model="nope", messages=HELLO)
    assert missing.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="there is no model 'nope'") as unknown:
        ai.show("nope")
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match=r"^options\.temperature must be at most"):
        ai.chat(model="fast", messages=HELLO, options={"temperature": 99})
    with pytest.raises(ollama.ResponseError, match=r'^format must be "json" or a JSON schema'):
        httpx_error(ai, "/api/chat", {"model": "fast", "messages": HELLO, "format": "xml"})


def httpx_error(ai: ollama.Client, path: str, body: dict[str, Any]) -> None:
    """Send what the package's own types exclude."""
    ai._request_raw("POST", path, json=body)


def test_what_is_not_supported_is_refused(ai: ollama.Client):
    image = [{"role": "user", "content": "Hi", "images": ["aGk="]}]
    with pytest.raises(ollama.ResponseError, match="kvd accepts only text"):
        httpx_error(ai, "/api/chat", {"model": "fast", "messages": image})
    for field in ("suffix", "template"):
        body = {"model": "fast", "prompt": "Hi", field: "x"}
        with pytest.raises(ollama.ResponseError, match=f"^{field} is not supported"):
            httpx_error(ai, "/api/generate", body)


def test_operations_on_files_are_refused_with_advice(ai: ollama.Client):
    refused = {
        "kvctl pull nope": lambda: ai.pull("nope"),
        "does not publish": lambda: ai.push("fast"),
        "mlx_lm.convert": lambda: ai.create("x", from_="fast"),
        "--alias": lambda: ai.copy("fast", "x"),
        "kvctl rm NAME": lambda: ai.delete("fast"),
    }
    for advice, operation in refused.items():
        with pytest.raises(ollama.ResponseError, match=advice) as found:
            operation()
        assert found.value.status_code == 501
    assert ai.pull("fast").status == "success"
    assert [one.status for one in ai.pull("on-demand:latest", stream=True)] == ["success"]


def test_what_clients_look_for_before_they_use_it(live: Live):
    with httpx.Client(base_url=live.url) as client:
        root = client.get("/")
        assert "Ollama is running" in root.text
        assert root.text.startswith("kvd ")
        assert client.head("/").status_code == 200
        major, minor, _ = client.get("/api/version").json()["version"].split(".")
        assert (int(major), int(minor)) >= (0, 6)


async def post(url: str, path: str, **fields) -> httpx.Response:
    async with httpx.AsyncClient(timeout=30) as client:
        return await client.post(url + path, json={"model": "m"} | fields)


async def test_an_error_in_mid_stream_is_a_line(home):
    late = DeadlineExceeded("too late")
    begun = says("Hello")(messages.Generate(id="http", model="m"))[:2]
    async with serving(home, fails(late, *begun)) as stage:
        reply = await post(stage.url, "/api/chat", messages=HELLO)
    lines = [json.loads(line) for line in reply.text.splitlines()]
    assert (reply.status_code, reply.headers["content-type"]) == (200, "application/x-ndjson")
    assert lines[0]["message"]["content"] == "Hello"
    assert lines[-1] == {"error": "too late"}


async def test_an_error_before_the_stream_sets_the_status(home):
    async with serving(home, fails(UnknownModel("no model named m"))) as stage:
        reply = await post(stage.url, "/api/chat", messages=HELLO)
    assert (reply.status_code, reply.json()) == (404, {"error": "no model named m"})


def answers(text: str, reason: str, *parts: PartStart):
    tokens = messages.Tokens(id="http", index=0, tokens=[1], text=text, parts=list(parts))
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    accepted = messages.Accepted(id="http", prompt_tokens=1, seed=1)
    return lambda _: [accepted, tokens, messages.Done(id="http", reason=reason, usage=usage)]


async def test_a_call_that_the_limit_cuts_off_is_text(home):
    cut = answers('{"city": "Pa', "length", PartStart(0, "call", "weather", "abc"))
    async with serving(home, cut) as stage:
        answer = (await post(stage.url, "/api/chat", messages=HELLO, stream=False)).json()
    assert answer["message"] == {"role": "assistant", "content": '{"city": "Pa'}
    assert answer["done_reason"] == "length"


async def test_calls_without_arguments_and_text_after_them(home):
    parts = [PartStart(0, "call", "time", "a"), PartStart(2, "call", "date", "b")]
    script = answers("{}{}ok", "stop", *parts, PartStart(4, "text"))
    async with serving(home, script) as stage:
        answer = (await post(stage.url, "/api/chat", messages=HELLO, stream=False)).json()
    names = [one["function"] for one in answer["message"]["tool_calls"]]
    assert names == [{"name": "time", "arguments": {}}, {"name": "date", "arguments": {}}]
    assert answer["message"]["content"] == "ok"


async def test_a_stream_that_waits_gets_lines_that_clients_can_parse(home, monkeypatch):
    monkeypatch.setattr("kvd.http.completion.KEEPALIVE_S", 0.05)
    async with (
        serving(home, hangs()) as stage,
        httpx.AsyncClient() as client,
        client.stream(
            "POST", f"{stage.url}/api/chat", json={"model": "m", "messages": HELLO}
        ) as reply,
    ):
        lines = reply.aiter_lines()
        line = json.loads(await anext(lines))
    assert line["message"] == {"role": "assistant", "content": ""}
    assert line["done"] is False


async def test_ollamas_defaults_and_settings(home):
    async with serving(home) as stage:
        await post(stage.url, "/api/chat", messages=HELLO)
        options = {"num_ctx": 99, "num_predict": -1, "repeat_penalty": 1.1, "top_k": 5}
        await post(stage.url, "/api/chat", messages=HELLO, options=options, keep_alive="5m")
    first, second = (call.request for call in stage.backend.calls)
    assert (first.sampling.temperature, first.sampling.top_k) == (0.8, 40)
    assert first.sampling.top_p == 0.9
    assert (second.sampling.repetition_penalty, second.sampling.top_k) == (1.1, 5)
    assert second.max_tokens is None
    assert (first.keep_alive_s, second.keep_alive_s) == (None, 300.0)


async def test_capabilities_are_those_of_the_chat_template(home):
    info = ModelInfo(
        architecture="qwen3",
        parameters=8_000_000_000,
        context_length=40960,
        vocab_size=1,
        layers=1,
        dtype="bfloat16",
        kv_scheme="k8v8",
        kv_layout="",
        page_bytes=1,
        kv_bytes_per_token=1,
        attention_path="",
        attention_error=0.0,
        has_chat_template=True,
        chat=ChatAbilities(tools="json"),
        device="cpu",
    )
    backend = Scripted(models=[ModelStatus(name="m", source="x/m", state="ready", info=info)])
    async with serving(home, backend=backend) as stage:
        shown = (await post(stage.url, "/api/show")).json()
    assert shown["capabilities"] == ["completion", "tools"]
    assert shown["details"]["parameter_size"] == "8.0B"
    assert shown["model_info"]["qwen3.context_length"] == 40960
