"""Clients that disconnect, do not read, or read slowly."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import httpx
import pytest
from structlog.testing import capture_logs

from kvd.host.home import Home
from protocol import errors
from tests.http.calls import BEGUN, CHAT, post, word
from tests.http.live import request
from tests.http.stage import fails, hangs, says, serving, until


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
