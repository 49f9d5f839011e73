"""A model's policy: its priority, pinning and limits relative to other models."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, UnsetType

from protocol.fields import MAX_INT, Device, PositiveSeconds, Priority, Ranks

MaxContext = Annotated[int, Meta(ge=1, le=MAX_INT)]
Weight = Annotated[float, Meta(ge=0.1, le=10.0)]


class ModelPolicy(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a model is treated relative to other models under the memory budget."""

    priority: Priority = 0
    """Priority when memory is short: models of lower priority give memory back first."""
    pinned: bool = False
    """Whether the model is never evicted."""
    idle_ttl_s: PositiveSeconds | None = None
    """Seconds without requests after which the model is unloaded; absent: no limit."""
    max_context: MaxContext | None = None
    """Maximum tokens of prompt and completion together; absent: the model's own limit."""
    ranks: Ranks = 1
    """Processes that share the model, each with a part of every layer; 1: one process."""
    device: Device = 0
    """With several GPUs: number of the GPU that has the model, or its first rank. The other ranks
    have the next ones."""
    weight: Weight = 1.0
    """Share of a shared accelerator: twice the weight gives time slices of twice the length."""


class PolicyChange(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of a model's policy to change. Absent fields stay; null removes a limit."""

    priority: Priority | UnsetType = UNSET
    pinned: bool | UnsetType = UNSET
    idle_ttl_s: PositiveSeconds | UnsetType | None = UNSET
    max_context: MaxContext | UnsetType | None = UNSET
    ranks: Ranks | UnsetType = UNSET
    device: Device | UnsetType = UNSET
    weight: Weight | UnsetType = UNSET

    @property
    def fields(self) -> dict[str, Any]:
        """New values by the name of the field of `ModelPolicy`."""
        values = msgspec.structs.asdict(self)
        return {name: value for name, value in values.items() if value is not UNSET}

    def applied_to(self, policy: ModelPolicy) -> ModelPolicy:
        return msgspec.structs.replace(policy, **self.fields)
