"""The real server over a scripted daemon: models, readiness, metrics, keepalives, connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time

import httpx
import pytest
from openai import AsyncOpenAI, RateLimitError

from kvd.host import files
from kvd.host.home import Home
from protocol import errors
from protocol.types import ModelInfo, ModelStatus
from tests.http.calls import BEGUN, CHAT, get, post, reported
from tests.http.stage import Scripted, fails, hangs, says, serving, until


async def test_models(home: Home):
    info = ModelInfo(
        architecture="Fake",
        parameters=0,
        context_length=4096,
        vocab_size=1,
        layers=1,
        dtype="none",
        kv_scheme="k8v8",
        kv_layout="none",
        page_bytes=1,
        kv_bytes_per_token=1,
        attention_path="fake",
        attention_error=0.0,
        has_chat_template=True,
        device="none",
    )
    ready = ModelStatus(name="org/b:1", source="fake:", state="ready", info=info)
    backend = Scripted(models=[ready], unloaded=["a"])
    async with serving(home, backend=backend) as it:
        listed = (await get(it.url, "/v1/models")).json()
        assert [(one["id"], one["kvd"]["state"]) for one in listed["data"]] == [
            ("a", "unloaded"),
            ("org/b:1", "ready"),
        ]
        one = (await get(it.url, "/v1/models/org/b:1")).json()
        assert one == listed["data"][1]
        assert (one["object"], one["kvd"]["context_length"]) == ("model", 4096)
        assert (await get(it.url, "/v1/models/org%2Fb:1")).json() == one
        missing = await get(it.url, "/v1/models/c")
        assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")
        close = (await get(it.url, "/v1/models/B:1")).json()["error"]["message"]
        assert "loaded by the next request: a); did you mean 'org/b:1'?" in close


@pytest.mark.parametrize(
    ("states", "unloaded", "daemon", "starting", "said"),
    [
        ([], [], "serving", False, "ready"),
        ([], [], "serving", True, "loading"),
        (["loading"], [], "serving", False, "loading"),
        (["loading", "ready"], [], "serving", True, "ready"),
        (["backoff"], [], "serving", False, "loading"),
        (["failed"], [], "serving", False, "failed"),
        ([], ["a"], "serving", False, "ready"),
        (["ready"], [], "draining", False, "draining"),
    ],
)
async def test_readiness(home: Home, states, unloaded, daemon, starting, said):
    models = [ModelStatus(name=f"m{i}", source="x", state=s) for i, s in enumerate(states)]
    backend = Scripted(models=models, unloaded=unloaded, state=daemon)
    async with serving(home, backend=backend, starting=starting) as it:
        answer = await get(it.url, "/readyz")
        assert answer.json()["status"] == said
        assert sum(answer.json()["models"].values()) == len(states) + len(unloaded)
        assert answer.status_code == (200 if said == "ready" else 503)
        assert (await get(it.url, "/healthz")).status_code == 200


async def test_metrics_are_served_if_there_are_any(home: Home):
    async with serving(home) as it:
        assert (await get(it.url, "/metrics")).status_code == 404
    async with serving(home, metrics=reported(b"kvd_x 1\n", "text/plain; version=0")) as it:
        answer = await get(it.url, "/metrics")
        assert answer.text == "kvd_x 1\n"
        assert answer.headers["Content-Type"] == "text/plain; version=0"


async def test_openais_client_waits_and_retries(home: Home):
    busy = fails(errors.Overloaded("full", retry_after_s=0.05))
    async with serving(home, busy, busy, says("at", " last")) as it:
        async with AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none") as client:
            answer = await client.chat.completions.create(**CHAT)
            assert answer.choices[0].message.content == "at last"
        assert len(it.backend.calls) == 3
    async with serving(home, busy) as it:
        async with AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none", max_retries=1) as client:
            with pytest.raises(RateLimitError) as caught:
                await client.chat.completions.create(**CHAT)
        assert caught.value.code == "rate_limit_exceeded"
        assert len(it.backend.calls) == 2


async def test_calls_have_the_id_of_the_answers_header(home: Home):
    """`kvctl explain --request` finds them by it."""
    async with serving(home) as stage, httpx.AsyncClient(base_url=stage.url) as http:
        for stream in (False, True):
            body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": stream}
            answer = await http.post("/v1/chat/completions", json=body)
            assert stage.backend.calls[-1].request.id == answer.headers["x-request-id"]


async def test_openais_client_does_not_retry_permanent_errors(home: Home):
    async with serving(home, fails(errors.ModelFailed("gave up"))) as it:
        async with AsyncOpenAI(base_url=f"{it.url}/v1", api_key="none") as client:
            with pytest.raises(Exception, match="gave up"):
                await client.chat.completions.create(**CHAT)
        assert len(it.backend.calls) == 1


async def test_a_silent_stream_sends_keepalives(home: Home, monkeypatch):
    monkeypatch.setattr("kvd.http.completion.KEEPALIVE_S", 0.05)
    async with serving(home, hangs(BEGUN)) as it, httpx.AsyncClient(verify=False) as client:
        url = f"{it.url}/v1/chat/completions"
        async with client.stream("POST", url, json=CHAT | {"stream": True}) as answer:
            lines = [line async for line in first(answer.aiter_lines(), 4)]
    assert lines == [": accepted", "", ": waiting", ""]


async def first(lines, count: int):
    async for line in lines:
        yield line
        count -= 1
        if not count:
            return


async def test_closing_the_server_ends_running_requests(home: Home):
    async with serving(home, hangs(BEGUN)) as it:
        asking = asyncio.create_task(post(it.url, CHAT | {"stream": True}))
        await until(lambda: it.backend.calls)
        began = time.monotonic()
    assert time.monotonic() - began < 10, "running requests get 1 s; aiohttp's default is 60"
    await it.backend.settled()
    with pytest.raises(httpx.RemoteProtocolError):
        await asking


async def test_too_many_connections_are_refused_by_that_listener_alone(home: Home, monkeypatch):
    monkeypatch.setattr("kvd.http.server.MOST_CONNECTIONS", 1)
    async with serving(home) as it:
        _, holds = await asyncio.open_connection("127.0.0.1", it.port)
        async with asyncio.timeout(10):
            while (await get(it.url, "/healthz")).status_code != 503:
                pass
        transport = httpx.AsyncHTTPTransport(uds=it.socket)
        async with httpx.AsyncClient(transport=transport, base_url="http://kvd") as client:
            assert (await client.get("/healthz")).status_code == 200
        holds.close()


async def test_connections_at_once_have_the_same_limit_as_one_after_the_other(
    home: Home, monkeypatch
):
    """They are accepted in one pass of the event loop, before aiohttp lists the first of them."""
    monkeypatch.setattr(files, "limit", lambda: 40)
    async with serving(home) as stage:
        many = [socket.create_connection(("127.0.0.1", stage.port)) for _ in range(30)]
        refused = 0
        for one in many:
            one.setblocking(False)
        for _ in range(20):  # passes of the loop, to accept and answer all
            await asyncio.sleep(0.01)
        for one in many:
            with one, contextlib.suppress(BlockingIOError):
                refused += one.recv(12) == b"HTTP/1.1 503"
        assert refused == 20
