"""Which loads cannot have their memory, and why: with the arithmetic. Pure.

A load that somebody waits for by a request is patient: it is refused only if pinned models leave no
room for it. One that a user asked for is refused when nobody who is idle could make room for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.governing import shortfalls
from actors.machines.ledger import GrantDecision, MemoryRequest
from actors.machines.model_accounts import GRACE_S
from actors.machines.reclaim_order import within_reach

if TYPE_CHECKING:
    from actors.machines.governing.state import GovernorState
    from actors.machines.governor_events import Command


def refuse_loads(m: GovernorState, now: float) -> list[Command]:
    """Answer loads that wait for nothing."""
    commands: list[Command] = []
    for request in m.ledger.queue:
        if m.accounts[request.model].state == "loading":
            commands += _refuse(m, request, now)
    return commands


def _refuse(m: GovernorState, request: MemoryRequest, now: float) -> list[Command]:
    ledger, growth = m.ledger, m.ledger.growth(request)
    # Who has just become idle can go in a moment.
    view, shortfall = m.view(now + GRACE_S), shortfalls.need_of(m, request, now)
    coming = m.coming()
    reach = max(0, ledger.available_bytes) + coming + within_reach(shortfall, view)
    fits = request.total_bytes <= m.most_of(request.model)
    if fits and (m.accounts[request.model].patient or growth <= reach):
        return []
    ledger.withdraw(request.model)
    m.accounts[request.model].load_since = None
    reason = _who_holds(m, request.model)
    held, free = ledger.grants.get(request.model, 0), max(0, ledger.available_bytes)
    answer = GrantDecision(
        request.model, request.seq, held, granted=False, available_bytes=free, reason=reason
    )
    numbers = {"wanted_bytes": growth, "within_reach_bytes": reach}
    return [m.note("load_refused", request.model, reason, numbers), answer, *ledger.retry()]


def _who_holds(m: GovernorState, model: str) -> str:
    """Say who has the budget, and why it stays there."""
    said = []
    for name, it in m.accounts.items():
        nbytes = m.ledger.grants.get(name, 0)
        if name == model or not nbytes:
            continue
        busy = "in use" if it.state == "ready" else it.state
        why = "pinned" if it.policy.pinned else "idle" if it.is_idle else busy
        said.append(f"{name} ({why}) holds {nbytes / 2**20:,.1f} MiB")
    return "; ".join(said) or "nobody holds anything"
