"""What the governor knows about each model. Pure.

An account exists from before a model's process starts until the registry drops the model.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from protocol.policy import ModelPolicy
from protocol.types import Reclaimable
from protocol.worker import ReclaimMethod

GRACE_S = 1.0
"""Seconds that a request, or a report about it, may be on its way. A model is evicted only after
it has been idle for this time."""

PROTECTED_LOADS, MAX_PROTECTED_S = 2.0, 300.0
"""A model is protected for as many times as its load took, and at most for so many seconds."""


class OpenReclaim(msgspec.Struct, frozen=True):
    """A `Reclaim` that the worker works on."""

    seq: int
    method: ReclaimMethod
    wanted_bytes: int
    level: int
    until: float
    """Time at which it counts as over even without a report."""


class ModelAccount(msgspec.Struct):
    """One model. Times are on the event loop's clock."""

    name: str
    policy: ModelPolicy = ModelPolicy()
    state: Literal["loading", "ready", "leaving"] = "loading"
    patient: bool = True
    """The load waits for memory that models in use hold; otherwise it is refused."""
    reclaimable: Reclaimable = Reclaimable()
    load_started_at: float = 0.0
    load_since: float | None = None
    """When the load first requested memory, including attempts before the current one."""
    load_s: float = 1.0
    """Seconds that the last load took: the cost of an eviction."""
    protected_since: float = -math.inf
    """When rows ran again after a time without any."""
    no_rows_since: float | None = -math.inf
    """None while rows run."""
    idle_since: float | None = None
    """None while the model has requests or is not ready."""
    serving: bool = False
    """The daemon has given the process requests that are not over."""
    reclaims: int = 0
    """Number of the last `Reclaim`."""
    open: OpenReclaim | None = None
    barren: dict[str, float] = msgspec.field(default_factory=dict)
    """By method that gave too little or nothing, the time before which it is not tried again."""
    level: int = 0
    """Precision level at which new rows start."""
    kept_since: float | None = None
    """Time since which the model's next memory request counts as waiting; None: since it arrives.
    Set if the model gave memory to others before its request was granted, or was loaded for
    requests that do not run yet."""
    measured_bytes: int = 0
    over_limit: int = 0
    """Measurements in a row that were above the limit of the worker's memory."""
    evicting: bool = False
    """The governor evicts the model, after it has finished its running requests."""

    @property
    def is_idle(self) -> bool:
        return self.state == "ready" and self.idle_since is not None

    def is_evictable(self, now: float) -> bool:
        """Whether an eviction now would delay only the next request."""
        return self._is_idle_for(GRACE_S, now)

    def is_protected(self, now: float, least_s: float) -> bool:
        """Return whether the model has run rows for less than it must: at least ``least_s``."""
        lasts_s = max(least_s, min(PROTECTED_LOADS * self.load_s, MAX_PROTECTED_S))
        return self.state == "ready" and now < self.protected_since + lasts_s

    def is_expired(self, now: float) -> bool:
        ttl = self.policy.idle_ttl_s
        return ttl is not None and self._is_idle_for(max(GRACE_S, ttl), now)

    def expires_in(self, now: float) -> float | None:
        """Return the seconds until the model expires if no request arrives; None: never."""
        ttl = self.policy.idle_ttl_s
        if ttl is None or self.policy.pinned or self.state != "ready":
            return None
        since = now if self.idle_since is None else self.idle_since
        return max(0.0, since + max(GRACE_S, ttl) - now)

    def _is_idle_for(self, seconds: float, now: float) -> bool:
        since = self.idle_since
        unpinned = self.state == "ready" and not self.policy.pinned
        return unpinned and since is not None and now >= since + seconds

    def worth(self, granted_bytes: int, now: float) -> tuple[int, float, str]:
        """Return a sort key for the benefit of keeping the model; the lowest is evicted first.

        The key is the priority, then the seconds of a load per granted byte and idle second.
        """
        idle_s = 1.0 + now - (now if self.idle_since is None else self.idle_since)
        return self.policy.priority, self.load_s / (max(1, granted_bytes) * idle_s), self.name

    def update(self, reclaimable: Reclaimable, now: float) -> None:
        """Note what the worker could give back, and whether it has requests."""
        if reclaimable.rows or (self.idle_since is not None and now >= self.idle_since + GRACE_S):
            self.kept_since = None
        self._note_rows(reclaimable.rows, now)
        self.reclaimable = reclaimable
        if self.state != "ready" or self.serving or reclaimable.rows or reclaimable.waiting:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now

    def _note_rows(self, rows: int, now: float) -> None:
        """Protect the model if rows run again after a time without any."""
        if not rows:
            self.no_rows_since = now if self.no_rows_since is None else self.no_rows_since
            return
        if self.no_rows_since is not None and now >= self.no_rows_since + GRACE_S:
            self.protected_since = now
        self.no_rows_since = None

    def deduct(
        self, method: ReclaimMethod, level: int, freed_bytes: int, *, exhausted: bool
    ) -> None:
        """Subtract freed bytes from `reclaimable`, until the worker reports it again."""
        reclaimable = self.reclaimable
        if method == "precision":
            levels = tuple(0 if at < level else left for at, left in enumerate(reclaimable.levels))
            self.reclaimable = msgspec.structs.replace(reclaimable, levels=levels)
        else:
            rest = 0 if exhausted else max(0, getattr(reclaimable, method) - freed_bytes)
            self.reclaimable = msgspec.structs.replace(reclaimable, **{method: rest})

    def reset(self) -> None:
        """Forget what the process reported, because it is gone."""
        self.state = "loading"
        self.reclaimable = Reclaimable()
        self.idle_since = self.open = self.kept_since = None
        self.protected_since = self.no_rows_since = -math.inf
        self.barren.clear()
        self.evicting = self.serving = False
        self.level = self.measured_bytes = self.over_limit = 0
