"""The real server over a scripted daemon: statuses, headers, access and disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import os
import socket
import time
import tracemalloc

import httpx
import pytest
from openai import AsyncOpenAI, RateLimitError
from structlog.testing import capture_logs

from kvd.host import files
from kvd.host.home import Home
from kvd.http import keys
from protocol import errors
from protocol.messages import Accepted, Tokens
from protocol.types import ModelInfo, ModelStatus
from tests.http.live import request
from tests.http.stage import Scripted, fails, hangs, says, serving, until

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
BEGUN = Accepted(id="http", prompt_tokens=1, seed=1)


def word(text: str = "a") -> Tokens:
    return Tokens(id="http", index=0, tokens=[1], text=text)


def reported(body: bytes = b"", kind: str = "x/y"):
    async def metrics(_: str) -> tuple[bytes, str]:
        return body, kind

    return metrics


async def post(url: str, body=CHAT, **options) -> httpx.Response:
    async with httpx.AsyncClient(verify=False) as client:
        return await client.post(f"{url}/v1/chat/completions", json=body, **options)


def local(path: str) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=path)
    return httpx.AsyncClient(transport=transport, base_url="http://kvd")


async def get(url: str, path: str, **options) -> httpx.Response:
    async with httpx.AsyncClient(verify=False) as client:
        return await client.get(url + path, **options)


# -- errors -----------------------------------------------------------------------------------

ANSWERED = [
    (errors.InvalidRequest("bad", field="stop[0]"), 400, "invalid_request", None),
    (errors.ContextTooLong("long"), 400, "context_length_exceeded", None),
    (errors.UnknownModel("nope"), 404, "model_not_found", None),
    (errors.Overloaded("full", retry_after_s=2.5), 429, "rate_limit_exceeded", "3"),
    (errors.Overloaded("full"), 429, "rate_limit_exceeded", "1"),
    (errors.Draining("ends"), 503, "draining", "5"),
    (errors.WorkerDied("died"), 503, "worker_died", "1"),
    (errors.ModelFailed("failed"), 503, "model_failed", None),
    (errors.InsufficientMemory("big"), 503, "insufficient_memory", None),
    (errors.DeadlineExceeded("late"), 504, "deadline_exceeded", None),
    (errors.Quarantined("poison", story=["a"]), 500, "quarantined", None),
    (errors.NumericalError("nan"), 500, "numerical_error", None),
    (errors.InvalidModel("broken"), 500, "invalid_model", None),
    (errors.InternalError("bug"), 500, "internal", None),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_error_before_the_first_token_has_its_status(home: Home, stream):
    scripts = [fails(error) for error, *_ in ANSWERED]
    async with serving(home, *scripts) as it:
        for error, status, code, retry_after in ANSWERED:
            answer = await post(it.url, CHAT | {"stream": stream})
            said = answer.json()["error"]
            assert (answer.status_code, said["code"]) == (status, code)
            assert (said["message"], said["kvd"]["code"]) == (error.message, error.code)
            assert answer.headers.get("Retry-After") == retry_after
            assert answer.headers["x-should-retry"] in {"true", "false"}
            assert answer.headers["x-request-id"].startswith("req_")
        assert (await post(it.url)).json()["error"]["param"] is None
        await it.backend.settled()


async def test_the_field_of_an_error_becomes_param(home: Home):
    async with serving(home, fails(errors.InvalidRequest("bad", field="stop[0]"))) as it:
        assert (await post(it.url)).json()["error"]["param"] == "stop[0]"
        wrong = await post(it.url, CHAT | {"temperature": -1})
        assert wrong.json()["error"]["param"] == "temperature"
        missing = await post(it.url, {"model": "m"})
        assert missing.json()["error"]["param"] == "messages"
    assert len(it.backend.calls) == 1


@pytest.mark.parametrize(
    ("field", "said", "param", "reported"),
    [
        ("tokens", "token 9 at 0 is", "prompt", "token 9 at 0 is"),
        ("stop_tokens", "stop_tokens names token 9", "stop_token_ids", "stop_token_ids names"),
        ("sampling.logit_bias", "sampling.logit_bias names", "logit_bias", "logit_bias names"),
    ],
)
async def test_errors_of_workers_name_fields_of_http(home: Home, field, said, param, reported):
    async with serving(home, fails(errors.InvalidRequest(said, field=field))) as it:
        error = (await post(it.url)).json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(reported)


async def test_an_error_in_the_middle_of_a_stream_ends_it(home: Home):
    script = fails(errors.WorkerDied("died"), BEGUN, word())
    async with serving(home, script) as it:
        answer = await post(it.url, CHAT | {"stream": True})
        assert answer.status_code == 200
        lines = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "worker_died"
        assert "[DONE]" not in answer.text
        await it.backend.settled()


async def test_unknown_paths_and_methods(home: Home):
    async with serving(home) as it:
        missing = await get(it.url, "/v1/embeddings")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        wrong = await get(it.url, "/v1/chat/completions")
        assert (wrong.status_code, wrong.headers["Allow"]) == (405, "POST")
        assert wrong.json()["error"]["code"] == "method_not_allowed"
        assert "supports POST" in wrong.json()["error"]["message"]
        lost = await get(it.url, "/chat/completions")
        assert "did you mean /v1/chat/completions?" in lost.json()["error"]["message"]


async def test_a_bug_in_the_daemon_is_an_answer_and_a_line_in_the_log(home: Home):
    def breaks(_):
        raise RuntimeError("secret of the implementation")

    async with serving(home, breaks, says("ok")) as it:
        with capture_logs() as logs:
            answer = await post(it.url)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
        assert "secret" not in answer.text
        assert [one["request"] for one in logs if one["log_level"] == "error"] == [
            answer.headers["x-request-id"]
        ]
        assert (await post(it.url)).status_code == 200


# -- bodies -----------------------------------------------------------------------------------


async def test_a_body_over_the_limit_is_refused_before_it_is_read(home: Home):
    async with serving(home, body_limit=2048) as it:
        large = await post(it.url, CHAT | {"user": "x" * 3000})
        assert (large.status_code, large.json()["error"]["code"]) == (413, "request_too_large")

        async def pieces():
            for _ in range(100):
                yield b"x" * 1000

        async with httpx.AsyncClient(verify=False) as client:
            chunked = await client.post(f"{it.url}/v1/completions", content=pieces())
        assert chunked.status_code == 413
        assert (await post(it.url, CHAT | {"user": "x" * 1500})).status_code == 200


async def test_compressed_bodies_are_refused_unread(home: Home):
    packed = gzip.compress(json.dumps(CHAT).encode())
    async with serving(home) as it, httpx.AsyncClient(verify=False) as client:
        url = f"{it.url}/v1/chat/completions"
        with capture_logs() as logs:
            for coding, body in [("gzip", packed), ("gzip", packed[:20]), ("br", packed)]:
                headers = {"Content-Encoding": coding}
                refused = await client.post(url, content=body, headers=headers)
                assert refused.status_code == 415
                assert refused.json()["error"]["code"] == "unsupported_encoding"
        assert [one for one in logs if one["log_level"] == "error"] == []
        plain = await client.post(url, json=CHAT, headers={"Content-Encoding": "identity"})
        assert plain.status_code == 200


async def test_an_incomplete_request_times_out(home: Home):
    async with serving(home, idle_timeout_s=0.2) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: loc")
        silent, other = await asyncio.open_connection("127.0.0.1", it.port)
        assert await asyncio.wait_for(reader.read(), 5) == b""
        assert await asyncio.wait_for(silent.read(), 5) == b""
        writer.close()
        other.close()

        reader, writer = await asyncio.open_connection("127.0.0.1", it.port)
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
        )
        assert (await asyncio.wait_for(reader.readline(), 5)).startswith(b"HTTP/1.1 408 ")
        writer.close()


@pytest.fixture
def little_room(monkeypatch):
    monkeypatch.setattr("kvd.http.bodies.MOST_BYTES", 10_000)
    monkeypatch.setattr("kvd.http.bodies.FREE_BYTES", 1000)


LARGE = CHAT | {"user": "x" * 4000}
PART = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000\r\n\r\n"


async def test_large_bodies_share_a_limit_per_kind_of_socket(home: Home, little_room):
    async with serving(home) as it:
        _, slow = await asyncio.open_connection("127.0.0.1", it.port)
        slow.write(PART + b"x" * 8500)

        async def answered(status: int) -> bool:
            return (await post(it.url, LARGE)).status_code == status

        async with asyncio.timeout(10):
            while not await answered(429):
                pass
            assert (await post(it.url)).status_code == 200, "small bodies are always read"
            async with local(it.socket) as client:
                other = await client.post("/v1/chat/completions", json=LARGE)
            assert other.status_code == 200, "the Unix socket has a separate limit"
            slow.close()
            while not await answered(200):
                pass


async def test_only_the_received_part_of_a_body_counts(home: Home, little_room):
    async with serving(home) as it:
        chunked = PART.replace(b"Content-Length: 9000", b"Transfer-Encoding: chunked")
        halves = [(PART, b"{"), (chunked, b"1\r\n{\r\n")] * 8
        writers = []
        for head, piece in halves:
            _, writer = await asyncio.open_connection("127.0.0.1", it.port)
            writer.write(head + piece)
            writers.append(writer)
        for _ in range(3):
            assert (await post(it.url, LARGE)).status_code == 200
        for writer in writers:
            writer.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_body_is_not_kept_while_its_answer_is_made(home: Home, stream):
    async with serving(home, hangs(BEGUN)) as it:
        tracemalloc.start()
        try:
            large = CHAT | {"stream": stream, "metadata": ["x" * 3_000_000]}
            asking = asyncio.create_task(post(it.url, large))
            await until(lambda: it.backend.calls)
            here = tracemalloc.take_snapshot().filter_traces(
                [tracemalloc.Filter(True, "*/kvd/http/*"), tracemalloc.Filter(True, "*/aiohttp/*")]
            )
        finally:
            tracemalloc.stop()
        assert sum(one.size for one in here.statistics("filename")) < 1_000_000
        asking.cancel()
        await it.backend.settled()


async def answered(port: int, head: bytes, body: bytes = b"") -> bytes:
    """Return the first line that a raw request gets."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(head + b"Host: localhost\r\n\r\n" + body)
    line = await asyncio.wait_for(reader.readline(), 5)
    writer.close()
    return line


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/healthz", "/nowhere"])
async def test_an_unknown_expectation_is_answered(home: Home, path):
    async with serving(home) as it:
        body = json.dumps(CHAT).encode()
        method = "POST" if "chat" in path else "GET"
        head = f"{method} {path} HTTP/1.1\r\nExpect: wonders\r\nContent-Length: {len(body)}\r\n"
        with capture_logs() as logs:
            line = await answered(it.port, head.encode(), body)
        assert line.startswith(b"HTTP/1.1 200 " if method == "POST" else b"HTTP/1.1 417 ")
        assert [one for one in logs if one["log_level"] == "error"] == []


