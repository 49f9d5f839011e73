"""What each model could give back by each reclaim method, and in which order. Pure, no state.

The methods, cheapest first, with what they cost::

    spare      granted memory that no row needs            nothing
    prefixes   checkpoints of prompts that no row uses     a prompt may be read again
    expired    models idle for longer than allowed         a load on the next request
    precision  rows one precision level down; every model  quality
               reaches level 1 before any reaches level 2
    idle       the least valuable idle, unpinned model     a load on the next request
    preempt    rows of models above their fair share, or   seconds for their requests
               with lower priority
    stalled    models whose requests wait while no row     a load; prompts are read again
               runs: the requests return to the daemon

Within a method, models of the lowest priority give first. `actors.machines.reclaim_plan` decides
which actions are used.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from actors.machines.model_accounts import ModelAccount
    from protocol.worker import ReclaimMethod

Method = Literal["spare", "prefixes", "expired", "precision", "idle", "preempt", "stalled"]
Methods = tuple[Method, ...]

RECLAIM_ORDER: Methods = ("spare", "prefixes", "expired", "precision", "idle", "preempt")
FREE: Methods = ("spare", "prefixes", "expired")
"""The methods that cost neither quality nor a model in use."""
WITHOUT_PREEMPTION: Methods = (*FREE, "precision", "idle")
WITH_STALLED: Methods = (*RECLAIM_ORDER, "stalled")
"""For the first request once it has waited for long: models that wait behind it may hold the memory
that it needs."""
EVICTING: frozenset[Method] = frozenset({"expired", "idle", "stalled"})
"""The methods that unload a whole model. Workers carry out the others."""


class ReclaimAction(msgspec.Struct, frozen=True):
    """Memory that one model could give back by one method."""

    method: Method
    model: str
    nbytes: int
    level: int = 0
    """Precision level, for the method ``precision``."""

    @property
    def worker_method(self) -> ReclaimMethod | None:
        """The method as workers know it; None if it unloads the whole model."""
        return None if self.method in EVICTING else self.method  # type: ignore[return-value]


class Shortfall(msgspec.Struct, frozen=True):
    """Memory that is missing: how much, for which model, and which methods may free it."""

    nbytes: int
    reason: str
    methods: Methods = RECLAIM_ORDER
    requester: str | None = None
    priority: int = 0
    """Priority of the requester. It rises while its request waits."""
    total_bytes: int = 0
    """Bytes that the requester would hold."""
    since: float = 0.0
    resuming: bool = False
    among: frozenset[str] | None = None
    """The models that may give memory back; None: all."""

    def concerns(self, model: str) -> bool:
        return self.among is None or model in self.among


class MemoryView(msgspec.Struct, frozen=True):
    """Everything that the choice of actions depends on."""

    accounts: Mapping[str, ModelAccount]
    grants: Mapping[str, int]
    waiting_since: Mapping[str, float]
    """By model, when its waiting request began to wait."""
    budget: int
    now: float
    protected: frozenset[str] = frozenset()
    """Models that are not preempted below their fair share for others of equal priority."""
    min_bytes: int = 1
    """Actions that free less are not worth a message."""

    def granted(self, name: str) -> int:
        return self.grants.get(name, 0)

    @property
    def fair_share(self) -> int:
        """The budget divided equally among the models in use and those that wait for memory."""
        active = sum(
            name in self.waiting_since or (name in self.grants and not account.is_idle)
            for name, account in self.accounts.items()
        )
        return self.budget // max(1, active)

    def rank_over(self, account: ModelAccount, shortfall: Shortfall) -> float:
        """Return a shortfall's priority towards a model: its wait counts unless that is protected.

        The system's own shortfalls are above all models.
        """
        if shortfall.requester is None:
            return math.inf
        if account.name in self.protected:
            return self.accounts[shortfall.requester].policy.priority
        return shortfall.priority

    def is_behind(self, name: str, shortfall: Shortfall) -> bool:
        """Return whether a model waits for memory and its request is newer than this one."""
        if shortfall.requester is None or name not in self.waiting_since:
            return False
        return (self.waiting_since[name], name) > (shortfall.since, shortfall.requester)

    def others(self, shortfall: Shortfall) -> list[ModelAccount]:
        """Return the ready models that may give memory back, other than the requester."""
        return [
            account
            for name, account in self.accounts.items()
            if name != shortfall.requester and account.state == "ready" and shortfall.concerns(name)
        ]


def actions(method: Method, shortfall: Shortfall, view: MemoryView) -> list[ReclaimAction]:
    """Return what this method could free, in the order of use.

    Includes models that are busy with another `Reclaim`.
    """
    others = view.others(shortfall)
    match method:
        case "spare" | "prefixes":
            found = [
                ReclaimAction(method, it.name, getattr(it.reclaimable, method)) for it in others
            ]
            return _largest_first(found, view)
        case "precision":
            return _step_downs(shortfall, view)
        case "preempt":
            return _preemptions(shortfall, view)
        case "expired":
            evicted = [it for it in others if it.is_expired(view.now)]
        case "idle":
            idle = [it for it in others if it.is_evictable(view.now)]
            evicted = [*idle, *_stuck_loads(shortfall, view)]
        case "stalled":
            evicted = _stalled(shortfall, view)
    evicted.sort(key=lambda it: it.worth(view.granted(it.name), view.now))
    return [ReclaimAction(method, it.name, view.granted(it.name)) for it in evicted]


def within_reach(shortfall: Shortfall, view: MemoryView) -> int:
    """Return what all methods of `RECLAIM_ORDER` together could free, without double counting."""
    evicted = {it.model: it.nbytes for it in actions("idle", shortfall, view)}
    preempted = {it.model: it.nbytes for it in actions("preempt", shortfall, view)}
    freed = sum(evicted.values())
    for name, account in view.accounts.items():
        if name in evicted or account.state != "ready":
            continue
        reclaimable = account.reclaimable
        freed += sum(reclaimable.levels)
        if name != shortfall.requester:
            freed += reclaimable.spare + reclaimable.prefixes + preempted.get(name, 0)
    return freed


def _largest_first(found: list[ReclaimAction], view: MemoryView) -> list[ReclaimAction]:
    found.sort(key=lambda it: (_priority(it, view), -it.nbytes))
    return [it for it in found if it.nbytes >= view.min_bytes]


def _priority(action: ReclaimAction, view: MemoryView) -> int:
    return view.accounts[action.model].policy.priority


def _step_downs(shortfall: Shortfall, view: MemoryView) -> list[ReclaimAction]:
    """Return each model's next step down that frees memory.

    Only steps to the highest level among them: every model reaches it before any steps further.
    """
    found = []
    for name, account in view.accounts.items():
        if account.state != "ready" or account.is_idle or not shortfall.concerns(name):
            continue
        for level, nbytes in enumerate(account.reclaimable.levels, 1):
            if nbytes >= view.min_bytes:
                found.append(ReclaimAction("precision", account.name, nbytes, level))
                break
    highest = min((it.level for it in found), default=0)
    return _largest_first([it for it in found if it.level == highest], view)


def _preemptions(shortfall: Shortfall, view: MemoryView) -> list[ReclaimAction]:
    if shortfall.resuming:
        return []
    share = view.fair_share
    found = []
    for account in view.others(shortfall):
        nbytes, priority = account.reclaimable.preempt, account.policy.priority
        rank = view.rank_over(account, shortfall)
        if priority >= rank:
            above_share = view.granted(account.name) - share
            is_fair = priority == rank and shortfall.total_bytes <= share
            nbytes = min(nbytes, above_share) if is_fair else 0
        if nbytes >= view.min_bytes:
            found.append(ReclaimAction("preempt", account.name, nbytes))
    found.sort(key=lambda it: (_priority(it, view), -view.granted(it.model)))
    return found


def _stuck_loads(shortfall: Shortfall, view: MemoryView) -> list[ModelAccount]:
    """Return models that hold a part of what their load needs and wait behind this request.

    They serve no request, and two of them could wait for each other forever.
    """
    return [
        account
        for name, account in view.accounts.items()
        if account.state == "loading"
        and name != shortfall.requester
        and view.granted(name)
        and view.is_behind(name, shortfall)
    ]


def _stalled(shortfall: Shortfall, view: MemoryView) -> list[ModelAccount]:
    """Return models that wait for memory behind this request and run no row."""
    return [
        account
        for account in view.others(shortfall)
        if not account.policy.pinned
        and not account.reclaimable.rows
        and account.reclaimable.waiting
        and view.is_behind(account.name, shortfall)
    ]
