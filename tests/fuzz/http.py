"""Raw bytes over TCP and the Unix socket to a real daemon that answers HTTP.

Every error that comes back has the form of its API, none is a bug of the daemon, and a valid
request on another connection is answered after each input.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from kvd.host.home import Home
from kvd.http.requests import ChatRequest, CompletionRequest
from kvd.http.responses_api.requests import Item, ResponsesRequest
from tests.fuzz.mutations import edited_bytes, edited_json, either
from tests.fuzz.target import Check, Target
from tests.http.live import Live, stopped
from tests.process.helpers import source, write_config

_QUIET_S = 0.03
"""Seconds without an answer after which an input counts as incomplete."""
_NAMES = [
    *ChatRequest.__struct_fields__,
    *CompletionRequest.__struct_fields__,
    *ResponsesRequest.__struct_fields__,
    *Item.__struct_fields__,
]
_PIECES = [
    b"\r\n\r\n", b"\n\n", b" ", b"\t", b"\r\n ", b"\x0b", b"HTTP/1.0", b"HTTP/2.0", b"GET ",
    b"HEAD ", b"POST ", b"OPTIONS ", b"CONNECT ", b"TRACE ", b"* ", b"http://evil.example/", b"//",
    b"/../", b"%00", b"%", b"?a=1#x", b"0\r\n\r\n", b"5\r\n", b"ffffffffffffffff\r\n", b"1;a=b\r\n",
    b"a" * 9000,
]  # fmt: skip
_HEADERS = [
    b"Content-Length: 5", b"Content-Length: 0", b"Content-Length: +5", b"Content-Length : 5",
    b"Content-Length: 99999999999999999999", b"Content-Length: 100000000",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding:\x0bchunked",
    b"transfer-encoding: identity", b"Content-Encoding: gzip", b"Connection: close",
    b"Connection: keep-alive", b"Connection: upgrade", b"Upgrade: websocket", b"Upgrade: h2c",
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", b"Expect: 100-continue", b"Expect: x",
    b"Host: evil.example", b"Host: localhost", b"Host:", b"Origin: http://evil.example",
    b"Origin: null", b"Authorization: Basic \xff", b"Accept: */*;q=x", b"Accept-Encoding: gzip",
    b"Access-Control-Request-Method: POST", b"Access-Control-Request-Private-Network: true",
    b"Content-Type: application/json; charset=utf-16", b"Cookie: " + b"a=b; " * 100, b" folded: x",
    b"X-Forwarded-For: 1", b": empty", b"\xff: a", b"If-Modified-Since: x", b"Range: bytes=0-",
]  # fmt: skip
_VALID = json.dumps({"model": "fast", "prompt": "Hi", "max_tokens": 2}).encode()


@st.composite
def _edited_head(draw: DrawFn, seeds: list[bytes]) -> bytes:
    """Add, drop and repeat header lines of a valid request."""
    head, _, body = draw(st.sampled_from(seeds)).partition(b"\r\n\r\n")
    first, *lines = head.split(b"\r\n")
    lines = [line for line in lines if draw(st.integers(0, 7))]
    for added in draw(st.lists(st.sampled_from(_HEADERS), max_size=3)):
        lines.insert(draw(st.integers(0, len(lines))), added)
    if not draw(st.integers(0, 4)):
        first = draw(edited_bytes([first], _PIECES))
    end = draw(st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n"]))
    return end.join([first, *lines, b"", body])


@st.composite
def _edited_body(draw: DrawFn, seeds: list[bytes]) -> bytes:
    """Send an edited JSON body with a correct length, or in chunks."""
    bodies = [seed for seed in seeds if b'\r\n\r\n{"model"' in seed]
    head, _, valid = draw(st.sampled_from(bodies)).partition(b"\r\n\r\n")
    body = draw(st.one_of(edited_json([valid], _NAMES), edited_bytes([valid])))
    target = head.split(b"\r\n")[0]
    if draw(st.booleans()):
        return b"%b\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (target, len(body), body)
    size = draw(st.sampled_from([1, 7, 1000]))
    pieces = [body[start : start + size] for start in range(0, len(body), size)][:2000]
    chunks = b"".join(b"%x;x=1\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    chunked = b"Transfer-Encoding: chunked"
    return b"%b\r\nHost: localhost\r\n%b\r\n\r\n%b0\r\n\r\n" % (target, chunked, chunks)


class Http(Target):
    name = "http"
    examples = 60

    def inputs(self) -> SearchStrategy[bytes]:
        seeds = self.seeds()
        return either(_edited_body(seeds), _edited_head(seeds), edited_bytes(seeds, _PIECES))

    @contextmanager
    def checking(self) -> Iterator[Check]:
        root = Path(tempfile.mkdtemp(prefix="kvd-"))
        settings = "[http]\nport = 0\nbody_limit = 1000000\n"
        daemon = Live(write_config(Home(root / "h"), settings), "--fake")
        with stopped(daemon):
            daemon.start()
            daemon.load(source(tps=0, context=300), "fast")
            address = daemon.address

            def check(data: bytes) -> None:
                is_tcp = len(data) % 2
                _check_answers(_sent(daemon.unix() if not is_tcp else daemon_tcp(address), data))
                _check_serves(daemon_tcp(address) if not is_tcp else daemon.unix())

            yield check
            daemon.wait_idle("fast")
            wrong = [line for line in daemon.log() if line["level"] in {"error", "critical"}]
            assert not wrong, wrong[:3]
        shutil.rmtree(root, ignore_errors=True)


def daemon_tcp(address: tuple[str, int]) -> socket.socket:
    return socket.create_connection(address, 30)


def _sent(raw: socket.socket, data: bytes) -> bytes:
    """Send bytes in two pieces; return what comes back until the answer ends."""
    found = b""
    with raw, contextlib.suppress(ConnectionError, TimeoutError):
        raw.settimeout(5)
        half = len(data) // 2 if len(data) % 3 == 0 else 0
        raw.sendall(data[:half])
        raw.sendall(data[half:])
        raw.settimeout(_QUIET_S)
        while piece := raw.recv(1 << 16):
            found += piece
    return found


def _check_serves(raw: socket.socket) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    with raw:
        raw.sendall(b"%bContent-Length: %d\r\n\r\n%b" % (head, len(_VALID), _VALID))
        found = b""
        while piece := raw.recv(1 << 16):
            found += piece
    assert found.startswith(b"HTTP/1.1 200 OK\r\n"), found
    assert json.loads(found.partition(b"\r\n\r\n")[2])["usage"]["completion_tokens"] == 2


def _check_answers(found: bytes) -> None:
    """Check each complete answer of a connection."""
    while found.startswith(b"HTTP/"):
        head, end, rest = found.partition(b"\r\n\r\n")
        if not end:
            return  # cut off, because the input was over
        status = int(head.split(b" ", 2)[1])
        headers = dict(
            line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line
        )
        length = int(headers.get(b"content-length", b"0"))
        if rest.startswith(b"HTTP/"):  # to HEAD, or an interim answer
            length = 0
        body, found = rest[:length], rest[length:]
        if status >= 400 and body:
            assert headers[b"content-type"] == b"application/json", (head, body)
            if len(body) == length:
                error = json.loads(body)["error"]
                if isinstance(error, str):  # Ollama's form
                    assert error
                    assert status != 500, error
                else:
                    assert error["message"]
                    assert error["code"] != "internal", error
                assert length < 10_000
        if b"transfer-encoding" in headers:
            return  # a stream
    assert not found, found[:200]
