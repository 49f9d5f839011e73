"""Looks at the daemon again and again, over one connection that is made anew when it is lost."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Self

from kvd.client import Client
from protocol.errors import KvdError, NotRunning

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvd.cli.common import Terms
    from protocol.messages import EventRecord
    from protocol.types import DaemonStatus


class Watch:
    """A connection for looking."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._client: Client | None = None
        self._pid: int | None = None
        self._seen = 0
        """The number of the newest event that was told."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self) -> DaemonStatus:
        """Return how things are; raises `KvdError`, and the next look tries again."""
        with self._kept() as client:
            return client.status()

    def news(self) -> list[EventRecord]:
        """Return what has happened since the last time; at first what the daemon remembers."""
        with self._kept() as client:
            found = list(client.events(since=self._seen))
            if found:
                self._seen = found[-1].seq
            return found

    def close(self) -> None:
        """Close the connection."""
        if self._client is not None:
            self._client.close()
            self._client = None

    @contextlib.contextmanager
    def _kept(self) -> Iterator[Client]:
        try:
            if self._client is None:
                self._client = Client(socket=self._terms.socket, home=self._terms.home)
                pid = self._client.hello().pid
                if pid != self._pid:  # another daemon counts from 1 again
                    self._pid, self._seen = pid, 0
            yield self._client
        except KvdError:
            self.close()
            raise


def is_away(error: KvdError) -> bool:
    """Return whether the daemon may come back, so that looking again makes sense."""
    return isinstance(error, NotRunning)
