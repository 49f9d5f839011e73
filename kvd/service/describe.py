"""The service of one home and its state, independent of launchd and systemd."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from kvd.config.config import Config
from kvd.config.http import DEFAULT_PORT
from kvd.host.home import Home, locate
from protocol.errors import ConfigError

STOP_SLACK_S = 15
"""Seconds after the drain for workers to end, before the manager kills the rest."""
_PASSED_ON = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "XDG_CACHE_HOME")
"""Variables that locate models, copied to the service's file. Secrets are not copied."""

Status = Literal["running", "starting", "stopping", "listening", "stopped", "failed"]


@dataclass(frozen=True)
class State:
    """The state of a service, as the service manager reports it."""

    status: Status
    """``listening``: the first client starts the daemon."""
    details: str = ""
    pid: int | None = None


@dataclass(frozen=True)
class Service:
    """One home's daemon as a service."""

    home: Path
    program: tuple[str, ...]
    """The command of `kvd` with an absolute path."""
    drain_s: float = Config().drain_timeout_s
    on_demand: bool = False
    """Whether the first client starts the daemon, instead of the session."""
    http: tuple[tuple[str, int], ...] = ()
    """Addresses and ports that the manager listens on; only with ``on_demand``."""
    http_socket: bool = False
    """Whether the manager also listens on ``http.sock``; used only with ``on_demand``."""
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``kvd`` for the default home, else ``kvd-`` and a hash of the home's path."""
        if self.home == locate("~/.kvd").root:
            return "kvd"
        return f"kvd-{hashlib.sha256(os.fsencode(self.home)).hexdigest()[:8]}"

    @property
    def command(self) -> list[str]:
        return [*self.program, "serve", "--home", str(self.home)]

    def is_run_by(self, words: Sequence[object]) -> bool:
        """Return whether a command line serves this home, from any installation of kvd."""
        arguments = self.command[-3:]
        return any(list(words[at : at + 3]) == arguments for at in range(len(words)))

    @property
    def stop_s(self) -> int:
        """Seconds that a stop may take before the manager kills the daemon."""
        return math.ceil(self.drain_s) + STOP_SLACK_S

    @property
    def sockets(self) -> list[Path]:
        """The Unix sockets that the manager listens on, the protocol's first."""
        home = Home(self.home)
        return [home.socket, home.http_socket] if self.http_socket else [home.socket]


def describe(home: Home, settings: Config, *, on_demand: bool = False) -> Service:
    """Return the service of this home for this configuration and this installation of kvd.

    Raises `ConfigError` if the manager would listen on an address that this machine does not have.
    """
    http = settings.http
    port = DEFAULT_PORT if http.port is None else http.port
    tcp = on_demand and http.enabled and http.tcp and port != 0
    return Service(
        home=home.root,
        program=program(),
        drain_s=settings.drain_timeout_s,
        on_demand=on_demand,
        http=tuple((address, port) for address in _addresses(http.host)) if tcp else (),
        http_socket=http.enabled,
        variables={name: os.environ[name] for name in _PASSED_ON if os.environ.get(name)},
    )


def _addresses(host: str) -> list[str]:
    """Resolve a host name, because systemd listens only on addresses."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"http.host {host!r} is not an address of this machine: {error.strerror or error}",
            key="http.host",
        ) from error
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


def program() -> tuple[str, ...]:
    """Return the command of the `kvd` that belongs to this interpreter."""
    script = Path(sys.executable).with_name("kvd")
    return (str(script),) if script.exists() else (sys.executable, "-P", "-m", "kvd")
