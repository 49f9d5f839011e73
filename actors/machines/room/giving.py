"""Who is told to give back: the cheapest rung that has something. Pure.

At most one `Reclaim` runs in a worker; what is on its way is waited for, so nobody pays for what
another is giving already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.governing import Command, Evict, Reclaim
from actors.machines.reclaim_order import Need, Scene, Step, reclaimed_by, steps
from actors.machines.room import needs
from actors.machines.room.estate import GRAIN
from actors.machines.tenants import Open, Tenant

if TYPE_CHECKING:
    from actors.machines.room.estate import Estate


def forget_late(m: Estate, now: float) -> None:
    """Wait no longer for workers that do not answer."""
    for tenant in m.tenants.values():
        if tenant.open is not None and now >= tenant.open.until:
            tenant.barren[tenant.open.method] = now + m.times.reclaim_s
            tenant.open = None
        tenant.barren = {method: until for method, until in tenant.barren.items() if until > now}


def expire(m: Estate, now: float) -> list[Command]:
    """Unload who has been idle for longer than it may be."""
    late = [it for it in m.tenants.values() if it.is_expired(now)]
    return [
        command
        for it in late
        for command in _evict(m, it, f"nobody asked for it in {it.policy.idle_ttl_s:g} s")
    ]


def hurry(m: Estate) -> list[Command]:
    """Take requests back that came while a model was going, and have no memory to run in."""
    return [
        command
        for it in m.tenants.values()
        if it.evicting and it.reclaimable.waiting and not it.reclaimable.rows
        for command in _evict(m, it, "a request came as it went", requeue=True)
    ]


def climb(m: Estate, now: float) -> list[Command]:
    """Do something for the most urgent need for which something can be done."""
    scene = m.scene(now)
    for need in needs.needs(m, now, scene):
        if commands := _free(m, need, scene):
            return commands
    return []


def _free(m: Estate, need: Need, scene: Scene) -> list[Command]:
    """Take what is lacking from the cheapest rung that has something."""
    lacking = need.nbytes - m.coming(need.requester)
    if lacking <= 0:
        return []
    for method in need.reach:
        found = steps(method, need, scene)
        ready = [it for it in found if _can(m, it)]
        if ready:
            return _take_steps(m, ready, lacking, need, scene.now)
        if any(m.tenants[it.model].open for it in found) or _gives(m, method):
            return []  # a cheaper one is on its way: see first what comes of it
    return []


def _can(m: Estate, step: Step) -> bool:
    tenant = m.tenants[step.model]
    return tenant.open is None and step.method not in tenant.barren


def _gives(m: Estate, method: str) -> bool:
    opened = [it.open for it in m.tenants.values()]
    return any(it is not None and it.method == method for it in opened)


def _take_steps(
    m: Estate, ready: list[Step], lacking: int, need: Need, now: float
) -> list[Command]:
    commands: list[Command] = []
    for step in ready:
        if lacking <= 0:
            break
        tenant, method = m.tenants[step.model], reclaimed_by(step.method)
        if method is None:
            requeue = step.method == "stalled"
            commands += _evict(m, tenant, need.reason, need.requester, requeue=requeue)
            lacking -= step.nbytes
            continue
        grain = m.ledger.budget_bytes // GRAIN
        wanted = min(step.nbytes, max(lacking, grain))
        tenant.open = Open(m.seq + 1, method, wanted, step.level, now + m.times.reclaim_s)
        commands += _reclaim(m, tenant, tenant.open, need)
        lacking -= wanted
    return commands


def _reclaim(m: Estate, tenant: Tenant, it: Open, need: Need) -> list[Command]:
    m.seq = it.seq
    numbers = {"wanted_bytes": it.wanted_bytes, "lacking_bytes": need.nbytes}
    if it.method == "precision":
        tenant.level = max(tenant.level, it.level)
        numbers["level"] = it.level
    note = m.note(f"reclaim_{it.method}", tenant.name, need.reason, numbers, need.requester)
    return [note, Reclaim(tenant.name, it.seq, it.method, it.wanted_bytes, it.level)]


def _evict(
    m: Estate, tenant: Tenant, reason: str, requester: str | None = None, *, requeue: bool = False
) -> list[Command]:
    tenant.state, tenant.evicting = "leaving", not requeue
    wish = m.ledger.refused.get(tenant.name)
    tenant.load_since = wish.since if wish is not None else None  # it comes back for this
    nbytes = m.ledger.grants.get(tenant.name, 0)
    kind = "requeue" if requeue else "evict"
    note = m.note(kind, tenant.name, reason, {"freed_bytes": nbytes}, requester)
    return [note, Evict(tenant.name, requeue)]
