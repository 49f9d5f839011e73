"""Where HTTP listens: defaults, ports in use, and addresses that other machines can reach."""

from __future__ import annotations

import contextlib
import os
import socket

import pytest
from msgspec.structs import replace

import kvd.http.listeners
from kvd.config.config import parse
from kvd.config.http import HttpSettings, with_command_line
from kvd.host.home import SOCKET_PATH_LIMIT, Home
from kvd.http import keys
from kvd.http.listeners import open_listeners
from protocol.errors import ConfigError


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
KEYS = {"me": keys.hashed("x")}


@contextlib.contextmanager
def opened(home: Home, given=(), **settings):
    home.create()
    listeners = open_listeners(home, HttpSettings(**{"port": 0} | settings), given).listeners
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


@pytest.fixture
def taken():
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


def test_by_default_only_this_machine_and_this_user_can_connect(home: Home):
    with opened(home) as (tcp, unix):
        port = tcp.socket.getsockname()[1]
        assert tcp.address == f"http://127.0.0.1:{port}"
        assert unix.address == f"unix:{home.root}/http.sock"
        assert (home.http_socket.stat().st_mode & 0o777) == 0o600
        socket.create_connection(("127.0.0.1", port)).close()
    assert not home.http_socket.exists()


def test_http_may_be_off_or_on_the_unix_socket_only(home: Home):
    with opened(home, enabled=False) as listeners:
        assert listeners == []
    with opened(home, tcp=False) as listeners:
        assert [listener.address for listener in listeners] == [f"unix:{home.http_socket}"]


def test_the_default_port_in_use_is_a_problem_and_the_unix_socket_opens(
    home: Home, taken, monkeypatch
):
    monkeypatch.setattr(kvd.http.listeners, "DEFAULT_PORT", taken)
    home.create()
    (listener,), (problem,) = open_listeners(home, HttpSettings())
    listener.close()
    assert listener.address == f"unix:{home.http_socket}"
    assert problem.key == "http.port"
    assert f"127.0.0.1 port {taken}: another program uses the port" in problem.observed
    for remedy in ("--port", "KVD_PORT", "config.toml"):
        assert remedy in problem.advice


def test_a_path_too_long_for_the_second_socket_is_a_problem(tmp_path):
    short = len(str(tmp_path / "kvd.sock"))
    home = Home(tmp_path / ("x" * (SOCKET_PATH_LIMIT - short - 1)))
    assert len(str(home.socket)) == SOCKET_PATH_LIMIT
    home.create()
    listeners, (problem,) = open_listeners(home, HttpSettings(tcp=False))
    assert (listeners, problem.key) == ([], "home")
    assert f"no http.sock: the socket's path has {SOCKET_PATH_LIMIT + 1} bytes" in problem.observed


def test_a_configured_port_that_is_in_use_is_an_error(home: Home, taken):
    said = f"port {taken}: another program uses the port"
    with pytest.raises(ConfigError, match=said) as caught, opened(home, port=taken):
        pass
    assert caught.value.detail["key"] == "http.port"
    assert not home.http_socket.exists()


@pytest.mark.parametrize("host", ["0.0.0.0", pytest.param("::", marks=ipv6)])
def test_an_address_that_other_machines_can_reach_needs_keys(home: Home, host):
    with pytest.raises(ConfigError, match="API key") as caught, opened(home, host=host):
        pass
    assert caught.value.detail["key"] == "http.keys"
    assert not home.http_socket.exists()
    with opened(home, host=host, keys=KEYS) as (tcp, _):
        assert tcp.socket.getsockname()[0] == host


@ipv6
def test_all_addresses_of_a_host_name_share_one_port(home: Home, monkeypatch):
    both = [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")]
    monkeypatch.setattr(kvd.http.listeners, "_resolve", lambda _: both)
    with opened(home, host="localhost") as (four, six, _):
        port = four.socket.getsockname()[1]
        assert (four.address, six.address) == (f"http://127.0.0.1:{port}", f"http://[::1]:{port}")


def test_a_host_name_that_does_not_resolve_is_an_error(home: Home):
    with pytest.raises(ConfigError) as caught, opened(home, host="no such host"):
        pass
    assert caught.value.detail["key"] == "http.host"


def test_an_address_of_another_machine_is_an_error(home: Home):
    with pytest.raises(ConfigError) as caught, opened(home, host="192.0.2.1", keys=KEYS):
        pass
    assert caught.value.detail["key"] == "http.host"


def test_sockets_of_the_service_manager_replace_the_configured_ones(home: Home):
    given = socket.create_server(("127.0.0.1", 0))
    with opened(home, [given]) as (tcp, unix):
        assert tcp.socket is given
        assert unix.path == home.http_socket
    everywhere = socket.create_server(("0.0.0.0", 0))
    with pytest.raises(ConfigError, match="API key"), opened(home, [everywhere]):
        pass


def test_a_dead_daemons_socket_is_replaced_and_a_file_is_not(home: Home):
    with opened(home):
        left = home.root / "left"
        os.link(home.http_socket, left)
    left.rename(home.http_socket)
    with opened(home):
        pass
    home.http_socket.write_text("mine")
    with pytest.raises(ConfigError, match="is not a socket"), opened(home):
        pass
    assert home.http_socket.read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        ((None, None), {}),
        ((None, 8080), {"port": 8080}),
        (("0.0.0.0", 0), {"host": "0.0.0.0", "port": 0}),
        (("[::1]", 5), {"host": "::1", "port": 5}),
        (("box.lan", None), {"host": "box.lan"}),
    ],
)
def test_the_command_line_overrides_the_address(options, changed):
    before = HttpSettings(keys=KEYS)
    assert with_command_line(before, *options) == replace(before, **changed)
    assert with_command_line(before, *options, off=True) == replace(before, enabled=False)


def test_an_address_on_the_command_line_enables_http():
    before = HttpSettings(enabled=False, tcp=False)
    assert with_command_line(before, None, None) == before
    assert with_command_line(before, None, 1) == HttpSettings(port=1)


def test_the_variable_replaces_the_port_and_enables_nothing():
    off = HttpSettings(enabled=False, tcp=False, port=1)
    assert with_command_line(off, None, None, default_port=2) == replace(off, port=2)
    assert with_command_line(off, None, 3, default_port=2) == HttpSettings(port=3)
    assert with_command_line(off, "::1", None, default_port=2) == HttpSettings(host="::1", port=2)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("port = 70000", "http.port"),
        ("prot = 1", "http.prot"),
        ('body_limit = "1GiB"', "http.body_limit"),
        ('body_limit = "much"', "http.body_limit"),
        ('origins = ["chat.example"]', "http.origins[0]"),
        ('keys = {me = "secret"}', "http.keys"),
        ('host = ""', "http.host"),
    ],
)
def test_the_error_for_an_invalid_setting_names_the_key(table, key):
    with pytest.raises(ConfigError) as caught:
        parse(f"[http]\n{table}")
    assert caught.value.detail["key"].startswith(key)
