"""Updates the gauge, and the precision level at which new rows start. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.gauge import MemorySample
from actors.machines.governing.state import MIN_RECLAIM_PARTS
from actors.machines.governor_events import Command, StartLevel

if TYPE_CHECKING:
    from actors.machines.governing.state import GovernorState
    from actors.machines.model_accounts import ModelAccount


def update_start_levels(m: GovernorState, now: float) -> list[Command]:
    """Update the gauge; send workers the start level of their rows if it changed."""
    gauge, was_tight = m.gauge, m.gauge.tight
    accounts = list(m.accounts.values())
    lowest_level = max((len(it.reclaimable.levels) for it in accounts), default=0)
    gauge.update(_sample(m, now), lowest_level, now)
    commands: list[Command] = []
    if gauge.tight != was_tight:
        reason = gauge.reason or "memory is free again: new rows start at level 0"
        commands.append(m.record("tight" if gauge.tight else "calm", "", reason))
    for account in accounts:
        commands += _update_start_level(m, account)
    return commands


def _update_start_level(m: GovernorState, account: ModelAccount) -> list[Command]:
    if account.state != "ready":
        return []
    lowest = len(account.reclaimable.levels)
    gauges = [it.gauge for it in m.of(account.name) if it.gauge.tight]
    level = min(max(account.level, *(it.level for it in gauges)), lowest) if gauges else 0
    if level == account.level:
        return []
    account.level = level
    reason = gauges[0].reason if gauges else "memory is free again"
    event = m.record("start_level", account.name, reason, {"level": level})
    return [event, StartLevel(account.name, level)]


def _sample(m: GovernorState, now: float) -> MemorySample:
    ledger, accounts = m.ledger, m.accounts.values()
    base = sum(m.base(it) for it in accounts)
    rows = sum(_row_bytes(m, it) for it in accounts if it.state == "ready")
    waits = any(
        now - (request.since or 0.0) >= m.times.settle_s
        and m.accounts[request.model].state == "ready"
        and m.is_needed(request)
        and ledger.growth(request) > m.available_bytes
        for request in ledger.queue
    )
    waits = waits or m.available_bytes < -(ledger.budget_bytes // MIN_RECLAIM_PARTS)
    room = max(0, ledger.budget_bytes - base)
    measured = max(0, m.measured - sum(it.reclaimable.prefixes for it in accounts))
    return MemorySample(room, rows, measured, ledger.budget_bytes, waits)


def _row_bytes(m: GovernorState, account: ModelAccount) -> int:
    granted, reclaimable = m.ledger.grants.get(account.name, 0), account.reclaimable
    return max(0, granted - m.base(account) - reclaimable.spare - reclaimable.prefixes)
