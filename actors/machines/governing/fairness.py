"""Lets the oldest request go first, and holds models in use for it. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.governor_events import Command, HoldRequests

if TYPE_CHECKING:
    from actors.machines.governing.state import GovernorState
    from actors.machines.model_accounts import ModelAccount


def note_protected(m: GovernorState, now: float) -> list[Command]:
    """Note which models run rows that a load has just been spent on; grant what they may have."""
    ledger, least_s = m.ledger, m.times.protected_s
    before = ledger.protected
    ledger.protected = {it.name for it in m.accounts.values() if it.is_protected(now, least_s)}
    return [*ledger.grant_waiting()] if ledger.protected - before else []


def choose_first(m: GovernorState, now: float) -> list[Command]:
    """Make the oldest due request the first; one that inherits a greater age may replace it."""
    ledger, before = m.ledger, m.ledger.first
    due = [it for it in ledger.queue if now - (it.since or 0.0) >= m.times.due_s]
    possible = [it for it in due if m.is_needed(it) and it.total_bytes <= m.limit_of(it.model)]
    request = possible[0] if possible else None
    ledger.first = request.model if request is not None else None
    decisions: list[Command] = [*ledger.grant_waiting()] if ledger.first != before else []
    if request is None or ledger.first in {None, before}:
        return decisions
    waited_s, wanted = now - (request.since or 0.0), {"wanted_bytes": ledger.growth(request)}
    reason = f"has waited for {waited_s:.0f} s: no other model grows before it"
    return [m.record("first", request.model, reason, wanted), *decisions]


def hold_or_release(m: GovernorState, now: float, *, idle: bool) -> list[Command]:
    """Hold models for the first request while no shortfall is served (``idle``), or release."""
    if m.ledger.first != m.held_for:
        return _release(m)
    return _hold(m, now) if idle and m.ledger.first is not None else []


def _hold(m: GovernorState, now: float) -> list[Command]:
    ledger = m.ledger
    request = ledger.waiting[ledger.first or ""]
    if now - (request.since or 0.0) < m.times.hold_s:
        return []
    missing = ledger.growth(request) - ledger.available_bytes - m.pending_bytes()
    missing -= sum(_yield_bytes(m, m.accounts[name]) for name in m.held)
    commands: list[Command] = []
    busy = [
        it
        for name, it in m.accounts.items()
        if name != request.model and it.state == "ready" and not it.is_idle and name not in m.held
    ]
    for account in sorted(busy, key=lambda it: it.worth(ledger.grants.get(it.name, 0), now)):
        if missing <= 0:
            break
        if m.memory and not _yield_bytes(m, account):
            continue  # a pinned model gives nothing back in the host's memory
        missing -= _yield_bytes(m, account)
        m.held.add(account.name)
        if any(account.name in it.held for it in m.of(account.name) if it is not m):
            continue  # already held for another device
        reason = f"finishes its requests and gets no new ones: {request.model} waits for memory"
        commands += [
            m.record("hold", account.name, reason, requester=request.model),
            HoldRequests(account.name, held=True),
        ]
    return commands


def _yield_bytes(m: GovernorState, account: ModelAccount) -> int:
    """Return the bytes that a held model will have given back when it is idle."""
    granted = m.ledger.grants.get(account.name, 0)
    return granted - (m.base(account) if account.policy.pinned else 0)


def _release(m: GovernorState) -> list[Command]:
    m.held_for = m.ledger.first
    commands: list[Command] = []
    released = [name for name in m.accounts if name in m.held]
    m.held.clear()
    for name in released:
        if any(name in it.held for it in m.of(name)):
            continue  # still held for another device
        event = m.record("let_go", name, "the request that waited was granted or has ended")
        commands += [event, HoldRequests(name, held=False)]
    return commands
