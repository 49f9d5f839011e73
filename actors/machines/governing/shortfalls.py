"""Calculates how much memory is missing, for which model, and which methods may free it. Pure.

Shortfalls are sorted by urgency: a budget below the grants, waiting requests by age, the system's
memory pressure, and the watermarks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from actors.machines.reclaim_order import (
    FREE,
    RECLAIM_ORDER,
    WITH_STALLED,
    WITHOUT_PREEMPTION,
    Methods,
    Shortfall,
    within_reach,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actors.machines.governing.state import GovernorState
    from actors.machines.ledger import MemoryRequest

SMALL_EXCESS, LARGE_EXCESS = 0.01, 0.03
"""Excess as parts of the budget. Only the workers that have it give memory back for it. Up to the
first part, free methods are used, above the second preemption too."""


def find(m: GovernorState, now: float) -> Iterator[Shortfall]:
    yield from _over_budget(m)
    for request in m.ledger.queue:
        if m.is_needed(request) and not m.ledger.keeps_back(request):
            shortfall = of_request(m, request, now)
            yield msgspec.structs.replace(shortfall, methods=_methods(m, request, now))
    yield from _under_pressure(m, now)
    yield from _above_watermark(m)


def of_request(m: GovernorState, request: MemoryRequest, now: float) -> Shortfall:
    account, since = m.accounts[request.model], request.since or 0.0
    purpose = "the load of" if account.state == "loading" else "requests of"
    return Shortfall(
        m.ledger.growth(request) - m.available_bytes,
        f"{purpose} {request.model}",
        RECLAIM_ORDER,
        request.model,
        account.policy.priority + int((now - since) / m.times.hold_s),
        request.total_bytes,
        # The request of a leaving model counts as the oldest: stalled models make room for it.
        since if account.state != "leaving" else -1.0,
        request.resuming,
    )


def _over_budget(m: GovernorState) -> Iterator[Shortfall]:
    ledger = m.ledger
    lowered = max(0, ledger.granted_bytes - ledger.budget_bytes)
    if lowered:
        yield Shortfall(lowered, "the budget was lowered")
    over = -m.available_bytes - lowered
    if over > 0:
        share = over / max(1, ledger.budget_bytes)
        methods = FREE if share <= SMALL_EXCESS else WITHOUT_PREEMPTION
        methods = RECLAIM_ORDER if share > LARGE_EXCESS else methods
        # No other model pays for the excess of a worker.
        among = frozenset(m.excess)
        yield Shortfall(over, "its worker uses more than granted", methods, among=among)


def _methods(m: GovernorState, request: MemoryRequest, now: float) -> Methods:
    waited_s = now - (request.since or 0.0)
    if waited_s < m.times.settle_s:
        return FREE
    leaving = m.accounts[request.model].state == "leaving"
    if m.ledger.first == request.model or leaving:
        return WITH_STALLED if waited_s >= m.times.hold_s else RECLAIM_ORDER
    # No device pays for a request that another device of the model cannot grant.
    possible = all(_is_within_reach(it, request, now) for it in m.of(request.model))
    return RECLAIM_ORDER if possible else FREE


def _is_within_reach(m: GovernorState, request: MemoryRequest, now: float) -> bool:
    shortfall = of_request(m, request, now)
    return shortfall.nbytes <= m.pending_bytes(request.model) + within_reach(shortfall, m.view(now))


def _under_pressure(m: GovernorState, now: float) -> Iterator[Shortfall]:
    """Yield what the system's memory pressure requires, at most once in `Marks.cool_s`."""
    gauge, budget = m.gauge, m.ledger.budget_bytes
    cooling = m.relieved_at is not None and now - m.relieved_at < gauge.marks.cool_s
    if gauge.pressure == "normal" or cooling:
        return
    m.relieved_at = now
    reason = f"the system's memory pressure is {gauge.pressure}"
    free = sum(it.reclaimable.spare + it.reclaimable.prefixes for it in m.accounts.values())
    used = max(m.measured, m.ledger.granted_bytes - free)
    yield Shortfall(free, reason, FREE)
    above = used - int(gauge.marks.low * budget)
    if gauge.pressure == "critical":
        yield Shortfall(max(above, used // 10), reason)
    elif above > 0:
        yield Shortfall(above, reason, WITHOUT_PREEMPTION)


def _above_watermark(m: GovernorState) -> Iterator[Shortfall]:
    gauge, budget = m.gauge, m.ledger.budget_bytes
    over = m.measured - int(gauge.marks.low * budget)
    if gauge.tight and over > 0:
        yield Shortfall(over, gauge.reason, FREE)
