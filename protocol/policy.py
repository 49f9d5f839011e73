"""What a user says of one model beside its source and its KV cache: who pays first, who stays."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.types import MAX_INT, Priority

MAX_TTL_S = 365 * 24 * 3600.0


class ModelPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model stands beside the others under the one budget."""

    priority: Priority = 0
    """When memory is short, models of lower priority give first."""
    pinned: bool = False
    """Never unloaded to make room."""
    idle_ttl_s: Annotated[float, Meta(gt=0.0, le=MAX_TTL_S)] | None = None
    """Unloaded when nobody asked for it for so long; absent: only when room is needed."""
    max_context: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    """The most tokens of prompt and completion; absent: what the model says of itself."""
    weight: Annotated[float, Meta(ge=0.1, le=10.0)] = 1.0
    """Of its turns on an accelerator that several share: twice as much, twice as long."""
