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
    Name,
    Need,
    Scene,
    within_reach,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from actors.machines.ledger import Wanted
    from actors.machines.room.estate import Estate

LITTLE, MUCH = 0.01, 0.03
"""Of the budget, taken beyond the grants: up to here it costs nobody anything; from here on rows
are parked."""


def needs(m: Estate, now: float, scene: Scene) -> Iterator[Need]:
    """Yield what is to be freed, the most urgent first."""
    yield from _overdrawn(m)
    for wish in m.ledger.waiting:
        if m.is_served(wish) and m.has_turn(wish):
            need = need_of(m, wish, now)
            yield msgspec.structs.replace(need, reach=_reach(m, need, wish, scene))
    yield from _pressed(m, now)
    yield from _foreseen(m)


def _overdrawn(m: Estate) -> Iterator[Need]:
    """Yield what the grants, and what is taken beyond them, are above the budget."""
    ledger = m.ledger
    over = -ledger.available_bytes
    if over <= 0:
        return
    if ledger.granted_bytes > ledger.budget_bytes:
        yield Need(over, "the budget was lowered")
    else:
        share = over / max(1, ledger.budget_bytes)
        reach = RECLAIM_ORDER if share > MUCH else ALL_BUT_PARK if share > LITTLE else FREE
        yield Need(over, "workers take more than they were granted", reach)


def need_of(m: Estate, wish: Wanted, now: float) -> Need:
    """Return what a wish lacks."""
    tenant, since = m.tenants[wish.model], wish.since or 0.0
    what = "the load of" if tenant.state == "loading" else "requests of"
    return Need(
        m.ledger.growth(wish) - m.ledger.available_bytes,
        f"{what} {wish.model}",
        RECLAIM_ORDER,
        wish.model,
        tenant.policy.priority + int((now - since) / m.times.turn_s),
        wish.total_bytes,
        # Who is to go finishes first: whoever is stalled makes room for it.
        since if tenant.state != "leaving" else -1.0,
        wish.resuming,
    )


def _reach(m: Estate, need: Need, wish: Wanted, scene: Scene) -> tuple[Name, ...]:
    """Return how far up the ladder a wish may go now."""
    if scene.now - (wish.since or 0.0) < m.times.settle_s:
        return FREE
    is_last = m.tenants[wish.model].state == "leaving"
    if m.ledger.first == wish.model or is_last:
        return LAST if scene.now - (wish.since or 0.0) >= m.times.turn_s else RECLAIM_ORDER
    within = need.nbytes <= m.coming(need.requester) + within_reach(need, scene)
    return RECLAIM_ORDER if within else FREE


def _pressed(m: Estate, now: float) -> Iterator[Need]:
    """Yield what the system's pressure asks for, once in a while."""
    gauge, budget = m.gauge, m.ledger.budget_bytes
    wait = m.relieved_at is not None and now - m.relieved_at < gauge.marks.cool_s
    if gauge.pressure == "normal" or wait:
        return
    m.relieved_at = now
    reason = f"the system's memory pressure is {gauge.pressure}"
    offers = [it.reclaimable for it in m.tenants.values()]
    free = sum(it.spare + it.prefixes for it in offers)
    used = max(m.measured, m.ledger.granted_bytes - free)
    yield Need(free, reason, FREE)
    above = used - int(gauge.marks.low * budget)
    if gauge.pressure == "critical":
        yield Need(max(above, used // 10), reason)
    elif above > 0:
        yield Need(above, reason, ALL_BUT_PARK)


def _foreseen(m: Estate) -> Iterator[Need]:
    """Yield what the marks ask for: only what costs nobody anything."""
    gauge, budget = m.gauge, m.ledger.budget_bytes
    over = m.measured - int(gauge.marks.low * budget)
    if gauge.tight and over > 0:
        yield Need(over, gauge.reason, FREE)
