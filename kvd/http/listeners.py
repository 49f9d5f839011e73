"""The listening sockets of HTTP. Needs no HTTP library, so errors appear before one is imported."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvd.config.http import DEFAULT_PORT
from kvd.host import listen
from kvd.host.home import check_socket_path
from protocol.errors import ConfigError
from protocol.types import Problem

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvd.config.http import HttpSettings
    from kvd.host.home import Home


@dataclass(frozen=True)
class Listener:
    """A listening socket."""

    socket: socket.socket
    address: str
    """``http://127.0.0.1:11711`` or ``unix:/home/you/.kvd/http.sock``."""
    path: Path | None = None

    def close(self) -> None:
        self.socket.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


class Opened(NamedTuple):
    """The open sockets, and why others are missing."""

    listeners: list[Listener]
    problems: list[Problem]


def open_listeners(
    home: Home, settings: HttpSettings, given: Sequence[socket.socket] = ()
) -> Opened:
    """Open the configured sockets; raises `ConfigError` if one cannot be opened.

    A Unix or TCP socket that the service manager has ``given`` replaces the configured one of the
    same kind. If another program has the default port, TCP is skipped with a problem. The caller
    must hold the home's lock.
    """
    listeners: list[Listener] = []
    problems: list[Problem] = []
    if not settings.enabled:
        return Opened(listeners, problems)
    listeners += [_given(listening) for listening in given]
    try:
        kinds = {listener.socket.family == socket.AF_UNIX for listener in listeners}
        if False not in kinds and settings.tcp:
            listeners += _tcp(settings, problems)
        if True not in kinds:
            listeners += _unix(home, problems)
        check_keys(listeners, settings)
    except BaseException:
        for listener in listeners:
            listener.close()
        raise
    return Opened(listeners, problems)


def try_tcp(settings: HttpSettings) -> list[Problem]:
    """Open the TCP sockets as a start would, and close them; return the problems.

    Raises the `ConfigError` that would end the start.
    """
    problems: list[Problem] = []
    listeners = _tcp(settings, problems)
    try:
        check_keys(listeners, settings)
    finally:
        for listener in listeners:
            listener.close()
    return problems


def _given(listening: socket.socket) -> Listener:
    """Wrap a socket of the service manager, which also removes its path."""
    if listening.family == socket.AF_UNIX:
        return Listener(listening, f"unix:{listening.getsockname()}")
    _enable_keepalive(listening)
    return Listener(listening, _address(listening))


def check_keys(listeners: Sequence[Listener], settings: HttpSettings) -> None:
    """Raise `ConfigError` if other machines can connect and no API key is configured."""
    public = [listener.address for listener in listeners if not _is_private(listener.socket)]
    if public and not settings.keys:
        raise ConfigError(
            f"other machines can reach {public[0]}, so HTTP needs at least one API key: create one "
            "with `kvctl key new NAME --save`, or listen on 127.0.0.1 (host of [http])",
            key="http.keys",
        )


def _is_private(listening: socket.socket) -> bool:
    if listening.family == socket.AF_UNIX:
        return True
    address = str(listening.getsockname()[0])
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _unix(home: Home, problems: list[Problem]) -> list[Listener]:
    path = home.http_socket
    try:
        check_socket_path(path)
    except ConfigError as error:
        # The path of kvd.sock is one letter shorter and may fit: start without http.sock.
        problems.append(Problem("home", f"no http.sock: {error.message}", "choose a shorter path"))
        return []
    return [Listener(listen.bind(path), f"unix:{path}", path)]


def _tcp(settings: HttpSettings, problems: list[Problem]) -> list[Listener]:
    port = DEFAULT_PORT if settings.port is None else settings.port
    listeners: list[Listener] = []
    try:
        for family, address in _resolve(settings.host):
            listeners.append(_bind(family, address, port))
            port = listeners[0].socket.getsockname()[1]  # port 0: all addresses share one port
    except OSError as error:
        for listener in listeners:
            listener.close()
        problems.append(_not_bound(settings, port, error))
        return []
    return listeners


def _not_bound(settings: HttpSettings, port: int, error: OSError) -> Problem:
    """Return the problem of the default port in use; raises `ConfigError` for any other error."""
    where = f"{settings.host} port {port}"
    taken = error.errno == errno.EADDRINUSE
    if taken and settings.port is None:
        return Problem(
            key="http.port",
            observed=f"no HTTP on {where}: another program uses the port, and answers the requests "
            "that are meant for kvd",
            advice="end that program, or choose another port: `kvd serve --port`, KVD_PORT, or "
            "port of [http] in config.toml; 0 takes any free port",
        )
    reason = "another program uses the port" if taken else error.strerror or str(error)
    raise ConfigError(
        f"cannot listen on {where}: {reason}; choose others with --host and --port of `kvd serve` "
        "or with host and port of [http] in config.toml (port 0 takes any free port, tcp = false "
        "disables TCP)",
        key="http.port" if taken else "http.host",
    ) from error


def _resolve(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"http.host {host!r} is not an address of this machine: {error.strerror or error}",
            key="http.host",
        ) from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _bind(family: socket.AddressFamily, address: str, port: int) -> Listener:
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        _enable_keepalive(listening)
        listening.bind((address, port))
        listening.listen(listen.BACKLOG)
        listening.setblocking(False)
    except BaseException:
        listening.close()
        raise
    return Listener(listening, _address(listening))


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if listening.family == socket.AF_INET6 else host
    return f"http://{shown}:{port}"


def _enable_keepalive(listening: socket.socket) -> None:
    """Enable TCP keepalive, so that dead peers are detected; accepted sockets inherit it."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, 30)
    else:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
