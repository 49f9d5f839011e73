"""What is to be run as a service: the daemon of one home. Knows neither launchd nor systemd."""

from __future__ import annotations

import hashlib
import math
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvd.config.config import Config
from kvd.host.home import Home, locate
from protocol.errors import ConfigError

STOP_SLACK_S = 15
"""Beyond the drain: for the workers to end, before the manager kills what is left."""
_PASSED_ON = ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_ENDPOINT", "XDG_CACHE_HOME")
"""Where models are found: the service has to look there too. Secrets stay out of its file."""


@dataclass(frozen=True)
class Service:
    """One home's daemon."""

    home: Path
    program: tuple[str, ...]
    """With an absolute path."""
    drain_s: float = Config().drain_timeout_s
    on_demand: bool = False
    """Started by the first client, and not with the session."""
    http: tuple[tuple[str, int], ...] = ()
    """Addresses and ports that the manager listens on for us, with `on_demand`."""
    http_socket: bool = False
    """The same of ``http.sock``."""
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """``kvd``; of another home than the usual one it says of which."""
        if self.home == locate("~/.kvd").root:
            return "kvd"
        return f"kvd-{hashlib.sha256(os.fsencode(self.home)).hexdigest()[:8]}"

    @property
    def command(self) -> list[str]:
        """All of the command line."""
        return [*self.program, *self._arguments]

    @property
    def _arguments(self) -> list[str]:
        return ["serve", "--home", str(self.home)]

    def is_run_by(self, words: Sequence[object]) -> bool:
        """Return whether a command line has this home served, by any installation of kvd."""
        count = len(self._arguments)
        return any(list(words[at : at + count]) == self._arguments for at in range(len(words)))

    @property
    def stop_s(self) -> int:
        """The seconds that a stop may take before the manager kills."""
        return math.ceil(self.drain_s) + STOP_SLACK_S

    @property
    def sockets(self) -> list[Path]:
        """The Unix sockets that the manager listens on, the protocol's first."""
        home = Home(self.home)
        return [home.socket, home.http_socket] if self.http_socket else [home.socket]


def describe(home: Home, settings: Config, *, on_demand: bool = False) -> Service:
    """Return the service of this home, with this configuration and this installation of kvd.

    Raises `ConfigError` where the manager is to listen on what is no address of this machine.
    """
    http = settings.http
    port = 11711 if http.port is None else http.port
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
    """Return what a name stands for now: systemd listens on addresses alone."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"http.host {host!r} is no address of this machine: {error.strerror or error}",
            key="http.host",
        ) from error
    return list(dict.fromkeys(str(address[0]) for _, _, _, _, address in found))


def program() -> tuple[str, ...]:
    """Return how to call the `kvd` that belongs to this interpreter."""
    script = Path(sys.executable).with_name("kvd")
    return (str(script),) if script.exists() else (sys.executable, "-P", "-m", "kvd")
