"""Whose turn it is: the oldest wish becomes the first, and others are held for it. Pure.

Nobody grows before the first wish. Rows that run end in time, but a worker may go on for ever by
starting new ones in the place of old ones; so, after a while, new requests for it wait in the
daemon until the first wish is met.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.governing import Command, Hold

if TYPE_CHECKING:
    from actors.machines.room.estate import Estate
    from actors.machines.tenants import Tenant


def name_first(m: Estate, now: float) -> list[Command]:
    """Choose the oldest; one that is older may come late, as models bring their age along."""
    ledger, before = m.ledger, m.ledger.first
    due = [it for it in ledger.waiting if now - (it.since or 0.0) >= m.times.due_s]
    wish = next((it for it in due if m.may_be_first(it)), None)
    ledger.first = wish.model if wish is not None else None
    answers: list[Command] = [*ledger.retry()] if ledger.first != before else []
    if wish is None or ledger.first in {None, before}:
        return answers
    growth, waited = ledger.growth(wish), now - (wish.since or 0.0)
    reason = f"it waits for {waited:.0f} s: nobody else grows before it"
    return [m.note("first", wish.model, reason, {"wanted_bytes": growth}), *answers]


def turn(m: Estate, now: float, *, idle: bool) -> list[Command]:
    """Hold those in use for the first wish, if nothing else helps it; let them go after it."""
    ledger = m.ledger
    if ledger.first != m.held_for:
        return _let_go(m)
    return _hold(m, now) if idle and ledger.first is not None else []


def _hold(m: Estate, now: float) -> list[Command]:
    ledger = m.ledger
    wish = ledger.refused[ledger.first or ""]
    if now - (wish.since or 0.0) < m.times.turn_s:
        return []
    lacking = ledger.growth(wish) - ledger.available_bytes - m.coming()
    lacking -= sum(_yields(m, it) for it in m.tenants.values() if it.held)
    commands: list[Command] = []
    for tenant in _to_hold(m, wish.model, now):
        if lacking <= 0:
            break
        lacking -= _yields(m, tenant)
        tenant.held = True
        reason = f"{wish.model} waits for what it holds; what it has runs to its end"
        commands += [
            m.note("hold", tenant.name, reason, requester=wish.model),
            Hold(tenant.name, held=True),
        ]
    return commands


def _to_hold(m: Estate, requester: str, now: float) -> list[Tenant]:
    busy = [
        it
        for name, it in m.tenants.items()
        if name != requester and it.state == "ready" and not it.is_idle and not it.held
    ]
    return sorted(busy, key=lambda it: it.worth(m.ledger.grants.get(it.name, 0), now))


def _yields(m: Estate, tenant: Tenant) -> int:
    """Return what a model that was held will have given when it is idle."""
    granted = m.ledger.grants.get(tenant.name, 0)
    return granted - (m.base(tenant) if tenant.policy.pinned else 0)


def _let_go(m: Estate) -> list[Command]:
    m.held_for = m.ledger.first
    commands: list[Command] = []
    for tenant in m.tenants.values():
        if tenant.held:
            tenant.held = False
            note = m.note("let_go", tenant.name, "who waited has what it needs")
            commands += [note, Hold(tenant.name, held=False)]
    return commands
