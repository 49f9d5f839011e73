"""The common fields of requests and events (`protocol.messages`)."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

VERSION = 1
RequestId = Annotated[str, Meta(min_length=1, max_length=128)]


class RequestBase(msgspec.Struct, frozen=True, kw_only=True, tag_field="op"):
    """Base of all requests."""

    id: RequestId
    """The client's id of the request, unique among the connection's open requests."""
    v: int = VERSION


class EventBase(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", omit_defaults=True):
    """Base of all events."""

    id: str
    """Id of the request that the event answers."""