async def test_a_body_that_will_be_refused_is_not_requested(home: Home):
    key = keys.make()
    expects = b"POST /v1/completions HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: %d\r\n"
    known = expects + b"Authorization: Bearer " + key.encode() + b"\r\n"
    async with serving(home, keys={"me": keys.hashed(key)}) as it:
        assert (await answered(it.port, expects % 9)).startswith(b"HTTP/1.1 401 ")
        assert (await answered(it.port, known % 10**9)).startswith(b"HTTP/1.1 413 ")
        assert (await answered(it.port, known % 9)).startswith(b"HTTP/1.1 100 ")
        old = known.replace(b"HTTP/1.1", b"HTTP/1.0")
        assert (await answered(it.port, old % 2, b"{}")).startswith(b"HTTP/1.0 400 ")


# -- disconnects ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_cancels_its_request(home: Home, stream):
    async with serving(home, hangs(BEGUN, word())) as it:
        asking = asyncio.create_task(post(it.url, CHAT | {"stream": stream}))
        await until(lambda: it.backend.calls)
        assert not it.backend.calls[0].cancelled
        asking.cancel()
        await it.backend.settled()


@pytest.mark.parametrize("listener", ["tcp", "unix"])
async def test_a_disconnect_after_half_of_the_next_request_is_noticed(home: Home, listener):
    async with serving(home, hangs(BEGUN), idle_timeout_s=0.4) as it:
        if listener == "tcp":
            _, writer = await asyncio.open_connection("127.0.0.1", it.port)
        else:
            _, writer = await asyncio.open_unix_connection(it.socket)
        writer.write(request("/v1/chat/completions", CHAT))
        await until(lambda: it.backend.calls)
        # More than the server reads ahead, so that it does not read the disconnect either.
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 8000000\r\n\r\n")
        writer.write(b"x" * 600_000)
        await asyncio.sleep(0.1)
        assert not it.backend.calls[0].cancelled
        writer.transport.abort()
        await it.backend.settled()


