"""What the governor hears: wishes, offers, what was given back, what was measured. Pure.

Takes it into the estate, and answers what the ledger can answer at once. Does not cover what is
done about the rest (`actors.machines.governor`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from actors.machines.governing.state import GRAIN
from actors.machines.governor_events import (
    AlarmFired,
    BudgetChanged,
    Command,
    Event,
    LoadRequested,
    MemoryMeasured,
    ModelReady,
    ModelRemoved,
    PolicyChanged,
    ReclaimableReported,
    ReclaimFinished,
    ServingChanged,
    UnloadStarted,
)
from actors.machines.ledger import MemoryRequest, WorkerExited

if TYPE_CHECKING:
    from actors.machines.governing.state import GovernorState
    from actors.machines.model_accounts import ModelAccount


def take(m: GovernorState, event: Event, now: float) -> list[Command]:
    """Take an event in, and answer what can be answered at once."""
    match event:
        case LoadRequested(model=model):
            account = m.account(model)
            account.end()  # whatever it was before, it has no process yet
            account.policy, account.patient = event.policy, event.patient
            account.boarded_at = now
        case MemoryRequest():
            return _want(m, event, now)
        case ModelRemoved(model=model):
            return _leave(m, model, now)
        case MemoryMeasured():
            return _measure(m, event)
        case BudgetChanged(total_bytes=total):
            numbers = {"before_bytes": m.ledger.budget_bytes}
            answers = m.ledger.set_budget(total)
            return [m.note("budget", "", "it was changed", numbers), *answers]
        case AlarmFired():
            pass
        case _:  # a late word of a model that has left changes nothing
            known = m.accounts.get(event.model)
            return [] if known is None else _hear(m, known, event, now)
    return []


_Word = (
    PolicyChanged
    | ModelReady
    | ServingChanged
    | UnloadStarted
    | WorkerExited
    | ReclaimableReported
    | ReclaimFinished
)


def _hear(m: GovernorState, account: ModelAccount, event: _Word, now: float) -> list[Command]:
    match event:
        case PolicyChanged(policy=policy):
            account.policy = policy
        case ModelReady():
            _ready(m, account, now)
        case ServingChanged(busy=busy):
            account.serving = busy
            account.take(account.reclaimable, now)
        case UnloadStarted():
            account.state, account.evicting = "leaving", False
            m.exempt(account.name)  # what it has is to be finished, and nobody else can
            return [*m.ledger.retry()]
        case WorkerExited():
            return _release(m, account, event, now)
        case ReclaimableReported(reclaimable=reclaimable):
            account.take(reclaimable, now)
        case ReclaimFinished():
            return _reclaimed(m, account, event, now)
    return []


def _ready(m: GovernorState, account: ModelAccount, now: float) -> None:
    if account.state == "loading":
        account.state, account.patient = "ready", True
        account.load_s = max(0.1, now - account.boarded_at)
        account.kept_since, account.load_since = account.load_since, None
        m.take_exemption(account.name)
        account.take(account.reclaimable, now)


def _leave(m: GovernorState, model: str, now: float) -> list[Command]:
    m.take_exemption(model)
    commands: list[Command] = [*m.ledger.handle(WorkerExited(model), now)]
    m.accounts.pop(model, None)
    return commands


def _want(m: GovernorState, event: MemoryRequest, now: float) -> list[Command]:
    account = m.account(event.model)
    request = msgspec.structs.replace(event, since=_age(account, now))
    before = m.ledger.waiting.get(event.model)
    gives = m.ledger.growth(event) <= 0
    if gives and before is not None and account.open is not None:
        account.kept_since = before.since  # we made it give: it will ask again
    if account.state == "loading" and event.model in m.ledger.grants:
        m.exempt(event.model)  # who waits behind a load must not stop it half-way
    answers = m.ledger.handle(request, now)
    if not gives and answers[0].granted:
        account.kept_since = None
    if account.state == "loading" and not answers[0].granted:
        return [*answers[1:]]  # it is answered when there is room, or cannot be any
    return [*answers]


def _age(account: ModelAccount, now: float) -> float:
    """Return since when a wish waits: all wishes of a load are one."""
    if account.state != "loading":
        return now if account.kept_since is None else account.kept_since
    if account.load_since is None:
        account.load_since = now
    return account.load_since


def _release(
    m: GovernorState, account: ModelAccount, event: WorkerExited, now: float
) -> list[Command]:
    account.end()
    account.boarded_at = now
    m.take_exemption(event.model)
    _shed(m)
    return [*m.ledger.handle(event, now)]


def _reclaimed(
    m: GovernorState, account: ModelAccount, event: ReclaimFinished, now: float
) -> list[Command]:
    was = account.open
    if was is None or was.seq != event.seq:
        return []
    account.open = None
    account.gave(was.method, was.level, event.freed_bytes, exhausted=event.exhausted)
    if event.freed_bytes * 2 < was.wanted_bytes:
        account.barren[was.method] = now + m.times.barren_s
    numbers = {"wanted_bytes": was.wanted_bytes, "freed_bytes": event.freed_bytes}
    said = "it has no more to give" if event.exhausted else "done"
    return [m.note("reclaimed", event.model, f"{was.method}: {said}", numbers)]


def _measure(m: GovernorState, event: MemoryMeasured) -> list[Command]:
    m.gauge.pressure = event.pressure
    for name, account in m.accounts.items():
        account.measured_bytes = event.used.get(name, account.measured_bytes)
    before = m.ledger.excess_bytes
    _shed(m)
    excess = m.ledger.excess_bytes
    if excess > before + m.ledger.budget_bytes // GRAIN:
        return [m.note("excess", "", "workers take more than granted", {"excess_bytes": excess})]
    return [*m.ledger.retry()] if excess < before else []


def _shed(m: GovernorState) -> None:
    """Charge what was measured above the grants, so that nobody else gets it."""
    grants = m.ledger.grants
    over = [it.measured_bytes - grants.get(n, 0) for n, it in m.accounts.items() if n in grants]
    m.ledger.excess_bytes = sum(max(0, it) for it in over)
