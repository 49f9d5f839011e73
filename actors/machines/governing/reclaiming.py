"""Orders models to give memory back, by the first method of the plan. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.governing import shortfalls
from actors.machines.governing.state import MIN_RECLAIM_PARTS
from actors.machines.governor_events import Command, Evict, Reclaim
from actors.machines.model_accounts import ModelAccount, OpenReclaim
from actors.machines.reclaim_order import MemoryView, ReclaimAction, Shortfall
from actors.machines.reclaim_plan import plan

if TYPE_CHECKING:
    from actors.machines.governing.state import GovernorState


def forget_overdue(m: GovernorState, now: float) -> None:
    """Stop waiting for reclaims that a worker has not finished in time."""
    for account in m.accounts.values():
        if account.open is not None and now >= account.open.until:
            account.barren[account.open.method] = now + m.times.reclaim_s
            account.open = None
        account.barren = {method: until for method, until in account.barren.items() if until > now}


def evict_expired(m: GovernorState, now: float) -> list[Command]:
    return [
        command
        for it in [it for it in m.accounts.values() if it.is_expired(now)]
        for command in evict(m, it, f"no request for {it.policy.idle_ttl_s:g} s")
    ]


def requeue_stranded(m: GovernorState) -> list[Command]:
    """Return requests to the daemon that arrived during an eviction and lack memory to run."""
    return [
        command
        for it in m.accounts.values()
        if it.evicting and it.reclaimable.waiting and not it.reclaimable.rows
        for command in evict(m, it, "a request arrived during the eviction", requeue=True)
    ]


def serve_shortfalls(m: GovernorState, now: float) -> list[Command]:
    """Act for the most urgent shortfall for which something can be done."""
    view = m.view(now)
    for shortfall in shortfalls.find(m, now):
        if commands := _serve(m, shortfall, view):
            return commands
    return []


def _serve(m: GovernorState, shortfall: Shortfall, view: MemoryView) -> list[Command]:
    missing = shortfall.nbytes - m.pending_bytes(shortfall.requester)
    if missing <= 0:
        return []
    open_methods = {it.open.method for it in m.accounts.values() if it.open is not None}
    steps = plan(shortfall, missing, view)
    for method in shortfall.methods:
        planned = [it for it in steps if it.method == method]
        # Every model takes a step down before any takes the next one.
        planned = [it for it in planned if it.level == planned[0].level]
        ready = [it for it in planned if m.accounts[it.model].open is None]
        if ready:
            return _start(m, ready, missing, shortfall, view.now)
        if method in open_methods or planned:
            return []  # wait for the result of the cheaper method
    return []


def _start(
    m: GovernorState, ready: list[ReclaimAction], missing: int, shortfall: Shortfall, now: float
) -> list[Command]:
    reason, requester = shortfall.reason, shortfall.requester
    min_bytes = m.ledger.budget_bytes // MIN_RECLAIM_PARTS
    commands: list[Command] = []
    for action in ready:
        if missing <= 0:
            break
        account, method, level = m.accounts[action.model], action.worker_method, action.level
        if method is None:
            requeue = action.method == "stalled"
            commands += evict(m, account, reason, requester, requeue=requeue)
            missing -= action.nbytes
            continue
        account.reclaims += 1
        wanted = min(action.nbytes, max(missing, min_bytes))
        account.open = OpenReclaim(account.reclaims, method, wanted, level, now + m.times.reclaim_s)
        numbers = {"wanted_bytes": wanted, "missing_bytes": shortfall.nbytes}
        if method == "precision":
            account.level = max(account.level, level)
            numbers["level"] = level
        commands += [
            m.record(f"reclaim_{method}", account.name, reason, numbers, requester),
            Reclaim(account.name, account.reclaims, method, wanted, level),
        ]
        missing -= wanted
    return commands


def evict(
    m: GovernorState,
    account: ModelAccount,
    reason: str,
    requester: str | None = None,
    *,
    requeue: bool = False,
) -> list[Command]:
    """Unload a model; with ``requeue``, its queued requests return to the daemon first."""
    account.state, account.evicting = "leaving", not requeue
    request = m.ledger.waiting.get(account.name)
    # The model reloads to serve this request, which keeps its age.
    account.load_since = request.since if request is not None else None
    freed = {"freed_bytes": m.ledger.grants.get(account.name, 0)}
    event = m.record("requeue" if requeue else "evict", account.name, reason, freed, requester)
    return [event, Evict(account.name, requeue)]