async def test_a_client_that_does_not_read_is_cut_off_and_the_others_are_not(home: Home):
    async with serving(home, hangs(BEGUN), says("ok"), unread_limit=100_000) as it:
        with capture_logs() as logs:
            _, slow = await asyncio.open_connection("127.0.0.1", it.port)
            body = json.dumps(CHAT | {"stream": True}).encode()
            head = f"Host: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()
            slow.write(b"POST /v1/chat/completions HTTP/1.1\r\n" + head + body)
            await until(lambda: it.backend.calls)
            slow.transport.pause_reading()
            (call,) = it.backend.calls
            for _ in range(20_000):
                call.deliver(word("x" * 1000))
                if call.cancelled:
                    break
                await asyncio.sleep(0)
            assert (await post(it.url)).status_code == 200
            await it.backend.settled()
        slow.close()
    assert [one["event"][:11] for one in logs if one["log_level"] == "warning"] == ["slow reader"]


async def test_an_answer_that_gets_too_large_in_one_piece_is_refused(home: Home, monkeypatch):
    monkeypatch.setattr("kvd.http.whole_answer.MOST_BYTES", 1000)
    async with serving(home, hangs(BEGUN, word("x" * 600), word("x" * 600))) as it:
        refused = await post(it.url)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream")
        await it.backend.settled()


