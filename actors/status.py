"""Known models, and the newest status of those with a worker.

Each worker writes its own status, and any code on the event loop may read it. Statuses are
immutable, so a reader never waits and never sees half an update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from protocol.errors import ModelError, UnknownModel, UnsupportedModel
from protocol.kv import KVSpec
from protocol.model_source import is_source, unknown_model
from protocol.policy import ModelPolicy
from protocol.types import ModelStatus


@dataclass(frozen=True)
class KnownModel:
    """How to load a model that requests may name."""

    source: str
    kv: KVSpec = field(default_factory=KVSpec)
    policy: ModelPolicy = field(default_factory=ModelPolicy)
    listed: bool = False
    """Whether the configuration lists the model: it stays known after a failed load and after an
    unload."""
    found: bool = False
    """Whether the model is in the models folder: it stays known as long as its folder exists."""

    @property
    def stays(self) -> bool:
        """Whether the model stays known without a worker."""
        return self.listed or self.found


@dataclass
class StatusTable:
    """Known models and statuses by model name."""

    known: dict[str, KnownModel] = field(default_factory=dict)
    """Models of the configuration, and those loaded by users until they unload them."""
    models: dict[str, ModelStatus] = field(default_factory=dict)
    """Written by each model's worker; the model registry removes entries."""
    requests: Mapping[str, int] = field(default_factory=dict)
    """Requests by model, from the router."""
    find_model: Callable[[str], str | None] = lambda _name: None
    """Returns the source of a model in the models folder by name; raises a `ModelError` if its
    folder cannot be loaded."""
    may_load: Callable[[str], bool] = is_source
    """Returns whether a worker may load a model from a text."""
    footprints: Mapping[int, int] = field(default_factory=dict)
    """Footprints by process id, as the daemon last read them; all ranks of gangs are included."""
    paused: Callable[[], Mapping[str, int]] = dict
    """Returns paused requests by model, from the router."""
    expires_in: Callable[[str], float | None] = lambda _model: None
    """Returns the seconds until a model's idle limit, from the governor."""
    devices: int = 1
    """Devices with a budget of their own."""

    def lookup(self, name: str) -> KnownModel | None:
        """Return how a model is known; names that are new are looked up in the models folder."""
        known = self.known.get(name)
        if name in self.models or (known is not None and not known.found):
            return known
        try:
            source = self.find_model(name)
        except ModelError:
            source = None
        if source is None:
            self.known.pop(name, None)  # its folder is gone, or damaged
            return None
        if known is None:
            known = self.known[name] = KnownModel(source, found=True)
        return known

    def model(self, name: str) -> ModelStatus:
        return self._complete(name, self.paused())

    def all(self) -> list[ModelStatus]:
        paused = self.paused()
        return [self._complete(name, paused) for name in sorted(self.models)]

    def unknown_model(self, name: str) -> UnknownModel:
        """Return the error for a name that is not known, or whose folder cannot be loaded."""
        try:
            self.find_model(name)
        except ModelError as error:
            return UnknownModel(f"model {name!r} cannot be loaded: {error.message}", model=name)
        return unknown_model(name, self.models, self.known.keys() - self.models.keys())

    def missing_device(self, name: str, policy: ModelPolicy) -> UnsupportedModel | None:
        """Return the error for a model on devices that this machine does not have."""
        last = policy.device + (policy.ranks if self.devices > 1 else 1) - 1
        if last < self.devices:
            return None
        has = "only device 0" if self.devices == 1 else f"devices 0 to {self.devices - 1}"
        return UnsupportedModel(
            f"{name} needs device {last}, and this machine has {has}: change device or ranks",
            model=name,
        )

    def _complete(self, name: str, paused: Mapping[str, int]) -> ModelStatus:
        known, status = self.known.get(name), self.models[name]
        return replace(
            self._with_footprints(status) if status.ranks else status,
            requests=self.requests.get(name, 0),
            paused=paused.get(name, 0),
            pinned=known is not None and known.policy.pinned,
            priority=0 if known is None else known.policy.priority,
            expires_in_s=self.expires_in(name),
            idle_ttl_s=None if known is None else known.policy.idle_ttl_s,
        )

    def _with_footprints(self, status: ModelStatus) -> ModelStatus:
        """Return a gang's status with what the daemon read: no rank can measure the others."""
        found = self.footprints
        ranks = [replace(it, footprint_bytes=found.get(it.pid, 0)) for it in status.ranks]
        total = sum(it.footprint_bytes for it in ranks)
        memory = status.stats.memory
        memory = replace(memory, footprint=total or memory.footprint)
        return replace(status, ranks=ranks, stats=replace(status.stats, memory=memory))
