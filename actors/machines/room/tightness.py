"""Whether memory is tight, and at which level of their ladders new rows start. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.gauge import Readings
from actors.machines.governing import Command, StartLevel
from actors.machines.room.estate import GRAIN

if TYPE_CHECKING:
    from actors.machines.room.estate import Estate
    from actors.machines.tenants import Tenant


def look(m: Estate, now: float) -> list[Command]:
    """Read the gauge, and tell workers where new rows start."""
    gauge, was = m.gauge, m.gauge.tight
    served = list(m.tenants.values())
    gauge.read(
        _readings(m, now), max((len(it.reclaimable.levels) for it in served), default=0), now
    )
    commands: list[Command] = []
    if gauge.tight != was:
        reason = gauge.reason or "there is room again: new rows start at the top"
        commands.append(m.note("tight" if gauge.tight else "calm", "", reason))
    for tenant in served:
        commands += _start_level(m, tenant)
    return commands


def _start_level(m: Estate, tenant: Tenant) -> list[Command]:
    if tenant.state != "ready":
        return []
    lowest = len(tenant.reclaimable.levels)
    level = min(max(m.gauge.level, tenant.level), lowest) if m.gauge.tight else 0
    if level == tenant.level:
        return []
    tenant.level = level
    reason = m.gauge.reason or "there is room again"
    note = m.note("start_level", tenant.name, reason, {"level": level})
    return [note, StartLevel(tenant.name, level)]


def _readings(m: Estate, now: float) -> Readings:
    ledger, served = m.ledger, m.tenants.values()
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
        now - (wish.since or 0.0) >= m.times.settle_s
        and m.tenants[wish.model].state == "ready"
        and m.is_served(wish)
        for wish in ledger.waiting
    )
    waits = waits or ledger.available_bytes < -(ledger.budget_bytes // GRAIN)
    room = max(0, ledger.budget_bytes - base)
    return Readings(room, rows, m.measured, ledger.budget_bytes, waits)
