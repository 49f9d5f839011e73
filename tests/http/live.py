"""A real daemon that answers HTTP."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from typing import Any

from tests.process.helpers import DEADLINE_S, Daemon, wait_for


class Live(Daemon):
    """A daemon whose HTTP addresses are read from its status."""

    @property
    def url(self) -> str:
        """The TCP address."""
        with self.client() as kvd:
            return next(one for one in kvd.status().http if one.startswith("http:"))

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def running(self, model: str) -> int:
        return self.model(model).requests

    def wait_idle(self, model: str) -> None:
        wait_for(f"{model} is idle", lambda: self.running(model) == 0)

    def tcp(self) -> socket.socket:
        """Return a raw connection."""
        return socket.create_connection(self.address, DEADLINE_S)

    def unix(self) -> socket.socket:
        raw = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        raw.settimeout(DEADLINE_S)
        raw.connect(str(self.home.http_socket))
        return raw

    def unload(self, model: str) -> None:
        """Unload a model that an earlier test may have loaded."""
        with self.client() as kvd:
            if model not in kvd.status().unloaded:
                kvd.unload(model)


@contextlib.contextmanager
def stopped(daemon: Daemon) -> Iterator[None]:
    """Kill a daemon at the end of the block, even after an error."""
    try:
        yield
    finally:
        daemon.end()


def request(path: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of a POST request."""
    said = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(said)}\r\n\r\n"
    return head.encode() + said


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "fast", "messages": [{"role": "user", "content": "Hi"}]} | fields
