"""The daemon's Unix socket: the lock, the bind, and how connections end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import stat
import subprocess
import sys

import pytest

from kvd.host import listen
from kvd.host.home import Home
from protocol.errors import AlreadyRunning, ConfigError


@pytest.fixture
def made(home: Home) -> Home:
    home.create()
    return home


class Recorder:
    """Replaces the actors: keeps the received bytes, and lets the test write and close."""

    def __init__(self) -> None:
        self.received = b""
        self.gone = asyncio.Event()
        self.talked = asyncio.Event()

    def connect(self, *, write, close, backlog):
        self.write, self.close, self.backlog = write, close, backlog
        return self

    def receive(self, data: bytes) -> None:
        self.received += data
        self.talked.set()

    def closed(self) -> None:
        self.gone.set()


@pytest.fixture
async def client_protocol(made: Home):
    recorder = Recorder()
    listener = listen.bind(made.socket)
    server = await listen.serve(listener, recorder.connect)
    recorder.reader, recorder.writer = await asyncio.open_unix_connection(str(made.socket))
    async with asyncio.timeout(10):
        yield recorder
    server.close()
    recorder.writer.close()


def test_the_error_of_a_second_daemon_names_the_pid_of_the_first(made: Home):
    refusal = pytest.raises(AlreadyRunning, match=f"pid {os.getpid()}.*kvctl shutdown")
    with listen.hold_lock(made), refusal, listen.hold_lock(made):
        pass
    with listen.hold_lock(made):
        assert made.lock.read_text() == f"{os.getpid()}\n"


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_that_links_to_another_file_is_refused_and_the_file_unchanged(made: Home, link):
    other = made.root / "config.toml"
    other.write_text("budget = '1GiB'\n")
    link(other, made.lock)
    with pytest.raises(ConfigError, match=r"kvd\.lock: it is a link"), listen.hold_lock(made):
        pass
    assert other.read_text() == "budget = '1GiB'\n"


def test_a_lock_that_is_a_fifo_is_refused_and_blocks_nothing(made: Home):
    os.mkfifo(made.lock)
    assert listen.holder(made) is None
    with pytest.raises(ConfigError, match="it is a link or no file"), listen.hold_lock(made):
        pass


def test_a_lock_that_cannot_be_opened_is_a_config_error(made: Home):
    made.lock.mkdir()
    refusal = pytest.raises(ConfigError, match=r"cannot use .*kvd\.lock")
    with refusal as caught, listen.hold_lock(made):
        pass
    assert caught.value.detail["key"] == "home"


def test_the_lock_is_not_inherited_by_child_processes(made: Home):
    with listen.hold_lock(made):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with listen.hold_lock(made):
            pass
    finally:
        child.communicate(b"\n")


def test_the_socket_is_private_and_a_dead_one_is_replaced(made: Home):
    listen.bind(made.socket).close()
    assert made.socket.exists()
    with listen.bind(made.socket):
        found = made.socket.stat().st_mode
        assert stat.S_ISSOCK(found)
        assert stat.S_IMODE(found) == 0o600


def test_a_socket_with_a_listener_is_not_replaced(made: Home):
    """The service manager may listen there. The check must not connect, or it starts a daemon."""
    with listen.bind(made.socket) as its:
        mine = made.socket.stat().st_ino
        with pytest.raises(ConfigError, match="kvctl service stop"):
            listen.bind(made.socket)
        assert made.socket.stat().st_ino == mine
        with pytest.raises(BlockingIOError):
            its.accept()


async def test_a_closed_server_keeps_its_path(made: Home):
    """Python 3.13 deletes the path by default, but it may belong to the service manager."""
    server = await listen.serve(listen.bind(made.socket), Recorder().connect)
    server.close()
    await server.wait_closed()
    assert made.socket.exists()


def test_a_file_in_the_sockets_place_is_not_deleted(made: Home):
    made.socket.write_text("precious")
    with pytest.raises(ConfigError, match="is not a socket"):
        listen.bind(made.socket)
    assert made.socket.read_text() == "precious"


def test_the_user_id_of_the_peer_is_read():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert listen.peer_uid(ours) == os.geteuid()


async def test_bytes_pass_both_ways_and_the_end_is_reported(client_protocol):
    client_protocol.writer.write(b"hello\n")
    await client_protocol.talked.wait()
    assert client_protocol.received == b"hello\n"
    client_protocol.write(b"reply\n")
    assert await client_protocol.reader.readline() == b"reply\n"
    assert client_protocol.backlog() == 0
    client_protocol.writer.close()
    await client_protocol.gone.wait()
    client_protocol.write(b"to nobody\n")
    client_protocol.close()


async def test_a_client_that_only_stops_writing_still_gets_its_answer(client_protocol):
    client_protocol.writer.write(b"question\n")
    client_protocol.writer.write_eof()
    await client_protocol.talked.wait()
    await asyncio.sleep(0)
    client_protocol.write(b"answer\n")
    assert await client_protocol.reader.read() == b"answer\n"
    await client_protocol.gone.wait()


async def test_a_client_that_disconnects_is_noticed_at_once(client_protocol, monkeypatch):
    monkeypatch.setattr(listen, "_HALF_CLOSED_S", 3600)
    client_protocol.writer.write(b"question\n")
    await client_protocol.talked.wait()
    client_protocol.writer.close()
    await client_protocol.gone.wait()


async def test_bytes_written_before_the_close_still_arrive(client_protocol):
    client_protocol.writer.write(b"x" * 300_000)  # still arriving while we close
    await client_protocol.talked.wait()
    before = len(client_protocol.received)
    client_protocol.write(b"last words\n")
    client_protocol.close()
    client_protocol.close()
    client_protocol.writer.write(b"y" * 300_000)
    assert await client_protocol.reader.read() == b"last words\n"
    assert b"y" not in client_protocol.received[before:]
    client_protocol.writer.close()
    await client_protocol.gone.wait()


async def test_a_client_that_never_reads_is_cut_off(client_protocol, monkeypatch):
    monkeypatch.setattr(listen, "_LINGER_S", 0.05)
    client_protocol.reader._transport.pause_reading()
    client_protocol.write(b"x" * 4_000_000)
    assert client_protocol.backlog() > 0
    client_protocol.close()
    await client_protocol.gone.wait()


async def test_a_client_that_stops_writing_and_never_reads_is_cut_off(client_protocol, monkeypatch):
    monkeypatch.setattr(listen, "_HALF_CLOSED_S", 0.01)
    monkeypatch.setattr(listen, "_LINGER_S", 0.05)
    client_protocol.reader._transport.pause_reading()
    client_protocol.write(b"x" * 4_000_000)
    assert client_protocol.backlog() > 0
    client_protocol.writer.write_eof()
    await client_protocol.gone.wait()


async def test_a_client_that_disconnects_before_its_user_id_is_read_causes_no_error(made: Home):
    def uid_of(_: socket.socket) -> int:
        raise ConnectionResetError

    recorder, faults = Recorder(), []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(context))
    listener = listen.bind(made.socket)
    server = await loop.create_unix_server(
        lambda: listen.ClientProtocol(recorder.connect, uid_of=uid_of), sock=listener
    )
    reader, writer = await asyncio.open_unix_connection(str(made.socket))
    async with asyncio.timeout(10):
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    assert faults == []
    assert not hasattr(recorder, "write")
    writer.close()
    server.close()


def test_macos_has_no_user_id_of_a_peer_that_has_disconnected(monkeypatch):
    class Gone:
        def getsockopt(self, *_: int) -> bytes:
            raise OSError(errno.ENOTCONN, "Socket is not connected")

    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ConnectionResetError):
        listen.peer_uid(Gone())


async def test_another_user_is_refused_with_a_reason(made: Home):
    recorder = Recorder()
    loop = asyncio.get_running_loop()
    listener = listen.bind(made.socket)
    server = await loop.create_unix_server(
        lambda: listen.ClientProtocol(recorder.connect, uid_of=lambda _: 12345), sock=listener
    )
    reader, writer = await asyncio.open_unix_connection(str(made.socket))
    async with asyncio.timeout(10):
        assert b'"permission_denied"' in await reader.read()
    assert not recorder.received
    writer.close()
    server.close()
