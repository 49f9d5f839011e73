"""A client for polling the daemon, which connects again after an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Self

from kvd.cli.common import CommonOptions
from kvd.client import Client
from protocol.errors import KvdError
from protocol.messages import EventRecord
from protocol.types import DaemonStatus


class PollingClient:
    """One connection for many polls; it is replaced when it fails."""

    def __init__(self, common: CommonOptions) -> None:
        self._common = common
        self._client: Client | None = None
        self._pid: int | None = None
        self._last_event = 0
        """Number of the newest event returned."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def status(self) -> DaemonStatus:
        """Return the daemon's status; raises `KvdError`, after which the next call reconnects."""
        with self._connected() as client:
            return client.status()

    def new_events(self) -> list[EventRecord]:
        """Return the events since the last call; at first all that the daemon remembers."""
        with self._connected() as client:
            found = list(client.events(since=self._last_event))
            if found:
                self._last_event = found[-1].seq
            return found

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Client]:
        try:
            if self._client is None:
                self._client = Client(socket=self._common.socket, home=self._common.home)
                pid = self._client.hello().pid
                if pid != self._pid:  # a new daemon numbers its events from 1
                    self._pid, self._last_event = pid, 0
            yield self._client
        except KvdError:
            self.close()
            raise
