"""Updates the governor's state for an event; returns what the ledger decides without reclaiming."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from actors.machines import governor_events as ev
from actors.machines.governing.state import MIN_RECLAIM_PARTS
from actors.machines.ledger import MemoryRequest, WorkerExited
from protocol.memory_bounds import STARTING_BYTES

if TYPE_CHECKING:
    from actors.machines.governing.state import GovernorState
    from actors.machines.model_accounts import ModelAccount

MAX_OVER_LIMIT = 2
"""Measurements in a row above its limit after which a worker is ended."""


def apply(m: GovernorState, event: ev.Event, now: float) -> list[ev.Command]:
    match event:
        case ev.LoadRequested(model=model):
            account = m.account(model)
            account.reset()  # forget the numbers of an earlier process
            account.policy, account.patient = event.policy, event.patient
            account.load_started_at = now
        case MemoryRequest():
            return _request(m, event, now)
        case ev.ModelRemoved(model=model):
            m.ledger.exempt.discard(model)
            if (removed := m.accounts.get(model)) is not None:
                removed.measured_bytes = 0  # else its excess would keep back what fits now
                _update_excess(m, model)
            commands: list[ev.Command] = [*m.ledger.handle(WorkerExited(model), now)]
            for governor in m.of(model):
                governor.accounts.pop(model, None)
                governor.held.discard(model)
            return commands
        case ev.MemoryMeasured():
            return _measured(m, event)
        case ev.BudgetChanged(total_bytes=total):
            numbers = {"before_bytes": m.ledger.budget_bytes}
            decisions = m.ledger.set_budget(total)
            return [m.record("budget", "", "changed by the user", numbers), *decisions]
        case ev.AlarmFired():
            pass
        case _:
            known = m.accounts.get(event.model)
            if known is not None:  # a late report of a removed model is ignored
                return _apply_to_account(m, known, event, now)
    return []


def _apply_to_account(
    m: GovernorState, account: ModelAccount, event: ev.Event, now: float
) -> list[ev.Command]:
    match event:
        case ev.PolicyChanged(policy=policy, by_request=by_request):
            account.policy = policy
            if by_request and account.idle_since is not None:
                account.idle_since = now
        case ev.ModelReady() if account.state == "loading":
            account.state, account.patient = "ready", True
            account.load_s = max(0.1, now - account.load_started_at)
            account.kept_since, account.load_since = account.load_since, None
            m.ledger.exempt.discard(account.name)
            account.update(account.reclaimable, now)
        case ev.ServingChanged(busy=busy):
            account.serving = busy
            account.update(account.reclaimable, now)
        case ev.UnloadStarted():
            account.state, account.evicting = "leaving", False
            m.ledger.exempt.add(account.name)  # its last rows may need memory to finish
            return [*m.ledger.grant_waiting()]
        case WorkerExited():
            account.reset()
            account.load_started_at = now
            m.ledger.exempt.discard(event.model)
            _update_excess(m, event.model)
            return [*m.ledger.handle(event, now)]
        case ev.ReclaimableReported(reclaimable=reclaimable):
            account.update(reclaimable, now)
        case ev.ReclaimFinished():
            return _reclaim_finished(m, account, event, now)
    return []


def _request(m: GovernorState, event: MemoryRequest, now: float) -> list[ev.Command]:
    account, ledger = m.account(event.model), m.ledger
    request = msgspec.structs.replace(event, since=_waits_since(account, now))
    before = ledger.waiting.get(event.model)
    shrinks = ledger.growth(event) <= 0
    if shrinks and before is not None and account.open is not None:
        # The worker shrinks because of a reclaim command: its next request inherits the old age.
        account.kept_since = before.since
    if account.state == "loading" and event.model in ledger.grants:
        # A load that has a part of its memory goes on, whatever request is the first.
        m.ledger.exempt.add(event.model)
    decisions = ledger.handle(request, now)
    if not shrinks and decisions[0].granted:
        account.kept_since = None
    if account.state == "loading" and not decisions[0].granted:
        # A load waits without an answer; `governing.loads` refuses one that cannot succeed.
        return [*decisions[1:]]
    return [*decisions]


def _waits_since(account: ModelAccount, now: float) -> float:
    """Return the time from which a request counts as waiting: for a load, its first request."""
    if account.state != "loading":
        return now if account.kept_since is None else account.kept_since
    if account.load_since is None:
        account.load_since = now
    return account.load_since


def _reclaim_finished(
    m: GovernorState, account: ModelAccount, event: ev.ReclaimFinished, now: float
) -> list[ev.Command]:
    opened = account.open
    if opened is None or opened.seq != event.seq:
        return []
    account.open = None
    account.deduct(opened.method, opened.level, event.freed_bytes, exhausted=event.exhausted)
    if event.freed_bytes * 2 < opened.wanted_bytes:
        account.barren[opened.method] = now + m.times.barren_s
    numbers = {"wanted_bytes": opened.wanted_bytes, "freed_bytes": event.freed_bytes}
    result = "nothing more to give" if event.exhausted else "done"
    return [m.record("reclaimed", event.model, f"{opened.method}: {result}", numbers)]


def _measured(m: GovernorState, event: ev.MemoryMeasured) -> list[ev.Command]:
    commands: list[ev.Command] = []
    for name, account in m.accounts.items():
        account.measured_bytes = event.used.get(name, account.measured_bytes)
        if name in event.used:
            commands += _end_above_limit(m, account, event.fresh.get(name))
    before = m.ledger.excess_bytes
    _update_excess(m)
    # A worker above its limit is ended, and with it the pressure: other models pay nothing for it.
    m.gauge.pressure = "normal" if m.offending_bytes else event.pressure
    excess = m.ledger.excess_bytes
    if excess > before + m.ledger.budget_bytes // MIN_RECLAIM_PARTS:
        numbers = {"excess_bytes": excess}
        return [*commands, m.record("excess", "", "workers use more than granted", numbers)]
    return [*commands, *(m.ledger.grant_waiting() if excess < before else [])]


def _end_above_limit(m: GovernorState, account: ModelAccount, pid: int | None) -> list[ev.Command]:
    """End a worker after `MAX_OVER_LIMIT` fresh measurements above its limit.

    ``pid``: the process that was measured now; None: the measurement is not fresh. Workers end
    themselves. This is for one that cannot.
    """
    used, limit = account.measured_bytes, m.limit_bytes(account)
    if used <= limit:
        account.over_limit = 0
    if used <= limit or pid is None:
        return []
    account.over_limit += 1
    if account.over_limit % MAX_OVER_LIMIT:
        return []
    reason = "its worker holds more memory than it may"
    numbers = {"used_bytes": used, "limit_bytes": limit}
    return [
        m.record("over_limit", account.name, reason, numbers),
        ev.EndWorker(account.name, pid, used, limit),
    ]


def _update_excess(m: GovernorState, model: str = "") -> None:
    """Record the bytes that workers use beyond their grants, so that no other model gets them.

    For a loading worker without a grant, bytes above `STARTING_BYTES` for each process count.
    ``model``: update all devices of that model.
    """
    for governor in m.of(model):
        governor.excess.clear()
        for name, account in governor.accounts.items():
            over = account.measured_bytes - governor.ledger.grants.get(
                name, STARTING_BYTES * account.policy.ranks
            )
            if over > 0:
                governor.excess[name] = over
        governor.ledger.excess_bytes = sum(governor.excess.values())
