"""Who is told to give back: the cheapest rung that has something. Pure.

At most one `Reclaim` runs in a worker; what is on its way is waited for, so nobody pays for what
another is giving already.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.governing import shortfalls
from actors.machines.governing.state import GRAIN
from actors.machines.governor_events import Command, Evict, Reclaim
from actors.machines.model_accounts import ModelAccount, OpenReclaim
from actors.machines.reclaim_order import (
    MemoryView,
    ReclaimAction,
    Shortfall,
    actions,
    reclaimed_by,
)

if TYPE_CHECKING:
    from actors.machines.governing.state import GovernorState


def forget_late(m: GovernorState, now: float) -> None:
    """Wait no longer for workers that do not answer."""
    for account in m.accounts.values():
        if account.open is not None and now >= account.open.until:
            account.barren[account.open.method] = now + m.times.reclaim_s
            account.open = None
        account.barren = {method: until for method, until in account.barren.items() if until > now}


def expire(m: GovernorState, now: float) -> list[Command]:
    """Unload who has been idle for longer than it may be."""
    late = [it for it in m.accounts.values() if it.is_expired(now)]
    return [
        command
        for it in late
        for command in _evict(m, it, f"nobody asked for it in {it.policy.idle_ttl_s:g} s")
    ]


def hurry(m: GovernorState) -> list[Command]:
    """Take requests back that came while a model was going, and have no memory to run in."""
    return [
        command
        for it in m.accounts.values()
        if it.evicting and it.reclaimable.waiting and not it.reclaimable.rows
        for command in _evict(m, it, "a request came as it went", requeue=True)
    ]


def climb(m: GovernorState, now: float) -> list[Command]:
    """Do something for the most urgent need for which something can be done."""
    view = m.view(now)
    for shortfall in shortfalls.find(m, now, view):
        if commands := _free(m, shortfall, view):
            return commands
    return []


def _free(m: GovernorState, shortfall: Shortfall, view: MemoryView) -> list[Command]:
    """Take what is lacking from the cheapest rung that has something."""
    lacking = shortfall.nbytes - m.coming(shortfall.requester)
    if lacking <= 0:
        return []
    for method in shortfall.reach:
        found = actions(method, shortfall, view)
        ready = [it for it in found if _can(m, it)]
        if ready:
            return _take_steps(m, ready, lacking, shortfall, view.now)
        if any(m.accounts[it.model].open for it in found) or _gives(m, method):
            return []  # a cheaper one is on its way: see first what comes of it
    return []


def _can(m: GovernorState, step: ReclaimAction) -> bool:
    account = m.accounts[step.model]
    return account.open is None and step.method not in account.barren


def _gives(m: GovernorState, method: str) -> bool:
    opened = [it.open for it in m.accounts.values()]
    return any(it is not None and it.method == method for it in opened)


def _take_steps(
    m: GovernorState, ready: list[ReclaimAction], lacking: int, shortfall: Shortfall, now: float
) -> list[Command]:
    commands: list[Command] = []
    for step in ready:
        if lacking <= 0:
            break
        account, method = m.accounts[step.model], reclaimed_by(step.method)
        if method is None:
            requeue = step.method == "stalled"
            commands += _evict(m, account, shortfall.reason, shortfall.requester, requeue=requeue)
            lacking -= step.nbytes
            continue
        grain = m.ledger.budget_bytes // GRAIN
        wanted = min(step.nbytes, max(lacking, grain))
        account.open = OpenReclaim(m.seq + 1, method, wanted, step.level, now + m.times.reclaim_s)
        commands += _reclaim(m, account, account.open, shortfall)
        lacking -= wanted
    return commands


def _reclaim(
    m: GovernorState, account: ModelAccount, it: OpenReclaim, shortfall: Shortfall
) -> list[Command]:
    m.seq = it.seq
    numbers = {"wanted_bytes": it.wanted_bytes, "lacking_bytes": shortfall.nbytes}
    if it.method == "precision":
        account.level = max(account.level, it.level)
        numbers["level"] = it.level
    note = m.note(
        f"reclaim_{it.method}", account.name, shortfall.reason, numbers, shortfall.requester
    )
    return [note, Reclaim(account.name, it.seq, it.method, it.wanted_bytes, it.level)]


def _evict(
    m: GovernorState,
    account: ModelAccount,
    reason: str,
    requester: str | None = None,
    *,
    requeue: bool = False,
) -> list[Command]:
    account.state, account.evicting = "leaving", not requeue
    request = m.ledger.waiting.get(account.name)
    account.load_since = request.since if request is not None else None  # it comes back for this
    nbytes = m.ledger.grants.get(account.name, 0)
    kind = "requeue" if requeue else "evict"
    note = m.note(kind, account.name, reason, {"freed_bytes": nbytes}, requester)
    return [note, Evict(account.name, requeue)]
