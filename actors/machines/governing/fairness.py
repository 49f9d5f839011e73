"""Whose turn it is: the oldest wish becomes the first, and others are held for it. Pure.

Nobody grows before the first wish. Rows that run end in time, but a worker may go on for ever by
starting new ones in the place of old ones; so, after a while, new requests for it wait in the
daemon until the first wish is met.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.governor_events import Command, HoldRequests

if TYPE_CHECKING:
    from actors.machines.governing.state import GovernorState
    from actors.machines.model_accounts import ModelAccount


def name_first(m: GovernorState, now: float) -> list[Command]:
    """Choose the oldest; one that is older may come late, as models bring their age along."""
    ledger, before = m.ledger, m.ledger.first
    due = [it for it in ledger.queue if now - (it.since or 0.0) >= m.times.due_s]
    request = next((it for it in due if m.may_be_first(it)), None)
    ledger.first = request.model if request is not None else None
    answers: list[Command] = [*ledger.retry()] if ledger.first != before else []
    if request is None or ledger.first in {None, before}:
        return answers
    growth, waited = ledger.growth(request), now - (request.since or 0.0)
    reason = f"it waits for {waited:.0f} s: nobody else grows before it"
    return [m.note("first", request.model, reason, {"wanted_bytes": growth}), *answers]


def turn(m: GovernorState, now: float, *, idle: bool) -> list[Command]:
    """Hold those in use for the first wish, if nothing else helps it; let them go after it."""
    ledger = m.ledger
    if ledger.first != m.held_for:
        return _let_go(m)
    return _hold(m, now) if idle and ledger.first is not None else []


def _hold(m: GovernorState, now: float) -> list[Command]:
    ledger = m.ledger
    request = ledger.waiting[ledger.first or ""]
    if now - (request.since or 0.0) < m.times.turn_s:
        return []
    lacking = ledger.growth(request) - ledger.available_bytes - m.coming()
    lacking -= sum(_yields(m, it) for it in m.accounts.values() if it.held)
    commands: list[Command] = []
    for account in _to_hold(m, request.model, now):
        if lacking <= 0:
            break
        lacking -= _yields(m, account)
        account.held = True
        reason = f"{request.model} waits for what it holds; what it has runs to its end"
        commands += [
            m.note("hold", account.name, reason, requester=request.model),
            HoldRequests(account.name, held=True),
        ]
    return commands


def _to_hold(m: GovernorState, requester: str, now: float) -> list[ModelAccount]:
    busy = [
        it
        for name, it in m.accounts.items()
        if name != requester and it.state == "ready" and not it.is_idle and not it.held
    ]
    return sorted(busy, key=lambda it: it.worth(m.ledger.grants.get(it.name, 0), now))


def _yields(m: GovernorState, account: ModelAccount) -> int:
    """Return what a model that was held will have given when it is idle."""
    granted = m.ledger.grants.get(account.name, 0)
    return granted - (m.base(account) if account.policy.pinned else 0)


def _let_go(m: GovernorState) -> list[Command]:
    m.held_for = m.ledger.first
    commands: list[Command] = []
    for account in m.accounts.values():
        if account.held:
            account.held = False
            note = m.note("let_go", account.name, "who waited has what it needs")
            commands += [note, HoldRequests(account.name, held=False)]
    return commands