def slow_client(stage, *, stream: bool) -> socket.socket:
    """Return a connection that has sent a request and buffers little of the answer."""
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16_384)
    raw.connect(("127.0.0.1", stage.port))
    raw.sendall(request("/v1/chat/completions", CHAT | {"stream": stream}))
    return raw


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_reads_nothing_of_its_answer_is_cut_off(home: Home, stream):
    text = "x" * 3_900_000  # more than the kernel buffers, less than `unread_limit`
    async with serving(home, says(text), idle_timeout_s=0.3) as it:
        with capture_logs() as logs, slow_client(it, stream=stream):
            await until(lambda: [one for one in logs if "slow reader" in one["event"]])
        assert (await post(it.url)).status_code == 200


async def test_a_client_that_reads_its_answer_slowly_gets_all_of_it(home: Home):
    text = "x" * 3_900_000
    async with serving(home, says(text), idle_timeout_s=0.3) as it:
        with slow_client(it, stream=False) as raw:
            raw.setblocking(False)
            loop, found, began = asyncio.get_running_loop(), 0, time.monotonic()
            while found < len(text):
                piece = await asyncio.wait_for(loop.sock_recv(raw, 2**18), 5)
                assert piece, found
                found += len(piece)
                await asyncio.sleep(0.003)
            assert time.monotonic() - began > 0.5


async def test_several_calls_of_one_request_end_together(home: Home):
    failing = fails(errors.Overloaded("full"), BEGUN)
    async with serving(home, hangs(BEGUN), failing) as it:
        async with httpx.AsyncClient(verify=False) as client:
            body = {"model": "m", "prompt": ["a", "b"]}
            answer = await client.post(f"{it.url}/v1/completions", json=body)
        assert answer.status_code == 429
        await it.backend.settled()
        assert [call.request.prompt for call in it.backend.calls] == ["a", "b"]


# -- access -----------------------------------------------------------------------------------


