"""Bodies of requests: size limits, memory, expectations and incomplete requests."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc

import httpx
import pytest
from structlog.testing import capture_logs

from kvd.host.home import Home
from kvd.http import keys
from tests.http.calls import BEGUN, CHAT, local, post
from tests.http.stage import hangs, serving, until


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
