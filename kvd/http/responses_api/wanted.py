"""A request to ``POST /v1/responses``, read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from msgspec import Raw

    from kvd.http.responses_api.objects import Response
    from kvd.http.responses_api.tools import Tools
    from protocol.messages import Generate


@dataclass(frozen=True)
class Wanted:
    """A request, read."""

    call: Generate
    response: Response
    """The response before its first event."""
    tools: Tools
    summary: bool
    """Whether reasoning is sent as a summary."""
    sealed: bool
    """Whether reasoning items carry ``encrypted_content``."""
    store: bool
    stream: bool
    input: tuple[Raw, ...]
    """The request's own items, for the store."""
    ignored: dict[str, int]
    """Number of ignored items, reasoning items and tools, by these names."""
