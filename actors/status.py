"""The newest status of every model, for ``status`` replies.

Each worker writes its own entry, and anyone may read. Entries are immutable, so a reader never
waits and never sees half an update.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from protocol.policy import ModelPolicy
    from protocol.types import ModelStatus


@dataclass
class StatusTable:
    """Statuses by model name."""

    models: dict[str, ModelStatus] = field(default_factory=dict)
    """Written by each model's worker; the model registry removes entries."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """Requests by model, from the router."""
    paused: Callable[[], Mapping[str, int]] = dict
    """Returns paused requests by model, from the router."""
    policies: Callable[[], Mapping[str, ModelPolicy]] = dict
    """Returns the models' policies, from the model registry."""

    def model(self, name: str) -> ModelStatus:
        return self._complete(name, self.paused())

    def all(self) -> list[ModelStatus]:
        """Return every model's status, sorted by name."""
        paused = self.paused()
        return [self._complete(name, paused) for name in sorted(self.models)]

    def _complete(self, name: str, paused: Mapping[str, int]) -> ModelStatus:
        policy = self.policies().get(name)
        return replace(
            self.models[name],
            requests=self.requests.get(name, 0),
            paused=paused.get(name, 0),
            pinned=policy is not None and policy.pinned,
            priority=0 if policy is None else policy.priority,
        )
