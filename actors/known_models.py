"""Which models the daemon knows by name, loaded or not: a request for one of them brings it.

Known are those of the configuration and those that were loaded and then made room for others; not
those that a user has unloaded. Does not cover who is loaded (`actors.model_registry`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from protocol.policy import ModelPolicy
from protocol.types import KVSpec

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class KnownModel:
    """How a model is loaded."""

    source: str
    kv: KVSpec = field(default_factory=KVSpec)
    policy: ModelPolicy = field(default_factory=ModelPolicy)
    listed: bool = False
    """In the configuration: it is known even if its load failed."""


@dataclass
class KnownModels:
    """The models by name."""

    models: dict[str, KnownModel] = field(default_factory=dict)

    def policies(self) -> Mapping[str, ModelPolicy]:
        """Return how each of them stands beside the others."""
        return {name: known.policy for name, known in self.models.items()}
