"""Clients that close only their writing side, or vanish without a packet as in a power failure."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from kvd.config.http import HttpSettings
from kvd.host.home import Home
from kvd.http.listeners import open_listeners
from kvd.http.server import Server
from tests.http.live import Live, asked, request, stopped
from tests.http.stage import Scripted, hangs, until
from tests.process.helpers import source, wait_for, write_config

CHAT = "/v1/chat/completions"
PART = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"
_TCP_REPAIR = 19
_ESTABLISHED, _CLOSE_WAIT = "01", "08"


def vanish(raw: socket.socket) -> None:
    """Close a socket without FIN or RST, as a power failure does."""
    try:
        raw.setsockopt(socket.IPPROTO_TCP, _TCP_REPAIR, 1)
    except OSError as error:
        if error.errno in {errno.EPERM, errno.ENOPROTOOPT}:
            pytest.skip("needs the right to close TCP without a packet (TCP_REPAIR)")
        raise
    raw.close()


def held(port: int) -> int:
    """Return how many connections the server of this port has."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    states = [line.split()[3] for line in lines if line.split()[1].endswith(f":{port:04X}")]
    return sum(state in {_ESTABLISHED, _CLOSE_WAIT} for state in states)


linux = pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux can close TCP without a packet"
)


@pytest.fixture(scope="module")
def hasty() -> Iterator[Live]:
    """A daemon with short timeouts."""
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    config = "[http]\nport = 0\nidle_timeout_s = 0.3\n"
    daemon = Live(write_config(Home(root / "h"), config), "--fake")
    with stopped(daemon):
        daemon.start()
        daemon.load(source(tps=100), "fast")
        daemon.load(source(tps=50), "mine")
        yield daemon
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(autouse=True)
def others_are_served(hasty: Live) -> Iterator[None]:
    """Check that a concurrent request gets the same answer as alone, and that no worker died."""
    workers = hasty.worker_pid("fast"), hasty.worker_pid("mine")
    transport = httpx.HTTPTransport(uds=str(hasty.home.http_socket))
    body = asked(max_tokens=30, seed=4)
    reported: list[httpx.Response] = []
    with httpx.Client(transport=transport, base_url="http://kvd", timeout=30) as client:
        neighbour = threading.Thread(target=lambda: reported.append(client.post(CHAT, json=body)))
        neighbour.start()
        yield
        neighbour.join()
        alone = client.post(CHAT, json=body)
    assert [one.status_code for one in (*reported, alone)] == [200, 200]
    assert reported[0].json()["choices"] == alone.json()["choices"]
    assert workers == (hasty.worker_pid("fast"), hasty.worker_pid("mine"))
    with hasty.client() as kvd:
        assert kvd.status().pid == hasty.pid


@pytest.mark.parametrize("listener", ["tcp", "unix"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_writing_side_loses_its_request(hasty: Live, listener, stream):
    """HTTP cannot tell such a client from one that has disconnected."""
    with hasty.tcp() if listener == "tcp" else hasty.unix() as raw:
        raw.sendall(request(CHAT, asked(model="mine", max_tokens=4000, stream=stream)))
        wait_for("the request runs", lambda: hasty.running("mine") == 1)
        raw.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while raw.recv(65536):
                pass
        wait_for("the request is ended", lambda: hasty.running("mine") == 0)


@linux
@pytest.mark.parametrize("said", [b"", PART], ids=["nothing", "half a request"])
def test_a_client_that_vanishes_before_its_request_is_complete_is_dropped(hasty: Live, said):
    port = hasty.address[1]
    raw = hasty.tcp()
    raw.sendall(said)
    wait_for("the server has the connection", lambda: held(port) == 1)
    vanish(raw)
    assert held(port) == 1, "the server noticed the close"
    wait_for("the server drops the connection", lambda: held(port) == 0, 10)


@linux
def test_a_client_that_vanishes_during_its_stream_loses_its_request(hasty: Live):
    raw = hasty.tcp()
    raw.sendall(request(CHAT, asked(model="mine", max_tokens=4000, stream=True)))
    assert raw.recv(15) == b"HTTP/1.1 200 OK"
    vanish(raw)
    wait_for("the request is ended", lambda: hasty.running("mine") == 0, 10)


@linux
async def test_a_client_that_vanishes_while_nothing_is_sent_is_noticed(home: Home):
    """An answer in one piece may take minutes. Meanwhile TCP keepalive checks the client."""
    home.create()
    backend = Scripted([hangs()])
    listeners = open_listeners(home, HttpSettings(port=0)).listeners
    listener = listeners[0].socket
    for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        assert listener.getsockopt(socket.IPPROTO_TCP, option) <= 30
        listener.setsockopt(socket.IPPROTO_TCP, option, 1)  # s, so that the test is short
    server = Server(backend, HttpSettings(port=0), listeners, unread_limit=2**20)
    await server.start()
    try:
        raw = socket.create_connection(listener.getsockname())
        raw.sendall(request(CHAT, asked()))
        await until(lambda: backend.calls)
        vanish(raw)
        assert not backend.calls[0].cancelled
        async with asyncio.timeout(5):
            await backend.settled()
    finally:
        await server.close()
        for listener in listeners:
            listener.close()
