"""Models that requests may name, loaded or not.

These are the models of the configuration and those that were loaded and later evicted, but not
those that a user has unloaded. Loaded models are in `actors.model_registry`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.kv import KVSpec
from protocol.policy import ModelPolicy

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class KnownModel:
    """How a model is loaded."""

    source: str
    kv: KVSpec = field(default_factory=KVSpec)
    policy: ModelPolicy = field(default_factory=ModelPolicy)
    listed: bool = False
    """Whether the configuration lists the model, so that it stays known after a failed load."""


@dataclass
class KnownModels:
    """Known models by name."""

    models: dict[str, KnownModel] = field(default_factory=dict)

    def policies(self) -> Mapping[str, ModelPolicy]:
        return {name: known.policy for name, known in self.models.items()}
