"""A model's policy: its priority, pinning and limits relative to other models."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from protocol.fields import MAX_INT, PositiveSeconds, Priority, Ranks


class ModelPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model is treated relative to other models under the memory budget."""

    priority: Priority = 0
    """Priority when memory is short: models of lower priority give memory back first."""
    pinned: bool = False
    """Whether the model is never evicted."""
    idle_ttl_s: PositiveSeconds | None = None
    """Seconds without requests after which the model is unloaded; absent: no limit."""
    max_context: Annotated[int, Meta(ge=1, le=MAX_INT)] | None = None
    """Maximum tokens of prompt and completion together; absent: the model's own limit."""
    ranks: Ranks | None = None
    """Processes that share the model, each with a part of every layer; absent: as the model is
    known, otherwise 1 (in `config.toml`: always 1)."""
    weight: Annotated[float, Meta(ge=0.1, le=10.0)] = 1.0
    """Share of a shared accelerator: twice the weight gives time slices of twice the length."""

    @property
    def processes(self) -> int:
        """Number of processes that share the model."""
        return self.ranks or 1
