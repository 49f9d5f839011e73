"""Which loads cannot have their memory, and why: with the arithmetic. Pure.

A load that somebody waits for by a request is patient: it is refused only if pinned models leave no
room for it. One that a user asked for is refused when nobody who is idle could make room for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors.machines.ledger import Answer, Wanted
from actors.machines.reclaim_order import within_reach
from actors.machines.room import needs
from actors.machines.tenants import GRACE_S

if TYPE_CHECKING:
    from actors.machines.governing import Command
    from actors.machines.room.estate import Estate


def refuse_loads(m: Estate, now: float) -> list[Command]:
    """Answer loads that wait for nothing."""
    commands: list[Command] = []
    for wish in m.ledger.waiting:
        if m.tenants[wish.model].state == "loading":
            commands += _refuse(m, wish, now)
    return commands


def _refuse(m: Estate, wish: Wanted, now: float) -> list[Command]:
    ledger, growth = m.ledger, m.ledger.growth(wish)
    # Who has just become idle can go in a moment.
    scene, need = m.scene(now + GRACE_S), needs.need_of(m, wish, now)
    coming = m.coming()
    reach = max(0, ledger.available_bytes) + coming + within_reach(need, scene)
    fits = wish.total_bytes <= m.most_of(wish.model)
    if fits and (m.tenants[wish.model].patient or growth <= reach):
        return []
    ledger.withdraw(wish.model)
    m.tenants[wish.model].load_since = None
    reason = _who_holds(m, wish.model)
    held, free = ledger.grants.get(wish.model, 0), max(0, ledger.available_bytes)
    answer = Answer(wish.model, wish.seq, held, granted=False, available_bytes=free, reason=reason)
    numbers = {"wanted_bytes": growth, "within_reach_bytes": reach}
    return [m.note("load_refused", wish.model, reason, numbers), answer, *ledger.retry()]


def _who_holds(m: Estate, model: str) -> str:
    """Say who has the budget, and why it stays there."""
    said = []
    for name, it in m.tenants.items():
        nbytes = m.ledger.grants.get(name, 0)
        if name == model or not nbytes:
            continue
        busy = "in use" if it.state == "ready" else it.state
        why = "pinned" if it.policy.pinned else "idle" if it.is_idle else busy
        said.append(f"{name} ({why}) holds {nbytes / 2**20:,.1f} MiB")
    return "; ".join(said) or "nobody holds anything"
