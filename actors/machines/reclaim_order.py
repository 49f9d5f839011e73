"""The ladder's rungs: what could be given back, by whom, and in which order. Pure, no state.

Cheapest first, counted in quality and in seconds::

    spare      granted, and nobody needs it             costs nothing
    prefixes   checkpoints of prompts that no row uses  a prompt may be read again
    expired    models idle past their time              a load, if they are wanted again
    level      rows one level down, all models' level   quality
               1 before anybody's level 2
    idle       the least valuable idle, unpinned model  a load, when it is wanted again
    park       rows of models that have more than       seconds of those who wait in their place
               their fair share, or lower priority
    stalled    models that have requests, and no memory  a load, and prompts are read again
               to run any of them: all go back to the
               daemon, which brings them when it can

A rung is not used while a cheaper one has something to give that would help. Within a rung lower
priority pays first. `kvctl explain` and the ladder call the same functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from actors.machines.model_accounts import ModelAccount
    from protocol.worker import ReclaimMethod

Name = Literal["spare", "prefixes", "expired", "precision", "idle", "preempt", "stalled"]
RECLAIM_ORDER: tuple[Name, ...] = ("spare", "prefixes", "expired", "precision", "idle", "preempt")
FREE: tuple[Name, ...] = RECLAIM_ORDER[:3]
"""Those that cost neither quality nor a model that is in use."""
ALL_BUT_PARK: tuple[Name, ...] = RECLAIM_ORDER[:5]
LAST: tuple[Name, ...] = (*RECLAIM_ORDER, "stalled")
"""For a wish that is the first, and has waited for a turn: models that wait for each other."""


class ReclaimAction(msgspec.Struct, frozen=True):
    """One thing that could be done."""

    method: Name
    model: str
    nbytes: int
    """What it would free."""
    level: int = 0


class Shortfall(msgspec.Struct, frozen=True):
    """How much is to be freed, for whom, and how far that may go."""

    nbytes: int
    reason: str
    reach: tuple[Name, ...] = RECLAIM_ORDER
    requester: str | None = None
    priority: int = 0
    """Of the wisher, and what it has waited is added to it."""
    total_bytes: int = 0
    """What the wisher would hold."""
    since: float = 0.0
    """When the wish began."""
    resuming: bool = False


class MemoryView(msgspec.Struct, frozen=True):
    """All that the choice depends on."""

    accounts: Mapping[str, ModelAccount]
    grants: Mapping[str, int]
    requests: Mapping[str, float]
    """Who waits for memory, and since when."""
    budget: int
    now: float
    least: int = 1
    """Less than this is not worth a message."""

    def granted(self, name: str) -> int:
        """Return what a model holds."""
        return self.grants.get(name, 0)

    @property
    def fair_share(self) -> int:
        """The budget in equal parts for those who are in use or want to be."""
        active = sum(
            name in self.requests or (name in self.grants and not it.is_idle)
            for name, it in self.accounts.items()
        )
        return self.budget // max(1, active)

    def is_behind(self, name: str, shortfall: Shortfall) -> bool:
        """Return whether a model waits for memory, and its turn comes after this wish."""
        if shortfall.requester is None or name not in self.requests:
            return False
        return (self.requests[name], name) > (shortfall.since, shortfall.requester)

    def others(self, shortfall: Shortfall) -> Iterator[ModelAccount]:
        """Yield who is served and may give."""
        for name, account in self.accounts.items():
            if name != shortfall.requester and account.state == "ready":
                yield account


def actions(method: Name, shortfall: Shortfall, view: MemoryView) -> list[ReclaimAction]:
    """Return what this rung has, the first to pay first; also of those who are busy giving."""
    match method:
        case "spare":
            found = [_step(method, it, it.reclaimable.spare) for it in view.others(shortfall)]
        case "prefixes":
            found = [_step(method, it, it.reclaimable.prefixes) for it in view.others(shortfall)]
        case "expired":
            return _evictions(
                method, [it for it in view.others(shortfall) if _expired(it, view)], view
            )
        case "precision":
            return _levels(view)
        case "idle":
            idle = [it for it in view.others(shortfall) if it.is_evictable(view.now)]
            return _evictions(method, [*idle, *_stuck(shortfall, view)], view)
        case "stalled":
            return _evictions(method, _stalled(shortfall, view), view)
        case "preempt":
            found = _parks(shortfall, view)
            found.sort(key=lambda it: (_priority(it, view), -view.granted(it.model)))
            return [it for it in found if it.nbytes >= view.least]
    found.sort(key=lambda it: (_priority(it, view), -it.nbytes))
    return [it for it in found if it.nbytes >= view.least]


def within_reach(shortfall: Shortfall, view: MemoryView) -> int:
    """Return what all rungs together could free for this, nothing counted twice."""
    gone = {it.model: it.nbytes for it in actions("idle", shortfall, view)}
    freed = sum(gone.values())
    may_park = {it.model: it.nbytes for it in actions("preempt", shortfall, view)}
    for name, account in view.accounts.items():
        if name in gone or account.state != "ready":
            continue
        reclaimable = account.reclaimable
        freed += sum(reclaimable.levels)
        if name != shortfall.requester:
            freed += reclaimable.spare + reclaimable.prefixes + may_park.get(name, 0)
    return freed


def reclaimed_by(method: Name) -> ReclaimMethod | None:
    """Return the worker's word for a rung; None: the whole model goes."""
    return None if method in {"expired", "idle", "stalled"} else method  # type: ignore[return-value]


