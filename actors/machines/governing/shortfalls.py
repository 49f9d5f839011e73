"""How much is to be freed, for whom, and how far up the rungs that may go. Pure.

The most urgent first: a budget that is overdrawn, then wishes by age, the system's pressure, and
what the marks say of the seconds to come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from actors.machines.reclaim_order import (
    ALL_BUT_PARK,
    FREE,
    LAST,
    RECLAIM_ORDER,
    MemoryView,
    Name,
    Shortfall,
    within_reach,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actors.machines.governing.state import GovernorState
    from actors.machines.ledger import MemoryRequest

LITTLE, MUCH = 0.01, 0.03
"""Of the budget, taken beyond the grants: up to here it costs nobody anything; from here on rows
are parked."""


def find(m: GovernorState, now: float, view: MemoryView) -> Iterator[Shortfall]:
    """Yield what is to be freed, the most urgent first."""
    yield from _overdrawn(m)
    for request in m.ledger.queue:
        if m.is_served(request) and m.has_turn(request):
            shortfall = need_of(m, request, now)
            yield msgspec.structs.replace(shortfall, reach=_reach(m, shortfall, request, view))
    yield from _pressed(m, now)
    yield from _foreseen(m)


def _overdrawn(m: GovernorState) -> Iterator[Shortfall]:
    """Yield what the grants, and what is taken beyond them, are above the budget."""
    ledger = m.ledger
    over = -ledger.available_bytes
    if over <= 0:
        return
    if ledger.granted_bytes > ledger.budget_bytes:
        yield Shortfall(over, "the budget was lowered")
    else:
        share = over / max(1, ledger.budget_bytes)
        reach = RECLAIM_ORDER if share > MUCH else ALL_BUT_PARK if share > LITTLE else FREE
        yield Shortfall(over, "workers take more than they were granted", reach)


def need_of(m: GovernorState, request: MemoryRequest, now: float) -> Shortfall:
    """Return what a wish lacks."""
    account, since = m.accounts[request.model], request.since or 0.0
    what = "the load of" if account.state == "loading" else "requests of"
    return Shortfall(
        m.ledger.growth(request) - m.ledger.available_bytes,
        f"{what} {request.model}",
        RECLAIM_ORDER,
        request.model,
        account.policy.priority + int((now - since) / m.times.turn_s),
        request.total_bytes,
        # Who is to go finishes first: whoever is stalled makes room for it.
        since if account.state != "leaving" else -1.0,
        request.resuming,
    )


def _reach(
    m: GovernorState, shortfall: Shortfall, request: MemoryRequest, view: MemoryView
) -> tuple[Name, ...]:
    """Return how far up the ladder a wish may go now."""
    if view.now - (request.since or 0.0) < m.times.settle_s:
        return FREE
    is_last = m.accounts[request.model].state == "leaving"
    if m.ledger.first == request.model or is_last:
        return LAST if view.now - (request.since or 0.0) >= m.times.turn_s else RECLAIM_ORDER
    within = shortfall.nbytes <= m.coming(shortfall.requester) + within_reach(shortfall, view)
    return RECLAIM_ORDER if within else FREE


def _pressed(m: GovernorState, now: float) -> Iterator[Shortfall]:
    """Yield what the system's pressure asks for, once in a while."""
    gauge, budget = m.gauge, m.ledger.budget_bytes
    wait = m.relieved_at is not None and now - m.relieved_at < gauge.marks.cool_s
    if gauge.pressure == "normal" or wait:
        return
    m.relieved_at = now
    reason = f"the system's memory pressure is {gauge.pressure}"
    offers = [it.reclaimable for it in m.accounts.values()]
    free = sum(it.spare + it.prefixes for it in offers)
    used = max(m.measured, m.ledger.granted_bytes - free)
    yield Shortfall(free, reason, FREE)
    above = used - int(gauge.marks.low * budget)
    if gauge.pressure == "critical":
        yield Shortfall(max(above, used // 10), reason)
    elif above > 0:
        yield Shortfall(above, reason, ALL_BUT_PARK)


def _foreseen(m: GovernorState) -> Iterator[Shortfall]:
    """Yield what the marks ask for: only what costs nobody anything."""
    gauge, budget = m.gauge, m.ledger.budget_bytes
    over = m.measured - int(gauge.marks.low * budget)
    if gauge.tight and over > 0:
        yield Shortfall(over, gauge.reason, FREE)
