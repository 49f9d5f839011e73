"""Every error has OpenAI's form, also those that aiohttp finds, and none repeats a long text."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from kvd.host.home import Home
from kvd.http.connection import FullConnection
from tests.http.stage import serving

CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}
BODY = json.dumps(CHAT).encode()
HOST = b"Host: localhost\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST
SECOND = b"GET /second HTTP/1.1\r\n" + HOST + b"\r\n"
LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKED = b"Transfer-Encoding: chunked\r\n"


async def exchange(port: int, data: bytes) -> bytes:
    """Send bytes; return everything until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    try:
        async with asyncio.timeout(20):
            return await reader.read()
    finally:
        writer.close()


def parsed(answer: bytes) -> tuple[int, dict[str, str], dict[str, str]]:
    """Return the status, the headers and the error object of a single answer."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body)
    return int(status.split()[1]), headers, json.loads(body)["error"]


MALFORMED = {
    "no HTTP": b"\x16\x03\x01\x02\x00\r\n\r\n",
    "a version of the future": b"GET / HTTP/9.9\r\n\r\n",
    "a long path": b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n",
    "a long header": b"GET / HTTP/1.1\r\nX-A: " + b"a" * 20_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\n" + HOST + b"X-A: b\r\n" * 500 + b"\r\n",
    "NUL in a header": b"GET / HTTP/1.1\r\n" + HOST + b"X-A: a\0b\r\n\r\n",
    "a space before the colon": POST + b"Content-Length : 3\r\n\r\nabc",
    "a folded header": POST + b"X-A: a\r\n\tb\r\n" + LENGTH + b"\r\n" + BODY,
    "a folded length": POST + b"Content-Length:\r\n 0\r\n\r\n" + SECOND,
    "a negative length": POST + b"Content-Length: -1\r\n\r\n",
    "a signed length": POST + b"Content-Length: +3\r\n\r\nabc",
    "a length in hex": POST + b"Content-Length: 0x3\r\n\r\nabc",
    "two equal lengths": POST + LENGTH * 2 + b"\r\n" + BODY,
    "two lengths": POST + LENGTH + b"Content-Length: 0\r\n\r\n" + BODY,
    "a list of lengths": POST + b"Content-Length: 3, 3\r\n\r\nabc",
    "a huge length": POST + b"Content-Length: %d\r\n\r\n" % 2**70,
    "length and chunks": POST + CHUNKED + b"Content-Length: 3\r\n\r\n0\r\n\r\n" + SECOND,
    "chunks and length": POST + b"Content-Length: 3\r\n" + CHUNKED + b"\r\n0\r\n\r\n" + SECOND,
    "an unknown coding": POST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n" + SECOND,
    "chunks that are not last": POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "chunks twice": POST + CHUNKED * 2 + b"\r\n0\r\n\r\n" + SECOND,
    "chunks of HTTP/1.0": POST.replace(b"1.1", b"1.0") + CHUNKED + LENGTH + b"\r\n0\r\n\r\n",
    "a bare CR": POST + b"X-A: a\rContent-Length: 0\r\n\r\n" + SECOND,
    "a bare LF": POST + b"X-A: a\nTransfer-Encoding: chunked\n\r\n0\r\n\r\n" + SECOND,
}


@pytest.mark.parametrize("kind", MALFORMED)
async def test_malformed_http_is_answered_once_with_an_error_object(home: Home, kind):
    async with serving(home) as it:
        status, headers, error = parsed(await exchange(it.port, MALFORMED[kind]))
    assert (status, error["code"]) == (400, "bad_request")
    assert error["message"].startswith("HTTP error: ")
    assert len(error["message"]) < 2500
    assert headers["server"].startswith("kvd/")
    assert not it.backend.calls


@pytest.mark.parametrize(
    "chunks",
    [
        b"zz\r\n",
        b"-1\r\n",
        b"0x1\r\na\r\n0\r\n\r\n",
        b"1ffffffffffffffff\r\na",
        b"1\r\nab\r\n0\r\n\r\n",
        b"1;a\nb\r\na\r\n0\r\n\r\n",
        b"1 \r\na\r\n0\r\n\r\n",
    ],
)
async def test_malformed_chunks_never_reach_the_daemon(home: Home, chunks):
    async with serving(home) as it:
        status, _, error = parsed(await exchange(it.port, POST + CHUNKED + b"\r\n" + chunks))
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert not it.backend.calls


@pytest.mark.parametrize("path", ["/healthz", "/nothing", "/v1/chat/completions"])
async def test_an_unknown_expectation_has_the_form_too(home: Home, path):
    async with serving(home) as it, httpx.AsyncClient() as client:
        answer = await client.get(it.url + path, headers={"Expect": "the unexpected"})
    assert answer.headers["Content-Type"] == "application/json"
    assert answer.json()["error"]["code"] in {"expectation_failed", "method_not_allowed"}


@pytest.mark.parametrize("name", ["Origin", "Host", "Authorization"])
async def test_two_headers_of_which_one_counts_are_refused(home: Home, name):
    """Only the first `Origin` was checked, so a foreign page's could follow an own one."""
    head = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: http://localhost\r\n{name}: "
    both = f"{head}http://evil.example\r\nConnection: close\r\n\r\n"
    if name == "Authorization":
        both = both.replace("Authorization: ", "Authorization: Bearer a\r\nAuthorization: ")
    async with serving(home) as it:
        answer = await exchange(it.port, both.encode())
        status, _, error = parsed(answer)
    assert status == 400
    assert "2 " + name in error["message"] or "Duplicate" in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        CHAT | {"k" * 8_000_000: 1, "stream": "x"},
        CHAT | {"k" * 100_000: 1, "stream": "x" * 100_000},
        CHAT | {"stream_options": {"k" * 100_000: 1}},
        CHAT | {"messages": [{"role": "x" * 100_000, "content": "a"}]},
        CHAT | {"model": "m" * 100_000},
        CHAT | {"messages": [{"role": "\x1b]0;x\x07" * 10_000, "content": "a"}]},
    ],
)
async def test_an_error_repeats_only_the_ends_of_a_long_text(home: Home, body):
    """An unknown key of 8 MB was sent back three times."""
    async with serving(home) as it, httpx.AsyncClient() as client:
        answer = await client.post(f"{it.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert len(answer.content) < 10_000


async def test_a_long_host_path_and_coding_are_shortened(home: Home):
    async with serving(home) as it, httpx.AsyncClient() as client:
        for path, headers in [
            ("/v1/models", {"Host": "h" * 8000}),
            ("/v1/models", {"Origin": "h" * 8000}),
            ("/" + "p" * 8000, {}),
            ("/v1/models/" + "p" * 8000, {}),
        ]:
            answer = await client.get(it.url + path, headers=headers)
            assert answer.status_code in {403, 404}
            assert len(answer.content) < 7000
        coded = {"Content-Encoding": "g" * 8000}
        answer = await client.post(f"{it.url}/v1/completions", content=b"x", headers=coded)
        assert (answer.status_code, len(answer.content) < 3000) == (415, True)


async def test_a_connection_above_the_limit_gets_an_error_object():
    loop = asyncio.get_running_loop()
    server = await loop.create_server(FullConnection, "127.0.0.1", 0)
    status, headers, error = parsed(await exchange(server.sockets[0].getsockname()[1], b""))
    server.close()
    assert (status, error["code"], headers["retry-after"]) == (503, "rate_limit_exceeded", "1")
