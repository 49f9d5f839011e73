"""Whether memory is tight, and at which level of their ladders new rows start. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.gauge import Readings
from actors.machines.governing.state import GRAIN
from actors.machines.governor_events import Command, StartLevel

if TYPE_CHECKING:
    from actors.machines.governing.state import GovernorState
    from actors.machines.model_accounts import ModelAccount


def look(m: GovernorState, now: float) -> list[Command]:
    """Read the gauge, and tell workers where new rows start."""
    gauge, was = m.gauge, m.gauge.tight
    served = list(m.accounts.values())
    gauge.read(
        _readings(m, now), max((len(it.reclaimable.levels) for it in served), default=0), now
    )
    commands: list[Command] = []
    if gauge.tight != was:
        reason = gauge.reason or "there is room again: new rows start at the top"
        commands.append(m.note("tight" if gauge.tight else "calm", "", reason))
    for account in served:
        commands += _start_level(m, account)
    return commands


def _start_level(m: GovernorState, account: ModelAccount) -> list[Command]:
    if account.state != "ready":
        return []
    lowest = len(account.reclaimable.levels)
    level = min(max(m.gauge.level, account.level), lowest) if m.gauge.tight else 0
    if level == account.level:
        return []
    account.level = level
    reason = m.gauge.reason or "there is room again"
    note = m.note("start_level", account.name, reason, {"level": level})
    return [note, StartLevel(account.name, level)]


def _readings(m: GovernorState, now: float) -> Readings:
    ledger, served = m.ledger, m.accounts.values()
    base = sum(m.base(it) for it in served)
    rows = sum(
        max(
            0,
            ledger.grants.get(it.name, 0)
            - m.base(it)
            - it.reclaimable.spare
            - it.reclaimable.prefixes,
        )
        for it in served
        if it.state == "ready"
    )
    waits = any(
        now - (request.since or 0.0) >= m.times.settle_s
        and m.accounts[request.model].state == "ready"
        and m.is_served(request)
        for request in ledger.queue
    )
    waits = waits or ledger.available_bytes < -(ledger.budget_bytes // GRAIN)
    room = max(0, ledger.budget_bytes - base)
    return Readings(room, rows, m.measured, ledger.budget_bytes, waits)
