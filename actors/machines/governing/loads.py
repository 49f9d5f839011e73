"""Refuses loads that cannot get their memory, with the numbers. Pure.

A load that a request triggered is patient: it is refused only if pinned models leave too little
memory for it. A load that a user ordered is also refused if all reclaim methods together cannot
free enough memory for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec.structs import replace

from actors.machines.governing import shortfalls
from actors.machines.ledger import MemoryRequest
from actors.machines.model_accounts import GRACE_S
from actors.machines.reclaim_order import within_reach

if TYPE_CHECKING:
    from actors.machines.governing.state import GovernorState
    from actors.machines.governor_events import Command


def refuse_loads(m: GovernorState, now: float) -> list[Command]:
    loads = [it for it in m.ledger.queue if m.accounts[it.model].state == "loading"]
    return [command for request in loads for command in _refuse(m, request, now)]


def _refuse(m: GovernorState, request: MemoryRequest, now: float) -> list[Command]:
    ledger, model, growth = m.ledger, request.model, m.ledger.growth(request)
    # Looks GRACE_S ahead, because a model that just became idle can be evicted then.
    # Memory of protected models counts: they are protected for a while only.
    view = replace(m.view(now + GRACE_S), protected=frozenset())
    shortfall = shortfalls.of_request(m, request, now)
    pending = m.pending_bytes()
    reach = max(0, m.available_bytes) + pending + within_reach(shortfall, view)
    fits = request.total_bytes <= m.limit_here(model)
    if fits and (m.accounts[model].patient or growth <= reach):
        return []
    ledger.withdraw(model)
    m.accounts[model].load_since = None
    reason = _holders(m, model)
    refusal = ledger.decision(request, granted=False, reason=reason)
    numbers = {"wanted_bytes": growth, "within_reach_bytes": reach}
    return [
        m.record("load_refused", model, reason, numbers),
        refusal,
        *ledger.grant_waiting_beside(model),
    ]


def _holders(m: GovernorState, model: str) -> str:
    """Return what holds the rest of the budget: which models, and why they keep it."""
    holders = []
    for name, it in m.accounts.items():
        nbytes = m.ledger.grants.get(name, 0)
        if name == model or not nbytes:
            continue
        busy = "in use" if it.state == "ready" else it.state
        why = "pinned" if it.policy.pinned else "idle" if it.is_idle else busy
        holders.append(f"{name} ({why}) holds {nbytes / 2**20:,.1f} MiB")
    if excess := m.ledger.excess_bytes:
        holders.append(f"workers use {excess / 2**20:,.1f} MiB beyond their grants")
    return "; ".join(holders) or "no model holds anything"
