"""Messages about the prefix store, a part of `protocol.messages`."""

from __future__ import annotations

from protocol import fields
from protocol.message_base import EventBase, RequestBase
from protocol.segments import PrefixSpace, PrefixStoreStatus


class Cache(RequestBase, tag="cache", frozen=True, kw_only=True):
    """Return what the prefix store contains, and its limits."""


class CacheDrop(RequestBase, tag="cache_drop", frozen=True, kw_only=True):
    """Delete prefixes from the prefix store: those that meet all conditions, or all."""

    model: fields.Name | None = None
    """Model that used them, loaded or not. Models of the same weights lose them too."""
    unused_s: fields.Seconds | None = None
    """Minimum seconds since their last use."""


class CacheReply(EventBase, tag="cache", frozen=True, kw_only=True):
    """Answers ``cache``."""

    store: PrefixStoreStatus
    spaces: list[PrefixSpace]


class CacheDropped(EventBase, tag="cache_dropped", frozen=True, kw_only=True):
    """Answers ``cache_drop``, after the files are deleted."""

    segments: int
    """Number of deleted segments; those that continue a deleted one included."""
    freed_bytes: int