def _step(method: Name, account: ModelAccount, nbytes: int, level: int = 0) -> ReclaimAction:
    return ReclaimAction(method, account.name, nbytes, level)


def _priority(step: ReclaimAction, view: MemoryView) -> int:
    return view.accounts[step.model].policy.priority


def _expired(account: ModelAccount, view: MemoryView) -> bool:
    return account.is_expired(view.now)


def _evictions(method: Name, idle: list[ModelAccount], view: MemoryView) -> list[ReclaimAction]:
    idle.sort(key=lambda it: it.worth(view.granted(it.name), view.now))
    return [_step(method, it, view.granted(it.name)) for it in idle]


def _stuck(shortfall: Shortfall, view: MemoryView) -> list[ModelAccount]:
    """Return models that got a part of what their load needs, and wait behind this wish.

    They hold memory and serve nobody: two of them could wait for each other for ever.
    """
    return [
        it
        for name, it in view.accounts.items()
        if it.state == "loading"
        and name != shortfall.requester
        and view.granted(name)
        and view.is_behind(name, shortfall)
    ]


def _stalled(shortfall: Shortfall, view: MemoryView) -> list[ModelAccount]:
    """Return models that wait for memory behind this wish, and run nothing with what they have."""
    return [
        it
        for it in view.others(shortfall)
        if not it.policy.pinned
        and not it.reclaimable.rows
        and it.reclaimable.waiting
        and view.is_behind(it.name, shortfall)
    ]


def _levels(view: MemoryView) -> list[ReclaimAction]:
    """Return steps to the highest level that frees anything; everybody's rows pay alike."""
    found = []
    for account in view.accounts.values():
        if account.state != "ready" or account.is_idle:
            continue
        for level, nbytes in enumerate(account.reclaimable.levels, 1):
            if nbytes >= view.least:
                found.append(_step("precision", account, nbytes, level))
                break
    top = min((it.level for it in found), default=0)
    found = [it for it in found if it.level == top]
    found.sort(key=lambda it: (_priority(it, view), -it.nbytes))
    return found


def _parks(shortfall: Shortfall, view: MemoryView) -> list[ReclaimAction]:
    """Return whose rows may be parked, and how much of them."""
    if shortfall.resuming:
        return []
    share = view.fair_share
    found = []
    for account in view.others(shortfall):
        preempt = account.reclaimable.preempt
        if shortfall.requester is not None and account.policy.priority >= shortfall.priority:
            above = view.granted(account.name) - share
            is_fair = (
                account.policy.priority == shortfall.priority and shortfall.total_bytes <= share
            )
            preempt = min(preempt, above) if is_fair else 0
        found.append(_step("preempt", account, preempt))
    return found
