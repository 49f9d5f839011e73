"""Who lives under the budget, and what each of them is worth there. Pure.

A tenant is a model that the daemon holds a seat for, from before its process is started until the
seat is given up. Does not cover what it may hold (`actors.machines.ledger`), nor what is done
about it (`actors.machines.governor`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

from protocol.policy import ModelPolicy
from protocol.types import Reclaimable
from protocol.worker import ReclaimMethod

GRACE_S = 1.0
"""What a request, or the word of it, may take on its way: before, nobody is idle for sure."""


class OpenReclaim(msgspec.Struct, frozen=True):
    """A `Reclaim` that the worker works on."""

    seq: int
    method: ReclaimMethod
    wanted_bytes: int
    level: int
    until: float
    """Not heard of by then, it counts as over."""


class ModelAccount(msgspec.Struct):
    """One model. The times are the machine's clock."""

    name: str
    policy: ModelPolicy = ModelPolicy()
    state: Literal["loading", "ready", "leaving"] = "loading"
    patient: bool = True
    """Its load waits until others have finished; else it is refused if they do not make room."""
    reclaimable: Reclaimable = Reclaimable()
    boarded_at: float = 0.0
    load_since: float | None = None
    """When its load first asked for memory, also if it had to begin anew since."""
    load_s: float = 1.0
    """How long its last load took: what an eviction costs."""
    idle_since: float | None = None
    """None while it has requests, or is not ready."""
    serving: bool = False
    """The daemon has given its process requests that are not over."""
    open: OpenReclaim | None = None
    barren: dict[str, float] = msgspec.field(default_factory=dict)
    """By rung: it gave nothing there, and is not asked again before this time."""
    level: int = 0
    """Where its new rows were told to start."""
    kept_since: float | None = None
    """Since when it waits, although its wish is a new one: it gave back for others, or has loaded
    for requests that do not run yet."""
    measured_bytes: int = 0
    held: bool = False
    """New requests for it wait in the daemon."""
    evicting: bool = False
    """It leaves since we said so, and finishes what it runs."""

    @property
    def is_idle(self) -> bool:
        """Whether it is ready and nobody asks for it."""
        return self.state == "ready" and self.idle_since is not None

    def is_evictable(self, now: float) -> bool:
        """Whether it could be unloaded now, and nobody would notice but the next request."""
        return self._idle_for(GRACE_S, now)

    def is_expired(self, now: float) -> bool:
        """Whether it has been idle for longer than it may be."""
        ttl = self.policy.idle_ttl_s
        return ttl is not None and self._idle_for(max(GRACE_S, ttl), now)

    def _idle_for(self, seconds: float, now: float) -> bool:
        since = self.idle_since
        is_free = self.state == "ready" and not self.policy.pinned
        return is_free and since is not None and now >= since + seconds

    def worth(self, granted_bytes: int, now: float) -> tuple[int, float, str]:
        """Return what it is worth to keep it while it is idle; the least goes first.

        By priority, then by the seconds that a load costs, for each byte and each second that
        nobody asked for it.
        """
        idle_s = 1.0 + now - (now if self.idle_since is None else self.idle_since)
        return self.policy.priority, self.load_s / (max(1, granted_bytes) * idle_s), self.name

    def take(self, reclaimable: Reclaimable, now: float) -> None:
        """Note what it could give back, and whether anybody asks for it."""
        if reclaimable.rows or (self.idle_since is not None and now >= self.idle_since + GRACE_S):
            self.kept_since = None
        self.reclaimable = reclaimable
        if self.state != "ready" or self.serving or reclaimable.rows or reclaimable.waiting:
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = now

    def gave(self, method: ReclaimMethod, level: int, freed_bytes: int, *, exhausted: bool) -> None:
        """Take what was given out of the offer, until the worker says a new one."""
        reclaimable = self.reclaimable
        if method == "precision":
            levels = tuple(0 if at < level else left for at, left in enumerate(reclaimable.levels))
            self.reclaimable = msgspec.structs.replace(reclaimable, levels=levels)
        else:
            rest = 0 if exhausted else max(0, getattr(reclaimable, method) - freed_bytes)
            self.reclaimable = msgspec.structs.replace(reclaimable, **{method: rest})

    def end(self) -> None:
        """Forget what its process said: it is gone."""
        self.state = "loading"
        self.reclaimable = Reclaimable()
        self.idle_since = self.open = self.kept_since = None
        self.barren.clear()
        self.evicting = self.serving = False
        self.level = self.measured_bytes = 0
