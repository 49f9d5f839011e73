"""The listening sockets: TCP, which others may reach, and `http.sock`, which the user alone can.

Opens them and says why one cannot be opened. Needs no HTTP library, so that it can run first.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from kvd.config.http import DEFAULT_PORT
from kvd.host import listen
from kvd.host.home import check_socket_path
from protocol.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvd.config.http import HttpSettings
    from kvd.host.home import Home


@dataclass(frozen=True)
class Door:
    """A socket that listens."""

    listener: socket.socket
    address: str
    """``http://127.0.0.1:11711`` or ``unix:/home/you/.kvd/http.sock``."""
    path: Path | None = None
    """Of a Unix socket: the kernel knows who comes by it."""

    def close(self) -> None:
        """Listen no more."""
        self.listener.close()
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def open_doors(
    home: Home, settings: HttpSettings, given: Sequence[socket.socket] = ()
) -> list[Door]:
    """Open what the configuration says; raises `ConfigError` where that cannot be.

    Sockets that the service manager has `given` take the place of those of their kind. A default
    that cannot be had is left out, with a warning. The caller holds the home's lock.
    """
    if not settings.enabled:
        return []
    doors = [_given(listener) for listener in given]
    try:
        kinds = {door.listener.family == socket.AF_UNIX for door in doors}
        if False not in kinds and settings.tcp:
            doors += _tcp(settings)
        if True not in kinds:
            doors += _unix(home)
        check_keys(doors, settings)
    except BaseException:
        for door in doors:
            door.close()
        raise
    return doors


def _given(listener: socket.socket) -> Door:
    """Return a door whose path, if it has one, is its giver's to remove."""
    if listener.family == socket.AF_UNIX:
        return Door(listener, f"unix:{listener.getsockname()}")
    _find_the_dead(listener)
    return Door(listener, _address(listener))


def check_keys(doors: Sequence[Door], settings: HttpSettings) -> None:
    """Raise `ConfigError` if anybody could come in without a key who should not."""
    open_to_all = [door.address for door in doors if not _is_private(door.listener)]
    if open_to_all and not settings.keys:
        raise ConfigError(
            f"others can reach {open_to_all[0]}, so HTTP needs at least one API key there: "
            "`kvctl key new NAME` makes one; or listen on 127.0.0.1 (host of [http])",
            key="http.keys",
        )


def _is_private(listener: socket.socket) -> bool:
    if listener.family == socket.AF_UNIX:
        return True
    address = str(listener.getsockname()[0])
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _unix(home: Home) -> list[Door]:
    path = home.http_socket
    try:
        check_socket_path(path)
    except ConfigError as error:
        # One letter longer than the other socket's: no reason not to serve at all.
        structlog.get_logger("kvd.http").warning("no http.sock", reason=error.message)
        return []
    return [Door(listen.bind(path), f"unix:{path}", path)]


def _tcp(settings: HttpSettings) -> list[Door]:
    port = DEFAULT_PORT if settings.port is None else settings.port
    doors: list[Door] = []
    try:
        for family, address in _resolve(settings.host):
            doors.append(_bind(family, address, port))
            port = doors[0].listener.getsockname()[1]  # the same for all where it was 0
    except OSError as error:
        for door in doors:
            door.close()
        return _not_bound(settings, port, error)
    return doors


def _not_bound(settings: HttpSettings, port: int, error: OSError) -> list[Door]:
    where = f"{settings.host} port {port}"
    taken = error.errno == errno.EADDRINUSE
    if taken and settings.port is None:
        structlog.get_logger("kvd.http").warning(
            "no HTTP over TCP: another program has the port",
            address=where,
            hint="set port of [http] in config.toml; 0 takes any that is free",
        )
        return []
    reason = "another program has it" if taken else error.strerror or str(error)
    raise ConfigError(
        f"cannot listen on {where}: {reason}; set host and port of [http] in config.toml (port 0 "
        "takes any that is free, tcp = false does without)",
        key="http.port" if taken else "http.host",
    ) from error


def _resolve(host: str) -> list[tuple[socket.AddressFamily, str]]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"http.host {host!r} is no address of this machine: {error.strerror or error}",
            key="http.host",
        ) from error
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


def _bind(family: socket.AddressFamily, address: str, port: int) -> Door:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a restart
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        _find_the_dead(listener)
        listener.bind((address, port))
        listener.listen(listen.BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return Door(listener, _address(listener))


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return (
        f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"
    )


def _find_the_dead(listener: socket.socket) -> None:
    """Have connections noticed whose other end is gone without a word; accepted ones inherit it."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "darwin":
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPALIVE, 30)
    else:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
