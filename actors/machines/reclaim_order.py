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

    from actors.machines.tenants import Tenant
    from protocol.worker import ReclaimMethod

Name = Literal["spare", "prefixes", "expired", "precision", "idle", "preempt", "stalled"]
RECLAIM_ORDER: tuple[Name, ...] = ("spare", "prefixes", "expired", "precision", "idle", "preempt")
FREE: tuple[Name, ...] = RECLAIM_ORDER[:3]
"""Those that cost neither quality nor a model that is in use."""
ALL_BUT_PARK: tuple[Name, ...] = RECLAIM_ORDER[:5]
LAST: tuple[Name, ...] = (*RECLAIM_ORDER, "stalled")
"""For a wish that is the first, and has waited for a turn: models that wait for each other."""


class Step(msgspec.Struct, frozen=True):
    """One thing that could be done."""

    method: Name
    model: str
    nbytes: int
    """What it would free."""
    level: int = 0


class Need(msgspec.Struct, frozen=True):
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


class Scene(msgspec.Struct, frozen=True):
    """All that the choice depends on."""

    tenants: Mapping[str, Tenant]
    grants: Mapping[str, int]
    wishes: Mapping[str, float]
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
            name in self.wishes or (name in self.grants and not it.is_idle)
            for name, it in self.tenants.items()
        )
        return self.budget // max(1, active)

    def is_behind(self, name: str, need: Need) -> bool:
        """Return whether a model waits for memory, and its turn comes after this wish."""
        if need.requester is None or name not in self.wishes:
            return False
        return (self.wishes[name], name) > (need.since, need.requester)

    def others(self, need: Need) -> Iterator[Tenant]:
        """Yield who is served and may give."""
        for name, tenant in self.tenants.items():
            if name != need.requester and tenant.state == "ready":
                yield tenant


def steps(method: Name, need: Need, scene: Scene) -> list[Step]:
    """Return what this rung has, the first to pay first; also of those who are busy giving."""
    match method:
        case "spare":
            found = [_step(method, it, it.reclaimable.spare) for it in scene.others(need)]
        case "prefixes":
            found = [_step(method, it, it.reclaimable.prefixes) for it in scene.others(need)]
        case "expired":
            return _evictions(
                method, [it for it in scene.others(need) if _expired(it, scene)], scene
            )
        case "precision":
            return _levels(scene)
        case "idle":
            idle = [it for it in scene.others(need) if it.is_evictable(scene.now)]
            return _evictions(method, [*idle, *_stuck(need, scene)], scene)
        case "stalled":
            return _evictions(method, _stalled(need, scene), scene)
        case "preempt":
            found = _parks(need, scene)
            found.sort(key=lambda it: (_priority(it, scene), -scene.granted(it.model)))
            return [it for it in found if it.nbytes >= scene.least]
    found.sort(key=lambda it: (_priority(it, scene), -it.nbytes))
    return [it for it in found if it.nbytes >= scene.least]


def within_reach(need: Need, scene: Scene) -> int:
    """Return what all rungs together could free for this, nothing counted twice."""
    gone = {it.model: it.nbytes for it in steps("idle", need, scene)}
    freed = sum(gone.values())
    may_park = {it.model: it.nbytes for it in steps("preempt", need, scene)}
    for name, tenant in scene.tenants.items():
        if name in gone or tenant.state != "ready":
            continue
        reclaimable = tenant.reclaimable
        freed += sum(reclaimable.levels)
        if name != need.requester:
            freed += reclaimable.spare + reclaimable.prefixes + may_park.get(name, 0)
    return freed


def reclaimed_by(method: Name) -> ReclaimMethod | None:
    """Return the worker's word for a rung; None: the whole model goes."""
    return None if method in {"expired", "idle", "stalled"} else method  # type: ignore[return-value]


def _step(method: Name, tenant: Tenant, nbytes: int, level: int = 0) -> Step:
    return Step(method, tenant.name, nbytes, level)


def _priority(step: Step, scene: Scene) -> int:
    return scene.tenants[step.model].policy.priority


def _expired(tenant: Tenant, scene: Scene) -> bool:
    return tenant.is_expired(scene.now)


def _evictions(method: Name, idle: list[Tenant], scene: Scene) -> list[Step]:
    idle.sort(key=lambda it: it.worth(scene.granted(it.name), scene.now))
    return [_step(method, it, scene.granted(it.name)) for it in idle]


def _stuck(need: Need, scene: Scene) -> list[Tenant]:
    """Return models that got a part of what their load needs, and wait behind this wish.

    They hold memory and serve nobody: two of them could wait for each other for ever.
    """
    return [
        it
        for name, it in scene.tenants.items()
        if it.state == "loading"
        and name != need.requester
        and scene.granted(name)
        and scene.is_behind(name, need)
    ]


def _stalled(need: Need, scene: Scene) -> list[Tenant]:
    """Return models that wait for memory behind this wish, and run nothing with what they have."""
    return [
        it
        for it in scene.others(need)
        if not it.policy.pinned
        and not it.reclaimable.rows
        and it.reclaimable.waiting
        and scene.is_behind(it.name, need)
    ]


def _levels(scene: Scene) -> list[Step]:
    """Return steps to the highest level that frees anything; everybody's rows pay alike."""
    found = []
    for tenant in scene.tenants.values():
        if tenant.state != "ready" or tenant.is_idle:
            continue
        for level, nbytes in enumerate(tenant.reclaimable.levels, 1):
            if nbytes >= scene.least:
                found.append(_step("precision", tenant, nbytes, level))
                break
    top = min((it.level for it in found), default=0)
    found = [it for it in found if it.level == top]
    found.sort(key=lambda it: (_priority(it, scene), -it.nbytes))
    return found


def _parks(need: Need, scene: Scene) -> list[Step]:
    """Return whose rows may be parked, and how much of them."""
    if need.resuming:
        return []
    share = scene.fair_share
    found = []
    for tenant in scene.others(need):
        preempt = tenant.reclaimable.preempt
        if need.requester is not None and tenant.policy.priority >= need.priority:
            above = scene.granted(tenant.name) - share
            is_fair = tenant.policy.priority == need.priority and need.total_bytes <= share
            preempt = min(preempt, above) if is_fair else 0
        found.append(_step("preempt", tenant, preempt))
    return found
