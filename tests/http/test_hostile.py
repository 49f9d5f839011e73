"""Clients that misbehave on TCP and on the Unix sockets: all other clients are served."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time

import pytest

from kvd.host.home import Home
from kvd.http.reading import read
from kvd.http.requests import ChatRequest
from tests.http.live import Live, asked, request, stopped
from tests.process.helpers import wait_for, write_config

CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(autouse=True)
def unharmed(live: Live):
    """Check after each test that no process was replaced and that other clients were served."""
    before = (live.pid, live.worker_pid("fast"), live.worker_pid("flood"))
    witness = Witness(live)
    yield
    witness.stop()
    assert before == (live.pid, live.worker_pid("fast"), live.worker_pid("flood"))
    assert witness.answers > 0
    assert witness.failed is None


class Witness(threading.Thread):
    """Requests short completions over TCP while a test runs."""

    def __init__(self, live: Live) -> None:
        super().__init__(daemon=True)
        self._address = live.address
        self._over = threading.Event()
        self.answers = 0
        self.failed: str | None = None
        self.start()

    def run(self) -> None:
        while not self._over.is_set() or not self.answers:
            with socket.create_connection(self._address, 20) as raw:
                raw.sendall(request(CHAT, asked(max_tokens=3)))
                head = raw.recv(65536)
                if not head.startswith(b"HTTP/1.1 200 "):
                    self.failed = repr(head)
                    return
            self.answers += 1
            self._over.wait(0.05)

    def stop(self) -> None:
        self._over.set()
        self.join(30)


def everything(raw: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionResetError):
        while data := raw.recv(65536):
            found += data
    return found


@pytest.fixture(params=["tcp", "unix"])
def raw(request, live: Live):
    with live.tcp() if request.param == "tcp" else live.unix() as it:
        yield it


GARBAGE = {
    "text": b"garbage\r\n\r\n",
    "binary": b"\x00\x01\x02\x03" * 1000 + b"\r\n\r\n",
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500) + b"\r\n\r\n",
    "version": b"GET / HTTP/9.9\r\n\r\n",
    "length": b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
    "headers": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X-A: b\r\n" * 5000 + b"\r\n",
    "path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "smuggled": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\nabc",
    "ndjson": b'{"v":1,"id":"1","op":"status"}\n\r\n\r\n',
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_ends_its_connection(raw, kind):
    raw.sendall(GARBAGE[kind])
    assert re.match(rb"HTTP/1.[01] 4\d\d ", everything(raw))


def test_http_on_the_socket_of_the_protocol_is_a_malformed_frame(live: Live):
    with live.connect() as raw:
        raw.sendall(request(CHAT, asked()))
        (line,) = everything(raw).splitlines()
    assert json.loads(line)["error"]["code"] == "malformed_frame"


def test_a_hundred_megabytes_are_refused(raw, live: Live):
    before = footprint(live)
    raw.sendall(HEAD + b"Content-Length: 100000000\r\n\r\n")
    assert raw.recv(65536).startswith(b"HTTP/1.1 413 ")
    send(raw, b"x" * 65536, until_s=10)
    assert footprint(live) - before < 30e6


@pytest.mark.slow
def test_an_endless_chunked_body_is_refused(raw, live: Live):
    before = footprint(live)
    raw.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
    send(raw, b"10000\r\n" + b"x" * 65536 + b"\r\n", until_s=10)
    assert footprint(live) - before < 60e6


def send(raw: socket.socket, piece: bytes, until_s: float) -> None:
    """Send until the server closes the connection."""
    end = time.monotonic() + until_s
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            raw.sendall(piece)
            assert time.monotonic() < end, "the server still reads"


def footprint(live: Live) -> int:
    with live.client() as kvd:
        return kvd.status().footprint_bytes


def test_a_client_that_does_not_read_loses_only_its_stream(raw, live: Live):
    before, reported = footprint(live), slow_readers(live)
    much = {"max_tokens": 16_000, "n": 16, "logprobs": True, "top_logprobs": 20}
    raw.sendall(request(CHAT, asked(model="flood", stream=True, **much)))
    wait_for("the client is cut off", lambda: slow_readers(live) > reported, 60)
    live.wait_idle("flood")
    wait_for("the counters arrive", lambda: live.model("flood").stats.generated_tokens > 0)
    assert live.model("flood").stats.generated_tokens % (16 * 16_000) != 0
    assert footprint(live) - before < 40e6


def slow_readers(live: Live) -> int:
    return sum("slow reader" in one["event"] for one in live.log())


def test_a_client_that_resets_its_connection_loses_its_request(live: Live):
    with live.tcp() as raw:
        raw.sendall(request(CHAT, asked(model="slow", max_tokens=400, stream=True)))
        assert raw.recv(15) == b"HTTP/1.1 200 OK"
        # A reset instead of a close.
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    live.wait_idle("slow")


def test_pipelined_requests_are_answered_in_order(raw):
    raw.sendall(b"".join(request(CHAT, asked(max_tokens=n)) for n in (3, 2, 1)))
    found = b""
    while found.count(b'"total_tokens"') < 3:
        found += raw.recv(65536)
    counts = [int(part.split(b",")[0]) for part in found.split(b'"completion_tokens":')[1:]]
    assert counts == [3, 2, 1]


def test_a_request_may_arrive_byte_by_byte(raw):
    for byte in request(CHAT, asked(max_tokens=1)):
        raw.sendall(bytes([byte]))
    assert raw.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_deeply_nested_json_is_an_invalid_request(raw):
    body = b"[" * 1_000_000
    raw.sendall(HEAD + b"Content-Length: 1000000\r\n\r\n")
    raw.sendall(body)
    assert raw.recv(65536).startswith(b"HTTP/1.1 400 ")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("name", ["http.sock", "kvd.sock"])
def test_another_user_is_refused(live: Live, name):
    """Even if the modes of folder and socket let it in: the daemon checks the peer's user id."""
    code = (
        "import os, socket, sys\n"
        "path, how = sys.argv[1:]\n"
        "how = how.encode().decode('unicode_escape').encode()\n"
        "os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "raw = socket.socket(socket.AF_UNIX)\n"
        "raw.settimeout(10)\n"
        "raw.connect(path)\n"
        "raw.sendall(how)\n"
        "print(raw.recv(65536).decode())\n"
    )
    path = live.home.root / name
    how = (
        r"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
        if name == "http.sock"
        else r'{"id":"1","op":"hello"}\n'
    )

    def ask() -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, str(path), how]
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)

    closed = ask()
    assert "PermissionError" in closed.stderr
    places = [live.home.root.parent, live.home.root, path]
    modes = [place.stat().st_mode & 0o777 for place in places]
    try:
        for place in places:
            place.chmod(0o777)
        reported = ask()
    finally:
        for place, mode in zip(places, modes, strict=True):
            place.chmod(mode)
    assert "permission_denied" in reported.stdout
    assert "another user" in reported.stdout
    assert modes == [0o700, 0o700, 0o600]


