"""The governor's state. Pure; decides nothing."""

from __future__ import annotations

import msgspec

from actors.machines.gauge import Gauge
from actors.machines.governor_events import RecordEvent
from actors.machines.ledger import Ledger, MemoryRequest
from actors.machines.model_accounts import ModelAccount
from actors.machines.reclaim_order import MemoryView
from protocol.memory_bounds import limit_bytes


class Times(msgspec.Struct, frozen=True):
    """Intervals, in seconds."""

    settle_s: float = 0.25
    """Age at which a request may cost other models something. A younger one may be for more than
    the worker needs: workers request less only after a denial."""
    due_s: float = 10.0
    """Age at which a request becomes the first one, which no other request overtakes."""
    hold_s: float = 30.0
    """Age at which models are held for the first request. Also the waiting time that raises a
    request's priority by one."""
    reclaim_s: float = 60.0
    """Time after which a `Reclaim` counts as over even if the worker has not reported its end."""
    barren_s: float = 5.0
    """Time until a worker is asked again for a method that gave too little."""
    protected_s: float = 30.0
    """Shortest time for which a model is protected: see `actors.machines.governor`."""
    tick_s: float = 1.0
    """Interval of checks while a shortfall or a `Reclaim` is open."""


MAX_OFFENCES = 10
"""Measurements above its limit up to which a worker counts as one that is being ended."""
MIN_RECLAIM_PARTS = 128
"""A `Reclaim` asks for at least the budget divided by this, if the worker has that much."""
MIN_ACTION_PARTS = 4096
"""Reclaimable memory below the budget divided by this is ignored."""


class GovernorState(msgspec.Struct):
    """The state of `actors.machines.governor.Governor`, and what follows from it."""

    ledger: Ledger
    device: int | None = None
    """Number of the device; None if the machine has only one."""
    memory: str = ""
    """Name of the memory in the reasons of events; empty for a device's."""
    gauge: Gauge = msgspec.field(default_factory=Gauge)
    times: Times = Times()
    accounts: dict[str, ModelAccount] = msgspec.field(default_factory=dict)
    peers: dict[str, tuple[GovernorState, ...]] = msgspec.field(default_factory=dict)
    """For each model over several devices, the governors of its other devices. All its governors
    share one account, with the bytes of one device."""
    excess: dict[str, int] = msgspec.field(default_factory=dict)
    """By model, the bytes that its worker uses beyond its grant."""
    held: set[str] = msgspec.field(default_factory=set)
    """Models that get no new requests until the first request is granted."""
    held_for: str | None = None
    """The model of the first request at the last event. Models are held for it."""
    relieved_at: float | None = None
    """When the governor last reacted to the system's memory pressure."""
    deadline: float | None = None

    def of(self, model: str) -> tuple[GovernorState, ...]:
        """Return the governors of the model's devices."""
        return self, *self.peers.get(model, ())

    def limit_of(self, model: str) -> int:
        """Return the most bytes that a model can have on each of its devices."""
        return min(it.limit_here(model) for it in self.of(model))

    def limit_here(self, model: str) -> int:
        """Return the most bytes that a model can have: the budget without other pinned models."""
        pinned = sum(
            self.base(it)
            for name, it in self.accounts.items()
            if name != model and it.policy.pinned and it.state == "ready"
        )
        return max(0, self.ledger.budget_bytes - pinned)

    def view(self, now: float) -> MemoryView:
        grants, budget = self.ledger.grants, self.ledger.budget_bytes
        waiting_since = {it.model: it.since or 0.0 for it in self.ledger.queue}
        min_bytes = max(1, budget // MIN_ACTION_PARTS)
        protected = frozenset(self.ledger.protected)
        return MemoryView(self.accounts, grants, waiting_since, budget, now, protected, min_bytes)

    def account(self, model: str) -> ModelAccount:
        return self.accounts.setdefault(model, ModelAccount(model))

    def is_needed(self, request: MemoryRequest) -> bool:
        """Return whether a client waits for the memory. Otherwise it is only for caching."""
        account = self.accounts[request.model]
        return account.state == "loading" or account.reclaimable.waiting > 0 or request.resuming

    @property
    def measured(self) -> int:
        """Bytes that workers with a grant use, without `offending_bytes`."""
        granted = sum(self.accounts[name].measured_bytes for name in self.ledger.grants)
        over = sum(n for name, n in self._offenders().items() if name in self.ledger.grants)
        return granted - over

    @property
    def available_bytes(self) -> int:
        """Bytes of the budget that are free as soon as workers above their limit are ended.

        Other models give nothing back for such a worker.
        """
        return self.ledger.available_bytes + self.offending_bytes

    @property
    def offending_bytes(self) -> int:
        """Excess of workers above their limit; they are ended within two measurements."""
        return sum(self._offenders().values())

    def _offenders(self) -> dict[str, int]:
        return {name: n for name, n in self.excess.items() if self._is_offender(name)}

    def _is_offender(self, name: str) -> bool:
        """Return whether the model's worker is being ended for its memory.

        A worker that cannot be killed counts for `MAX_OFFENCES` measurements only: after that,
        other models must not wait for its memory any longer.
        """
        account = self.accounts[name]
        over = account.measured_bytes > self.limit_bytes(account)
        return over and 0 < account.over_limit <= MAX_OFFENCES

    def limit_bytes(self, account: ModelAccount) -> int:
        """Return the bytes above which a model's worker is ended."""
        return limit_bytes(self.ledger.grants.get(account.name, 0), account.policy.ranks)

    def base(self, account: ModelAccount) -> int:
        """Return the part of a model's grant that its rows cannot give back."""
        granted = self.ledger.grants.get(account.name, 0)
        return min(granted, account.reclaimable.base) if account.reclaimable.base else granted

    def pending_bytes(self, requester: str | None = None) -> int:
        """Return the bytes on their way back: open reclaims, and models that leave.

        ``requester`` does not count as leaving: its own memory does not help it.
        """
        accounts, grants = self.accounts, self.ledger.grants
        reclaiming = sum(it.open.wanted_bytes for it in accounts.values() if it.open is not None)
        leaving = {name for name, it in accounts.items() if it.state == "leaving"} - {requester}
        return reclaiming + sum(grants.get(name, 0) for name in leaving)

    def record(
        self,
        kind: str,
        model: str,
        reason: str,
        numbers: dict[str, int] | None = None,
        requester: str | None = None,
    ) -> RecordEvent:
        """Return the command that records an event, with the state of the budget added."""
        ledger = self.ledger
        grants = {"granted_bytes": ledger.granted_bytes, "budget_bytes": ledger.budget_bytes}
        device = {} if self.device is None else {"device": self.device}
        reason = f"{self.memory}: {reason}" if self.memory else reason
        return RecordEvent(kind, model, reason, {**(numbers or {}), **grants, **device}, requester)
