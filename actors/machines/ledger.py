"""The ledger of one device's memory budget: which model may hold how many bytes. Pure.

Grants come before growth: a worker requests memory before it uses it, and the sum of all grants
never exceeds the budget. A grant ends when the process exits, or when its worker requests less. A
request that does not fit waits, and is granted when other models give back enough.

Waiting requests are granted oldest first, and a small one may overtake a large one. That ends when
the governor makes one of them `first`: no other model grows before it. If the budget is lowered
below the grants, the grants only shrink until they fit.

A model over several devices holds the same number of bytes on each. Its ledgers refer to each other
(`Ledger.peers`). Either all of them grant a request, or none does: a part that one device granted
alone would be withheld from other models while nothing uses it.
"""

from __future__ import annotations

import msgspec

from actors.machines.machine import ModelRecord, Record


class MemoryRequest(Record, frozen=True):
    """A worker requests to hold this many bytes in total."""

    model: str
    seq: int
    total_bytes: int
    resuming: bool = False
    """The memory is for a preempted row."""
    since: float | None = None
    """When the wait began, if this request continues an earlier one; None: it is new."""


class WorkerExited(ModelRecord, frozen=True):
    """The worker's process is gone."""


Event = MemoryRequest | WorkerExited


class GrantDecision(Record, frozen=True):
    """The answer to a memory request: what the worker may hold from now on."""

    model: str
    seq: int
    total_bytes: int
    granted: bool
    available_bytes: int
    reason: str = ""
    """For a refused load, which models hold the rest of the budget."""
    host_bytes: int = 0
    """For a load that is refused because the host's memory is short, the bytes that it needs there.
    ``available_bytes`` are bytes of that memory then."""


class Ledger(msgspec.Struct):
    """Grants and waiting requests of one budget."""

    budget_bytes: int
    grants: dict[str, int] = msgspec.field(default_factory=dict)
    waiting: dict[str, MemoryRequest] = msgspec.field(default_factory=dict)
    """Waiting requests by model; their ``since`` is set."""
    first: str | None = None
    """The model whose request is granted before any other model grows."""
    exempt: set[str] = msgspec.field(default_factory=set)
    """Models that may grow before the first request, because a load that stops halfway helps no
    model. The ledgers of all devices share this set."""
    protected: set[str] = msgspec.field(default_factory=set)
    """Models whose running rows may grow before the first request is granted."""
    excess_bytes: int = 0
    """Bytes that workers use beyond their grants, as measured. They are not available."""
    ceiling_bytes: int = 0
    """Limit of the grants while they are above a lowered budget."""
    peers: dict[str, tuple[Ledger, ...]] = msgspec.field(default_factory=dict)
    """For each model over several devices, the ledgers of its other devices."""

    def handle(self, event: Event, now: float) -> list[GrantDecision]:
        match event:
            case MemoryRequest():
                decisions = self._request(event, now)
            case WorkerExited(model=model):
                for ledger in self.of(model):
                    ledger.grants.pop(model, None)
                self.withdraw(model)
                decisions = self.grant_waiting_beside(model)
        for it in self.of(event.model):
            it.ceiling_bytes = max(it.budget_bytes, min(it.ceiling_bytes, it.granted_bytes))
        return decisions

    def of(self, model: str) -> tuple[Ledger, ...]:
        """Return the ledgers of the model's devices."""
        return self, *self.peers.get(model, ())

    @property
    def granted_bytes(self) -> int:
        return sum(self.grants.values())

    @property
    def available_bytes(self) -> int:
        """Free bytes of the budget; negative if grants and excess are above it."""
        return self.budget_bytes - self.granted_bytes - self.excess_bytes

    @property
    def queue(self) -> list[MemoryRequest]:
        return sorted(self.waiting.values(), key=lambda it: (it.since or 0.0, it.model))

    def growth(self, request: MemoryRequest) -> int:
        return request.total_bytes - self.grants.get(request.model, 0)

    def keeps_back(self, request: MemoryRequest) -> bool:
        """Return whether a request must not be granted before the first one."""
        if self.first in {None, request.model} or request.model in self.exempt:
            return False
        return not (request.resuming and request.model in self.protected)

    def decision(self, request: MemoryRequest, *, granted: bool, reason: str = "") -> GrantDecision:
        total, available = self.grants.get(request.model, 0), max(0, self.available_bytes)
        return GrantDecision(request.model, request.seq, total, granted, available, reason)

    def set_budget(self, total_bytes: int) -> list[GrantDecision]:
        self.budget_bytes = total_bytes
        self.ceiling_bytes = max(total_bytes, self.granted_bytes)
        return self.grant_waiting()

    def withdraw(self, model: str) -> None:
        for ledger in self.of(model):
            ledger.waiting.pop(model, None)
            if ledger.first == model:
                ledger.first = None

    def check(self) -> None:
        limit = max(self.budget_bytes, self.ceiling_bytes)
        fitting = [it.model for it in self.waiting.values() if self._fits(it)]
        assert 0 <= self.granted_bytes <= limit, "grants above the budget"
        assert all(total >= 0 for total in self.grants.values()), "a negative grant"
        assert not fitting, "a request waits although it fits"
        assert self.first is None or self.first in self.waiting, "the first request does not wait"

    def grant_waiting(self) -> list[GrantDecision]:
        """Grant the waiting requests that fit, oldest first."""
        for request in self.queue:
            if self._fits(request):
                self.withdraw(request.model)
                # If it was the first request, older ones that it kept back may be granted as well.
                return [self._grant(request), *self.grant_waiting_beside(request.model)]
        return []

    def grant_waiting_beside(self, model: str) -> list[GrantDecision]:
        """Grant the waiting requests that fit on the devices of this model."""
        return [decision for it in self.of(model) for decision in it.grant_waiting()]

    def _request(self, request: MemoryRequest, now: float) -> list[GrantDecision]:
        model = request.model
        before = self.waiting.get(model)  # a newer request replaces it
        if not self._fits(request):
            known = [it.since for it in (before, request) if it and it.since is not None]
            since = min(known, default=now)
            for ledger in self.of(model):
                ledger.waiting[model] = msgspec.structs.replace(request, since=since)
            return [self.decision(request, granted=False)]
        self.withdraw(model)
        return [self._grant(request), *self.grant_waiting_beside(model)]

    def _fits(self, request: MemoryRequest) -> bool:
        if request.total_bytes < 0:
            return False
        room = (it._has_room(request) for it in self.of(request.model))  # noqa: SLF001 - its own
        return self.growth(request) <= 0 or all(room)

    def _has_room(self, request: MemoryRequest) -> bool:
        return not self.keeps_back(request) and self.growth(request) <= self.available_bytes

    def _grant(self, request: MemoryRequest) -> GrantDecision:
        for ledger in self.of(request.model):
            ledger.grants[request.model] = request.total_bytes
        return self.decision(request, granted=True)
