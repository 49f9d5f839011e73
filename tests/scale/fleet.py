"""Several real daemons, a router in front of them, and clients that talk to it."""

from __future__ import annotations

import contextlib
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvd.host.home import Home
from tests.http.live import Live
from tests.process.helpers import DEADLINE_S, source, wait_for, write_config

ROOT = Path(__file__).parents[2]
DAEMONS = 3


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Member(Live):
    """A daemon with an HTTP port that stays the same over its restarts."""

    def __init__(self, root: Path, port: int, config: str, *arguments: str) -> None:
        home = write_config(Home(root), config)
        super().__init__(home, "--port", str(port), *arguments)
        self.port = port
        self.place = f"127.0.0.1:{port}"

    def ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://{self.place}/ready").status_code == 200
        return False


@dataclass
class Fleet:
    """Daemons with the same models."""

    root: Path
    members: list[Member]

    def at(self, place: str) -> Member:
        """Return the daemon with this address."""
        return next(member for member in self.members if member.place == place)

    def start(self) -> None:
        for member in self.members:
            member.launch()
        for member in self.members:
            wait_for(f"{member.place} is ready", member.ready, 90)


CONFIG = "".join(
    f'[[models]]\nsource = "{source(**options)}"\nalias = "{name}"\n'
    for name, options in {
        "fast": {"tps": 0},
        "steady": {"tps": 50},
        "slow": {"tps": 5},
    }.items()
) + ('[[models]]\nsource = "fake:load_error=invalid_model"\nalias = "broken"\nload = "demand"\n')
"""Models of the fake engine: three speeds in steps per second, and one that cannot load."""


@contextlib.contextmanager
def fleet_of(config: str, *arguments: str) -> Iterator[Fleet]:
    """Start daemons with this configuration; they end with the block."""
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    ports = [free_port() for _ in range(DAEMONS)]
    members = [
        Member(root / f"h{number}", port, config, *arguments) for number, port in enumerate(ports)
    ]
    try:
        fleet = Fleet(root, members)
        fleet.start()
        yield fleet
    finally:
        for member in members:
            member.end()
        shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def running(
    command: Sequence[str],
    url: str,
    ready: str,
    log: Path,
    deadline_s: float = DEADLINE_S,
    **env: str,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a router until the end of the block; wait until a path answers with 200."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env or None
        )

    def answers() -> bool:
        assert process.poll() is None, log.read_text()
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{url}{ready}", timeout=DEADLINE_S).status_code == 200
        return False

    try:
        wait_for(f"{command[0]} answers", answers, deadline_s)
        yield process
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
