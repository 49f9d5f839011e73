"""What the governor hears: wishes, offers, what was given back, what was measured. Pure.

Takes it into the estate, and answers what the ledger can answer at once. Does not cover what is
done about the rest (`actors.machines.governor`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from actors.machines.governing import (
    Boarding,
    BudgetIs,
    Command,
    Event,
    Leaving,
    Left,
    Measured,
    Offered,
    PolicyIs,
    Rang,
    Ready,
    Reclaimed,
    Serves,
)
from actors.machines.ledger import Released, Wanted
from actors.machines.room.estate import GRAIN

if TYPE_CHECKING:
    from actors.machines.room.estate import Estate
    from actors.machines.tenants import Tenant


def take(m: Estate, event: Event, now: float) -> list[Command]:
    """Take an event in, and answer what can be answered at once."""
    match event:
        case Boarding(model=model):
            tenant = m.tenant(model)
            tenant.end()  # whatever it was before, it has no process yet
            tenant.policy, tenant.patient = event.policy, event.patient
            tenant.boarded_at = now
        case Wanted():
            return _want(m, event, now)
        case Left(model=model):
            return _leave(m, model, now)
        case Measured():
            return _measure(m, event)
        case BudgetIs(total_bytes=total):
            numbers = {"before_bytes": m.ledger.budget_bytes}
            answers = m.ledger.set_budget(total)
            return [m.note("budget", "", "it was changed", numbers), *answers]
        case Rang():
            pass
        case _:  # a late word of a model that has left changes nothing
            known = m.tenants.get(event.model)
            return [] if known is None else _hear(m, known, event, now)
    return []


_Word = PolicyIs | Ready | Serves | Leaving | Released | Offered | Reclaimed


def _hear(m: Estate, tenant: Tenant, event: _Word, now: float) -> list[Command]:
    match event:
        case PolicyIs(policy=policy):
            tenant.policy = policy
        case Ready():
            _ready(m, tenant, now)
        case Serves(busy=busy):
            tenant.serving = busy
            tenant.take(tenant.reclaimable, now)
        case Leaving():
            tenant.state, tenant.evicting = "leaving", False
            m.exempt(tenant.name)  # what it has is to be finished, and nobody else can
            return [*m.ledger.retry()]
        case Released():
            return _release(m, tenant, event, now)
        case Offered(reclaimable=reclaimable):
            tenant.take(reclaimable, now)
        case Reclaimed():
            return _reclaimed(m, tenant, event, now)
    return []


def _ready(m: Estate, tenant: Tenant, now: float) -> None:
    if tenant.state == "loading":
        tenant.state, tenant.patient = "ready", True
        tenant.load_s = max(0.1, now - tenant.boarded_at)
        tenant.kept_since, tenant.load_since = tenant.load_since, None
        m.take_exemption(tenant.name)
        tenant.take(tenant.reclaimable, now)


def _leave(m: Estate, model: str, now: float) -> list[Command]:
    m.take_exemption(model)
    commands: list[Command] = [*m.ledger.handle(Released(model), now)]
    m.tenants.pop(model, None)
    return commands


def _want(m: Estate, event: Wanted, now: float) -> list[Command]:
    tenant = m.tenant(event.model)
    wish = msgspec.structs.replace(event, since=_age(tenant, now))
    before = m.ledger.refused.get(event.model)
    gives = m.ledger.growth(event) <= 0
    if gives and before is not None and tenant.open is not None:
        tenant.kept_since = before.since  # we made it give: it will ask again
    if tenant.state == "loading" and event.model in m.ledger.grants:
        m.exempt(event.model)  # who waits behind a load must not stop it half-way
    answers = m.ledger.handle(wish, now)
    if not gives and answers[0].granted:
        tenant.kept_since = None
    if tenant.state == "loading" and not answers[0].granted:
        return [*answers[1:]]  # it is answered when there is room, or cannot be any
    return [*answers]


def _age(tenant: Tenant, now: float) -> float:
    """Return since when a wish waits: all wishes of a load are one."""
    if tenant.state != "loading":
        return now if tenant.kept_since is None else tenant.kept_since
    if tenant.load_since is None:
        tenant.load_since = now
    return tenant.load_since


def _release(m: Estate, tenant: Tenant, event: Released, now: float) -> list[Command]:
    tenant.end()
    tenant.boarded_at = now
    m.take_exemption(event.model)
    _shed(m)
    return [*m.ledger.handle(event, now)]


def _reclaimed(m: Estate, tenant: Tenant, event: Reclaimed, now: float) -> list[Command]:
    was = tenant.open
    if was is None or was.seq != event.seq:
        return []
    tenant.open = None
    tenant.gave(was.method, was.level, event.freed_bytes, exhausted=event.exhausted)
    if event.freed_bytes * 2 < was.wanted_bytes:
        tenant.barren[was.method] = now + m.times.barren_s
    numbers = {"wanted_bytes": was.wanted_bytes, "freed_bytes": event.freed_bytes}
    said = "it has no more to give" if event.exhausted else "done"
    return [m.note("reclaimed", event.model, f"{was.method}: {said}", numbers)]


def _measure(m: Estate, event: Measured) -> list[Command]:
    m.gauge.pressure = event.pressure
    for name, tenant in m.tenants.items():
        tenant.measured_bytes = event.used.get(name, tenant.measured_bytes)
    before = m.ledger.excess_bytes
    _shed(m)
    excess = m.ledger.excess_bytes
    if excess > before + m.ledger.budget_bytes // GRAIN:
        return [m.note("excess", "", "workers take more than granted", {"excess_bytes": excess})]
    return [*m.ledger.retry()] if excess < before else []


def _shed(m: Estate) -> None:
    """Charge what was measured above the grants, so that nobody else gets it."""
    grants = m.ledger.grants
    over = [it.measured_bytes - grants.get(n, 0) for n, it in m.tenants.items() if n in grants]
    m.ledger.excess_bytes = sum(max(0, it) for it in over)