def test_the_request_that_these_tests_send_is_valid():
    assert read(request(CHAT, asked()).partition(b"\r\n\r\n")[2], ChatRequest).model == "fast"


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs resource.prlimit")
def test_too_many_connections_do_not_affect_the_other_sockets_and_workers(home: Home):
    """The connections exceed the limit on open files, of which a listener uses at most a fourth."""
    daemon = Live(write_config(home, "[http]\nport = 0\n"), "--fake")
    with stopped(daemon), contextlib.ExitStack() as opened:
        daemon.start()
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (256, 256))
        address = daemon.address
        for _ in range(300):
            opened.enter_context(socket.create_connection(address, 10))
        assert everything(opened.enter_context(daemon.tcp())).startswith(b"HTTP/1.1 503 ")
        assert daemon.load("fake:tps=1000", "late").state == "ready"
        with daemon.unix() as raw:
            raw.sendall(request(CHAT, asked(model="late", max_tokens=2)))
            assert raw.recv(65536).startswith(b"HTTP/1.1 200 ")


MOST = 2**20
LONG = "x" * (MOST + 1)
MANY = 513
MESSAGES = [{"role": "user", "content": "Hi"}]
OVERSIZED = {
    "chat-schema": (
        CHAT,
        {
            "messages": MESSAGES,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"schema": {"description": LONG}},
            },
        },
    ),
    "chat-choice": (CHAT, {"messages": MESSAGES, "guided_choice": [LONG]}),
    "completion-schema": (
        "/v1/completions",
        {"prompt": "Hi", "structured_outputs": {"json": {"description": LONG}}},
    ),
    "response-schema": (
        "/v1/responses",
        {
            "input": "Hi",
            "text": {"format": {"type": "json_schema", "schema": {"description": LONG}}},
        },
    ),
    "ollama-schema": ("/api/chat", {"messages": MESSAGES, "format": {"description": LONG}}),
    "ollama-stops": ("/api/chat", {"messages": MESSAGES, "options": {"stop": ["zz"] * 100_000}}),
    "message-tools": (
        "/v1/messages",
        {"messages": MESSAGES, "tools": [{"name": f"t{number}"} for number in range(MANY)]},
    ),
    "counted-tools": (
        "/v1/messages/count_tokens",
        {"messages": MESSAGES, "tools": [{"name": f"t{number}"} for number in range(MANY)]},
    ),
}


@pytest.mark.parametrize("name", OVERSIZED)
def test_what_the_worker_could_not_decode_is_refused_before_it(live: Live, name):
    path, fields = OVERSIZED[name]
    with live.tcp() as raw:
        raw.sendall(request(path, {"model": "fast"} | fields))
        assert raw.recv(65536).startswith(b"HTTP/1.1 400 ")