async def test_with_keys_requests_over_tcp_need_one_except_health_checks(home: Home):
    key = keys.make()
    async with serving(home, keys={"me": keys.hashed(key)}, metrics=reported()) as it:
        for path in ("/v1/models", "/v1/models/m", "/metrics"):
            refused = await get(it.url, path)
            assert (refused.status_code, refused.json()["error"]["code"]) == (
                401,
                "invalid_api_key",
            )
            allowed = await get(it.url, path, headers={"Authorization": f"Bearer {key}"})
            assert allowed.status_code == 200
        wrong = await post(it.url, headers={"Authorization": f"Bearer {keys.make()}"})
        assert wrong.status_code == 401
        for path in ("/", "/healthz", "/readyz"):
            assert (await get(it.url, path)).status_code == 200
        assert it.backend.calls == []
        transport = httpx.AsyncHTTPTransport(uds=it.socket)
        async with httpx.AsyncClient(transport=transport, base_url="http://kvd") as client:
            assert (await client.get("/v1/models")).status_code == 200


async def test_a_foreign_host_or_origin_is_refused_everywhere(home: Home):
    async with serving(home, metrics=reported()) as it:
        for path in ("/", "/healthz", "/readyz", "/metrics", "/v1/models", "/nowhere"):
            rebound = await get(it.url, path, headers={"Host": f"evil.example:{it.port}"})
            assert (rebound.status_code, rebound.json()["error"]["code"]) == (
                403,
                "host_not_allowed",
            )
            page = await get(it.url, path, headers={"Origin": "https://evil.example"})
            assert (page.status_code, page.json()["error"]["code"]) == (403, "origin_not_allowed")
            assert "access-control-allow-origin" not in page.headers
        simple = {"Origin": "https://evil.example", "Content-Type": "text/plain"}
        assert (await post(it.url, headers=simple)).status_code == 403
        assert it.backend.calls == []


async def test_pages_of_configured_origins_are_served(home: Home):
    page = "https://chat.example"
    key = keys.make()
    settings = {"origins": [page], "keys": {"me": keys.hashed(key)}}
    async with serving(home, **settings) as it, httpx.AsyncClient(verify=False) as client:
        url = f"{it.url}/v1/chat/completions"
        ask = {
            "Origin": page,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,x-stainless-os",
            "Access-Control-Request-Private-Network": "true",
        }
        preflight = await client.options(url, headers=ask)
        assert preflight.status_code == 204
        assert preflight.headers["Access-Control-Allow-Origin"] == page
        assert preflight.headers["Access-Control-Allow-Private-Network"] == "true"
        assert preflight.headers["Access-Control-Allow-Headers"] == "authorization,x-stainless-os"
        headers = {"Origin": page, "Authorization": f"Bearer {key}"}
        answer = await client.post(url, json=CHAT | {"stream": True}, headers=headers)
        assert (answer.status_code, answer.headers["Access-Control-Allow-Origin"]) == (200, page)
        without = await client.post(url, json=CHAT, headers={"Origin": page})
        assert (without.status_code, without.headers["Access-Control-Allow-Origin"]) == (401, page)
        other = await client.options(url, headers=ask | {"Origin": "https://evil.example"})
        assert other.status_code == 403


async def test_another_user_is_refused_on_the_unix_socket(home: Home):
    async with serving(home, uid_of=lambda _: os.geteuid() + 1) as it:
        transport = httpx.AsyncHTTPTransport(uds=it.socket)
        async with httpx.AsyncClient(transport=transport, base_url="http://kvd") as client:
            for path in ("/", "/healthz", "/v1/models"):
                refused = await client.get(path)
                assert refused.status_code == 403
                assert refused.json()["error"]["code"] == "permission_denied"
            assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 403
        assert it.backend.calls == []


# -- the rest ---------------------------------------------------------------------------------


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
    assert time.monotonic() - began < 1.8, "running requests get 1 s"
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


async def test_a_bug_in_the_middle_of_a_stream_ends_its_connection(home: Home, monkeypatch):
    def breaks(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr("kvd.http.completion.comment", breaks)
    monkeypatch.setattr("kvd.http.completion.KEEPALIVE_S", 0.05)
    async with serving(home, hangs(word())) as it:
        with capture_logs() as logs, pytest.raises(httpx.RemoteProtocolError):
            await post(it.url, CHAT | {"stream": True})
        assert [one["event"] for one in logs if one["log_level"] == "error"] == [
            "request handler failed"
        ]
        await it.backend.settled()


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
