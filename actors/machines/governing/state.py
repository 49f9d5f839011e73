"""What the governor holds in its head: ledger, tenants, gauge, and what is on its way. Pure state.

And the words in which its parts ask about it. Does not decide anything.
"""

from __future__ import annotations

import msgspec

from actors.machines.gauge import Gauge
from actors.machines.governor_events import RecordEvent
from actors.machines.ledger import Ledger, MemoryRequest
from actors.machines.model_accounts import ModelAccount
from actors.machines.reclaim_order import MemoryView


class Times(msgspec.Struct, frozen=True):
    """How long things are waited for, in seconds."""

    settle_s: float = 0.25
    """Before a wish costs anybody anything: workers ask for much, then for what they must have."""
    due_s: float = 10.0
    """Until a wish is the first, and nobody overtakes it any more."""
    turn_s: float = 30.0
    """Until others are held for it; and a wish that waits gains one priority in this time."""
    reclaim_s: float = 60.0
    """For a worker to say that a `Reclaim` is over."""
    barren_s: float = 5.0
    """Before a worker is asked again for what it did not have."""
    tick_s: float = 1.0
    """Between two looks while something is to be done."""


GRAIN = 128
"""The budget in so many parts: less than one is not asked for, if more is there."""
LEAST = 4096
"""Offers of less than such a part are left alone."""


class GovernorState(msgspec.Struct):
    """The state of `actors.machines.governor.Ladder`."""

    ledger: Ledger
    gauge: Gauge = msgspec.field(default_factory=Gauge)
    times: Times = Times()
    accounts: dict[str, ModelAccount] = msgspec.field(default_factory=dict)
    seq: int = 0
    """Of the newest `Reclaim`."""
    held_for: str | None = None
    """The first wish as it was when we last looked; whoever is held, is held for it."""
    relieved_at: float | None = None
    """When the system's pressure was last answered."""
    deadline: float | None = None
    """When to ring."""

    def most_of(self, model: str) -> int:
        """Return what this model can have at most: all but what pinned others keep."""
        kept = sum(
            self.base(it)
            for name, it in self.accounts.items()
            if name != model and it.policy.pinned and it.state == "ready"
        )
        return max(0, self.ledger.budget_bytes - kept)

    def view(self, now: float) -> MemoryView:
        """Return what rungs look at."""
        requests = {it.model: it.since or 0.0 for it in self.ledger.queue}
        budget = self.ledger.budget_bytes
        return MemoryView(
            self.accounts, self.ledger.grants, requests, budget, now, max(1, budget // LEAST)
        )

    def account(self, model: str) -> ModelAccount:
        """Return a model's tenant, a new one if need be."""
        return self.accounts.setdefault(model, ModelAccount(model))

    def exempt(self, model: str) -> None:
        """Let a model grow although another's wish is the first."""
        if model not in self.ledger.exempt:
            self.ledger.exempt.append(model)

    def take_exemption(self, model: str) -> None:
        """Let nobody grow before the first one who comes back: it has nothing to finish."""
        if model in self.ledger.exempt:
            self.ledger.exempt.remove(model)

    def may_be_first(self, request: MemoryRequest) -> bool:
        """Return whether others may be kept back for a wish: it can be met at all."""
        return self.is_served(request) and request.total_bytes <= self.most_of(request.model)

    def is_served(self, request: MemoryRequest) -> bool:
        """Return whether somebody waits for it; a wish for room to cache in is not worth a row."""
        account = self.accounts[request.model]
        return account.state == "loading" or account.reclaimable.waiting > 0 or request.resuming

    @property
    def measured(self) -> int:
        """What all workers really take."""
        return sum(it.measured_bytes for it in self.accounts.values())

    def base(self, account: ModelAccount) -> int:
        """Return what of its grant a model keeps, whatever its rows give back."""
        granted = self.ledger.grants.get(account.name, 0)
        return min(granted, account.reclaimable.base) if account.reclaimable.base else granted

    def has_turn(self, request: MemoryRequest) -> bool:
        """Return whether others may give something for this wish now."""
        return self.ledger.first in {None, request.model} or request.model in self.ledger.exempt

    def coming(self, requester: str | None = None) -> int:
        """Return what is on its way back; for who is to go itself, from others."""
        grants = self.ledger.grants
        opened = sum(it.open.wanted_bytes for it in self.accounts.values() if it.open is not None)
        leaving = [
            name
            for name, it in self.accounts.items()
            if it.state == "leaving" and name != requester
        ]
        return opened + sum(grants.get(name, 0) for name in leaving)

    def note(
        self,
        kind: str,
        model: str,
        reason: str,
        numbers: dict[str, int] | None = None,
        requester: str | None = None,
    ) -> RecordEvent:
        """Return a note of what is done, with what the budget is at."""
        ledger = self.ledger
        grants = {"granted_bytes": ledger.granted_bytes, "budget_bytes": ledger.budget_bytes}
        return RecordEvent(kind, model, reason, {**(numbers or {}), **grants}, requester)
