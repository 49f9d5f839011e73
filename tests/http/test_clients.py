"""openai, httpx, curl and Prometheus against a real daemon on the fake engine."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess

import httpx
import openai
import pytest

from tests.http.live import Live, asked
from tests.process.helpers import source, wait_for

HELLO = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def ai(live: Live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_the_status_and_the_welcome_show_the_addresses(live: Live):
    with live.client() as kvd:
        tcp, unix = kvd.status().http
    assert unix == f"unix:{live.home.http_socket}"
    assert f"http    {tcp}/v1" in live.output.read_text()
    assert live.home.http_socket.stat().st_mode & 0o777 == 0o600


def test_openai_chat_has_the_same_text_as_the_socket(live: Live, ai: openai.OpenAI):
    answer = ai.chat.completions.create(
        model="fast", messages=HELLO, max_completion_tokens=20, temperature=0.7, seed=5
    )
    with live.client() as kvd:
        history = [(message["role"], message["content"]) for message in HELLO]
        same = kvd.generate("fast", messages=history, max_tokens=20, temperature=0.7, seed=5)
        assert answer.choices[0].message.content == same.text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 20
    assert answer.model_extra["kvd"]["seed"] == 5
    assert answer._request_id.startswith("req_")


def test_openai_streams_add_up_to_the_answer_in_one_piece(ai: openai.OpenAI):
    settings = {"model": "fast", "messages": HELLO, "max_tokens": 30, "seed": 1, "n": 2}
    whole = ai.chat.completions.create(**settings)
    texts, ends, usage = ["", ""], ["", ""], None
    stream = ai.chat.completions.create(
        **settings, stream=True, stream_options={"include_usage": True}
    )
    for chunk in stream:
        usage = chunk.usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert ends == ["length", "length"]
    assert usage == whole.usage
    assert usage.completion_tokens == 60


def test_openai_completions(ai: openai.OpenAI):
    answer = ai.completions.create(
        model="fast", prompt=["a", "b"], max_tokens=4, logprobs=2, seed=3, echo=True
    )
    first, second = answer.choices
    assert (first.index, second.index) == (0, 1)
    assert first.text.startswith("a ")
    assert second.text.startswith("b ")
    assert len(first.logprobs.tokens) == 5
    assert all(len(top) == 2 for top in first.logprobs.top_logprobs[1:])
    assert answer.usage.prompt_tokens == 2


def test_openai_logprobs_and_stop(ai: openai.OpenAI):
    settings = {"model": "fast", "messages": HELLO, "max_tokens": 8, "seed": 2}
    answer = ai.chat.completions.create(**settings, logprobs=True, top_logprobs=3)
    reported = answer.choices[0].logprobs.content
    assert "".join(one.token for one in reported) == answer.choices[0].message.content
    assert all(len(one.top_logprobs) == 3 for one in reported)
    word = reported[4].token
    stopped = ai.chat.completions.create(**settings, stop=[word]).choices[0]
    assert stopped.finish_reason == "stop"
    assert answer.choices[0].message.content.startswith(stopped.message.content)
    assert word not in stopped.message.content


def test_settings_that_only_kvd_has_are_accepted(ai: openai.OpenAI):
    extra = {"top_k": 5, "priority": 3, "min_tokens": 2, "ignore_eos": True}
    answer = ai.chat.completions.create(
        model="fast", messages=HELLO, max_tokens=4, extra_body=extra
    )
    assert answer.usage.completion_tokens == 4
    with pytest.raises(openai.APIStatusError) as late:
        ai.chat.completions.create(
            model="slow", messages=HELLO, max_tokens=400, extra_body={"deadline_s": 0.2}
        )
    assert (late.value.status_code, late.value.code) == (504, "deadline_exceeded")


def test_openais_errors(ai: openai.OpenAI):
    with pytest.raises(openai.NotFoundError) as missing:
        ai.chat.completions.create(model="nope", messages=HELLO)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as wrong:
        ai.chat.completions.create(model="fast", messages=HELLO, temperature=99)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        ai.completions.create(model="fast", prompt="x", max_tokens=10**6)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as audio:
        ai.chat.completions.create(model="fast", messages=HELLO, modalities=["audio"])
    assert audio.value.param == "modalities"
    with pytest.raises(openai.NotFoundError):
        ai.images.generate(model="fast", prompt="x")


def test_openai_lists_models_and_a_request_loads_an_unloaded_one(ai: openai.OpenAI, live: Live):
    live.unload("on-demand")
    states = {model.id: model.model_extra["kvd"]["state"] for model in ai.models.list()}
    assert states["fast"] == "ready"
    assert states["on-demand"] == "unloaded"
    answer = ai.chat.completions.create(model="on-demand", messages=HELLO, max_tokens=3)
    assert answer.usage.completion_tokens == 3
    assert ai.models.retrieve("on-demand").model_extra["kvd"]["state"] == "ready"


def test_a_request_for_a_model_that_cannot_be_loaded_should_not_be_retried(ai: openai.OpenAI):
    with pytest.raises(openai.InternalServerError) as broken:
        ai.chat.completions.create(model="broken", messages=HELLO)
    assert (broken.value.status_code, broken.value.code) == (500, "invalid_model")
    assert broken.value.response.headers["x-should-retry"] == "false"


async def test_openais_async_client_has_many_requests_at_once(live: Live):
    async with openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none") as ai:

        async def one(seed: int) -> str:
            stream = await ai.chat.completions.create(
                model="fast", messages=HELLO, max_tokens=20, seed=seed, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

        texts = await asyncio.gather(*(one(seed % 8) for seed in range(32)))
    assert texts == texts[:8] * 4
    assert len(set(texts)) == 8


def test_httpx_over_the_unix_socket(client: httpx.Client):
    answer = client.post("/v1/chat/completions", json=asked(max_tokens=5))
    assert answer.json()["usage"]["completion_tokens"] == 5
    assert answer.headers["server"].startswith("kvd/")
    with client.stream("POST", "/v1/completions", json=asked_text(stream=True)) as stream:
        lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json()["status"] == "ready"
    assert client.get("/").text.startswith("kvd ")


def asked_text(**fields) -> dict:
    return {"model": "fast", "prompt": "Hi", "max_tokens": 5} | fields


def test_curl_over_the_unix_socket(live: Live):
    body = json.dumps(asked(max_tokens=3, stream=True))
    done = subprocess.run(
        [
            *("curl", "-sSN", "--fail-with-body", "--unix-socket", str(live.home.http_socket)),
            *("http://kvd/v1/chat/completions", "-d", body),
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.endswith("data: [DONE]\n\n")


def test_prometheus_finds_metrics(client: httpx.Client):
    reported = client.get("/metrics")
    assert reported.status_code == 200
    assert "kvd_" in reported.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_ends_its_request(client: httpx.Client, live: Live, stream):
    live.wait_idle("slow")
    before = live.model("slow").stats.generated_tokens
    body = asked(model="slow", max_tokens=400, stream=stream)
    with (
        contextlib.suppress(httpx.ReadTimeout),
        client.stream("POST", "/v1/chat/completions", json=body, timeout=0.5) as answer,
    ):
        next(answer.iter_bytes())
    live.wait_idle("slow")
    assert live.model("slow").stats.generated_tokens - before < 300


@pytest.mark.slow
def test_a_stream_outlives_its_worker(live: Live, ai: openai.OpenAI):
    live.load(source(tps=100), "mortal")
    settings = {"model": "mortal", "messages": HELLO, "max_tokens": 60, "seed": 4}
    undisturbed = ai.chat.completions.create(**settings).choices[0].message.content
    stream = ai.chat.completions.create(**settings, stream=True)
    text, extension, killed = "", None, False
    for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        extension = (chunk.model_extra or {}).get("kvd")
        if len(text) > 20 and not killed:
            killed = True
            os.kill(live.worker_pid("mortal"), signal.SIGKILL)
    assert text == undisturbed
    assert extension["resumed"] == 1
    assert extension["paused_ms"] > 0


@pytest.mark.slow
def test_a_drain_finishes_streams_and_refuses_new_requests(live_alone: Live):
    live = live_alone
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as ai:
        settings = {"model": "slow", "messages": HELLO, "max_tokens": 40}
        stream = iter(ai.chat.completions.create(**settings, stream=True))
        next(stream)
        live.signal(signal.SIGTERM)
        unready = wait_for("the daemon drains", lambda: ready_is(f"{live.url}/readyz", 503))
        assert unready["status"] == "draining"
        with pytest.raises(openai.InternalServerError) as refused:
            ai.chat.completions.create(**settings)
        assert (refused.value.status_code, refused.value.code) == (503, "draining")
        last = list(stream)[-1]
    assert last.choices[0].finish_reason == "length"
    assert live.wait() == 0
    assert not live.home.http_socket.exists()


def ready_is(url: str, status: int) -> dict | None:
    answer = httpx.get(url)
    return answer.json() if answer.status_code == status else None


def test_a_full_queue_is_429_until_other_requests_end(live_alone: Live):
    line = {"v": 1, "op": "generate", "model": "slow", "prompt": "x", "max_tokens": 400}
    many = b"".join(json.dumps(line | {"id": str(i)}).encode() + b"\n" for i in range(1024))
    url = f"{live_alone.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as ai:
        settings = {"model": "slow", "messages": HELLO, "max_tokens": 1}
        with live_alone.connect() as raw:
            raw.sendall(many)
            wait_for("the queue is full", lambda: live_alone.running("slow") == 1024)
            with pytest.raises(openai.RateLimitError) as busy:
                ai.chat.completions.create(**settings)
        assert busy.value.code == "rate_limit_exceeded"
        assert int(busy.value.response.headers["Retry-After"]) >= 1
        live_alone.wait_idle("slow")
        assert ai.chat.completions.create(**settings).usage.completion_tokens == 1
