"""The newest word of each actor about itself, for `status`: written by one, read by anyone.

Frozen values only. Whoever reads never waits, and never sees half a change.
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
    """What is known of the models."""

    models: dict[str, ModelStatus] = field(default_factory=dict)
    """Written by each model's worker, taken down by the supervisor."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """Written by the router."""
    paused: Callable[[], Mapping[str, int]] = dict
    """How many of them rest; the router's."""
    policies: Callable[[], Mapping[str, ModelPolicy]] = dict
    """What users said of the models; the supervisor's."""

    def model(self, name: str) -> ModelStatus:
        """Return one model's status."""
        return self._complete(name, self.paused())

    def _complete(self, name: str, paused: Mapping[str, int]) -> ModelStatus:
        policy = self.policies().get(name)
        return replace(
            self.models[name],
            requests=self.requests.get(name, 0),
            paused=paused.get(name, 0),
            pinned=policy is not None and policy.pinned,
            priority=0 if policy is None else policy.priority,
        )

    def all(self) -> list[ModelStatus]:
        """Return every model's status, by name."""
        paused = self.paused()
        return [self._complete(name, paused) for name in sorted(self.models)]
