"""The daemon as the page sees it. `actors.system.System` implements it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from protocol.messages import EventRecord
from protocol.request_record import RequestRecord
from protocol.types import DaemonStatus, ModelStatus


class Observed(Protocol):
    """What the stream shows. No method waits."""

    def status(self) -> DaemonStatus:
        """Return the newest snapshots."""

    def events_since(self, number: int) -> list[EventRecord]:
        """Return the records after this one that the event log still has."""

    def open_requests(self) -> list[RequestRecord]: ...

    def ended_since(self, number: int) -> list[RequestRecord]:
        """Return the ended requests after this one that are still kept."""


class Control(Observed, Protocol):
    """The operations on known models; each raises the `KvdError` of its failure."""

    async def load_known(self, name: str) -> ModelStatus:
        """Load a model as it was loaded or configured before, and wait until it is ready."""

    async def unload(self, name: str, *, force: bool = False) -> int:
        """Unload a model and return the bytes freed; ``force``: end its requests at once."""

    async def set_policy(self, name: str, fields: Mapping[str, Any]) -> None:
        """Change these fields of a model's policy (`ModelPolicy`)."""
