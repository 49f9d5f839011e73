"""The governor: readings, wishes and offers in; what workers shall give back out. Pure.

What it does with every event, in this order:

1. models idle past their time are unloaded;
2. a wish that has waited for `Times.due_s` becomes the ledger's first: nobody else grows before it;
3. a load that cannot be granted is refused, with the arithmetic;
4. the gauge says whether memory is tight, and where new rows start;
5. what is to be freed, and for whom, the most urgent first (`_needs`); the cheapest rung that
   has something to give does it (`actors.machines.rungs`). What is on its way is waited for: at
   most one `Reclaim` runs in a worker, and nobody pays for what another is giving already;
6. where no rung helps the first wish for `Times.turn_s`, models that are in use are *held*: new
   requests for them wait, those they have run to their end, and then they are idle.

**Nobody starves.** A wish that can be met at all becomes the first one after those that are older;
then nobody else grows, rows end (their memory was reserved when they began), and who could go on
for ever by replacing rows by new ones is held. So all others come to run nothing, and what such
models have is within reach. **Nobody is aborted**: no command here ends a request.

Does not cover: the ledger (`actors.machines.governor`), how a worker frees (`kvd.worker`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from actors.machines.gauge import Gauge, Readings
from actors.machines.governing import (
    Boarding,
    BudgetIs,
    Command,
    Event,
    Evict,
    Hold,
    Leaving,
    Left,
    Measured,
    Noted,
    Offered,
    PolicyIs,
    Rang,
    Ready,
    Reclaim,
    Reclaimed,
    StartLevel,
)
from actors.machines.governor import Answer, Governor, Released, Wanted
from actors.machines.rungs import (
    ALL_BUT_PARK,
    FREE,
    LAST,
    RUNGS,
    Name,
    Need,
    Scene,
    Step,
    reclaimed_by,
    steps,
    within_reach,
)
from actors.machines.tenants import GRACE_S, Open, Tenant

if TYPE_CHECKING:
    from collections.abc import Iterator


class Times(msgspec.Struct, frozen=True):
    """How long things are waited for, in seconds."""

    settle_s: float = 0.25
    """Before a wish costs anybody anything: workers ask for much, then for what they must have."""
    due_s: float = 10.0
    """Until a wish is the first, and nobody overtakes it any more."""
    turn_s: float = 30.0
    """Until others are held for it; and a wish that waits gains one priority in this time."""
    reclaim_s: float = 60.0
    """For a worker to say that a `Reclaim` is over."""
    barren_s: float = 5.0
    """Before a worker is asked again for what it did not have."""
    tick_s: float = 1.0
    """Between two looks while something is to be done."""


GRAIN = 128
"""The budget in so many parts: less than one is not asked for, if more is there."""
LEAST = 4096
"""Offers of less than such a part are left alone."""
LITTLE, MUCH = 0.01, 0.03
"""Of the budget, taken beyond the grants: up to here it costs nobody anything; from here on rows
are parked."""


class Ladder(msgspec.Struct):
    """The ledger, the tenants, the gauge, and what is on its way."""

    ledger: Governor
    gauge: Gauge = msgspec.field(default_factory=Gauge)
    times: Times = Times()
    tenants: dict[str, Tenant] = msgspec.field(default_factory=dict)
    seq: int = 0
    """Of the newest `Reclaim`."""
    held_for: str | None = None
    """The first wish as it was when we last looked; whoever is held, is held for it."""
    relieved_at: float | None = None
    """When the system's pressure was last answered."""
    deadline: float | None = None
    """When to ring."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event and return what is to be done."""
        commands = [*self._take(event, now), *self._govern(now)]
        self._wind_up(now)
        return commands

    def check(self) -> None:
        """Check the invariants."""
        self.ledger.check()
        for name, tenant in self.tenants.items():
            assert tenant.name == name, "a tenant under another's name"
            assert tenant.open is None or tenant.state != "loading", "a load gives nothing back"
            assert not tenant.held or self.held_for not in {None, name}, "held for nobody"
        assert set(self.ledger.grants) <= set(self.tenants), "a grant to nobody"
        assert set(self.ledger.refused) <= set(self.tenants), "a wish of nobody"

    def most_of(self, model: str) -> int:
        """Return what this model can have at most: all but what pinned others keep."""
        kept = sum(
            self._base(it)
            for name, it in self.tenants.items()
            if name != model and it.policy.pinned and it.state == "ready"
        )
        return max(0, self.ledger.budget_bytes - kept)

    def scene(self, now: float) -> Scene:
        """Return what rungs look at."""
        wishes = {it.model: it.since or 0.0 for it in self.ledger.waiting}
        budget = self.ledger.budget_bytes
        return Scene(self.tenants, self.ledger.grants, wishes, budget, now, max(1, budget // LEAST))

    # -- 0. what happened -------------------------------------------------------------------------

    def _take(self, event: Event, now: float) -> list[Command]:  # noqa: C901, PLR0911 - one match
        match event:
            case Boarding(model=model):
                tenant = self._tenant(model)
                tenant.policy, tenant.patient = event.policy, event.patient
                tenant.state, tenant.boarded_at = "loading", now
            case PolicyIs(model=model):
                self._tenant(model).policy = event.policy
            case Ready(model=model):
                self._ready(self._tenant(model), now)
            case Leaving(model=model):
                tenant = self._tenant(model)
                tenant.state, tenant.evicting = "leaving", False
                self._exempt(model)  # what it has is to be finished, and nobody else can
                return [*self.ledger.retry()]
            case Left(model=model):
                return self._leave(model, now)
            case Wanted():
                return self._want(event, now)
            case Released():
                return self._release(event, now)
            case Offered(model=model):
                self._tenant(model).take(event.offer, now)
            case Reclaimed():
                return self._reclaimed(event, now)
            case Measured():
                return self._measure(event)
            case BudgetIs(total_bytes=total):
                before = self.ledger.budget_bytes
                answers = self.ledger.set_budget(total)
                return [
                    self._note("budget", "", "it was changed", {"before_bytes": before}),
                    *answers,
                ]
            case Rang():
                pass
        return []

    def _tenant(self, model: str) -> Tenant:
        return self.tenants.setdefault(model, Tenant(model))

    def _ready(self, tenant: Tenant, now: float) -> None:
        if tenant.state == "loading":
            tenant.state, tenant.patient = "ready", True
            tenant.load_s = max(0.1, now - tenant.boarded_at)
            tenant.kept_since, tenant.load_since = tenant.load_since, None
            self._take_exemption(tenant.name)
            tenant.take(tenant.offer, now)

    def _leave(self, model: str, now: float) -> list[Command]:
        self._take_exemption(model)
        commands: list[Command] = [*self.ledger.handle(Released(model), now)]
        self.tenants.pop(model, None)
        return commands

    def _exempt(self, model: str) -> None:
        if model not in self.ledger.exempt:
            self.ledger.exempt.append(model)

    def _take_exemption(self, model: str) -> None:
        """Let nobody grow before the first one who comes back: it has nothing to finish."""
        if model in self.ledger.exempt:
            self.ledger.exempt.remove(model)

    def _want(self, event: Wanted, now: float) -> list[Command]:
        tenant = self._tenant(event.model)
        wish = msgspec.structs.replace(event, since=self._age(tenant, now))
        before = self.ledger.refused.get(event.model)
        gives = self.ledger.growth(event) <= 0
        if gives and before is not None and tenant.open is not None:
            tenant.kept_since = before.since  # we made it give: it will ask again
        if tenant.state == "loading" and event.model in self.ledger.grants:
            self._exempt(event.model)  # who waits behind a load must not stop it half-way
        answers = self.ledger.handle(wish, now)
        if not gives and answers[0].granted:
            tenant.kept_since = None
        if tenant.state == "loading" and not answers[0].granted:
            return [*answers[1:]]  # it is answered when there is room, or cannot be any
        return [*answers]

    def _age(self, tenant: Tenant, now: float) -> float:
        """Return since when a wish waits: all wishes of a load are one."""
        if tenant.state != "loading":
            return now if tenant.kept_since is None else tenant.kept_since
        if tenant.load_since is None:
            tenant.load_since = now
        return tenant.load_since

    def _release(self, event: Released, now: float) -> list[Command]:
        tenant = self._tenant(event.model)
        tenant.end()
        tenant.boarded_at = now
        self._take_exemption(event.model)
        self._shed()
        return [*self.ledger.handle(event, now)]

    def _reclaimed(self, event: Reclaimed, now: float) -> list[Command]:
        tenant = self._tenant(event.model)
        was = tenant.open
        if was is None or was.seq != event.seq:
            return []
        tenant.open = None
        tenant.gave(was.rung, was.level, event.freed_bytes, exhausted=event.exhausted)
        if event.freed_bytes * 2 < was.wanted_bytes:
            tenant.barren[was.rung] = now + self.times.barren_s
        numbers = {"wanted_bytes": was.wanted_bytes, "freed_bytes": event.freed_bytes}
        said = "it has no more to give" if event.exhausted else "done"
        return [self._note("reclaimed", event.model, f"{was.rung}: {said}", numbers)]

    def _measure(self, event: Measured) -> list[Command]:
        self.gauge.pressure = event.pressure
        for name, tenant in self.tenants.items():
            tenant.measured_bytes = event.used.get(name, tenant.measured_bytes)
        before = self.ledger.excess_bytes
        self._shed()
        excess = self.ledger.excess_bytes
        if excess > before + self.ledger.budget_bytes // GRAIN:
            return [
                self._note("excess", "", "workers take more than granted", {"excess_bytes": excess})
            ]
        return [*self.ledger.retry()] if excess < before else []

    def _shed(self) -> None:
        """Charge what was measured above the grants, so that nobody else gets it."""
        grants = self.ledger.grants
        over = [
            it.measured_bytes - grants.get(n, 0) for n, it in self.tenants.items() if n in grants
        ]
        self.ledger.excess_bytes = sum(max(0, it) for it in over)

    # -- the way through --------------------------------------------------------------------------

    def _govern(self, now: float) -> list[Command]:
        commands: list[Command] = []
        self._forget_late(now)
        commands += self._expire(now)  # (1)
        commands += self._hurry()
        commands += self._name_first(now)  # (2)
        commands += self._refuse_loads(now)  # (3)
        commands += self._look(now)  # (4)
        acted = self._climb(now)  # (5)
        return [*commands, *acted, *self._turn(now, idle=not acted)]  # (6)

    def _forget_late(self, now: float) -> None:
        for tenant in self.tenants.values():
            if tenant.open is not None and now >= tenant.open.until:
                tenant.barren[tenant.open.rung] = now + self.times.reclaim_s
                tenant.open = None
            tenant.barren = {rung: until for rung, until in tenant.barren.items() if until > now}

    def _expire(self, now: float) -> list[Command]:
        late = [it for it in self.tenants.values() if it.is_expired(now)]
        return [
            command
            for it in late
            for command in self._evict(it, f"nobody asked for it in {it.policy.idle_ttl_s:g} s")
        ]

    def _hurry(self) -> list[Command]:
        """Take requests back that came while a model was going, and have no memory to run in."""
        return [
            command
            for it in self.tenants.values()
            if it.evicting and it.offer.waiting and not it.offer.rows
            for command in self._evict(it, "a request came as it went", requeue=True)
        ]

    def _name_first(self, now: float) -> list[Command]:
        """Choose the oldest; one that is older may come late, as models bring their age along."""
        ledger, before = self.ledger, self.ledger.first
        due = [it for it in ledger.waiting if now - (it.since or 0.0) >= self.times.due_s]
        wish = next((it for it in due if self._may_be_first(it)), None)
        ledger.first = wish.model if wish is not None else None
        answers: list[Command] = [*ledger.retry()] if ledger.first != before else []
        if wish is None or ledger.first in {None, before}:
            return answers
        growth, waited = ledger.growth(wish), now - (wish.since or 0.0)
        reason = f"it waits for {waited:.0f} s: nobody else grows before it"
        return [self._note("first", wish.model, reason, {"wanted_bytes": growth}), *answers]

    def _may_be_first(self, wish: Wanted) -> bool:
        return self._is_served(wish) and wish.total_bytes <= self.most_of(wish.model)

    def _is_served(self, wish: Wanted) -> bool:
        """Return whether somebody waits for it; a wish for room to cache in is not worth a row."""
        tenant = self.tenants[wish.model]
        return tenant.state == "loading" or tenant.offer.waiting > 0 or wish.resuming

    def _refuse_loads(self, now: float) -> list[Command]:
        commands: list[Command] = []
        for wish in self.ledger.waiting:
            if self.tenants[wish.model].state == "loading":
                commands += self._refuse(wish, now)
        return commands

    def _refuse(self, wish: Wanted, now: float) -> list[Command]:
        ledger, growth = self.ledger, self.ledger.growth(wish)
        # Who has just become idle can go in a moment.
        scene, need = self.scene(now + GRACE_S), self._need_of(wish, now)
        coming = self._coming()
        reach = max(0, ledger.available_bytes) + coming + within_reach(need, scene)
        fits = wish.total_bytes <= self.most_of(wish.model)
        if fits and (self.tenants[wish.model].patient or growth <= reach):
            return []
        ledger.withdraw(wish.model)
        self.tenants[wish.model].load_since = None
        reason = self._who_holds(wish.model)
        held, free = ledger.grants.get(wish.model, 0), max(0, ledger.available_bytes)
        answer = Answer(
            wish.model, wish.seq, held, granted=False, available_bytes=free, reason=reason
        )
        numbers = {"wanted_bytes": growth, "within_reach_bytes": reach}
        return [self._note("load_refused", wish.model, reason, numbers), answer, *ledger.retry()]

    def _who_holds(self, model: str) -> str:
        """Say who has the budget, and why it stays there."""
        said = []
        for name, it in self.tenants.items():
            nbytes = self.ledger.grants.get(name, 0)
            if name == model or not nbytes:
                continue
            busy = "in use" if it.state == "ready" else it.state
            why = "pinned" if it.policy.pinned else "idle" if it.is_idle else busy
            said.append(f"{name} ({why}) holds {nbytes / 2**20:,.1f} MiB")
        return "; ".join(said) or "nobody holds anything"

    def _look(self, now: float) -> list[Command]:
        gauge, was = self.gauge, self.gauge.tight
        served = list(self.tenants.values())
        gauge.read(
            self._readings(now), max((len(it.offer.levels) for it in served), default=0), now
        )
        commands: list[Command] = []
        if gauge.tight != was:
            reason = gauge.reason or "there is room again: new rows start at the top"
            commands.append(self._note("tight" if gauge.tight else "calm", "", reason))
        for tenant in served:
            commands += self._start_level(tenant)
        return commands

    def _start_level(self, tenant: Tenant) -> list[Command]:
        if tenant.state != "ready":
            return []
        lowest = len(tenant.offer.levels)
        level = min(max(self.gauge.level, tenant.level), lowest) if self.gauge.tight else 0
        if level == tenant.level:
            return []
        tenant.level = level
        reason = self.gauge.reason or "there is room again"
        note = self._note("start_level", tenant.name, reason, {"level": level})
        return [note, StartLevel(tenant.name, level)]

    def _readings(self, now: float) -> Readings:
        ledger, served = self.ledger, self.tenants.values()
        base = sum(self._base(it) for it in served)
        rows = sum(
            max(
                0,
                ledger.grants.get(it.name, 0) - self._base(it) - it.offer.spare - it.offer.prefixes,
            )
            for it in served
            if it.state == "ready"
        )
        waits = any(
            now - (wish.since or 0.0) >= self.times.settle_s
            and self.tenants[wish.model].state == "ready"
            and self._is_served(wish)
            for wish in ledger.waiting
        )
        waits = waits or ledger.available_bytes < -(ledger.budget_bytes // GRAIN)
        room = max(0, ledger.budget_bytes - base)
        return Readings(room, rows, self._measured, ledger.budget_bytes, waits)

    @property
    def _measured(self) -> int:
        return sum(it.measured_bytes for it in self.tenants.values())

    def _base(self, tenant: Tenant) -> int:
        granted = self.ledger.grants.get(tenant.name, 0)
        return min(granted, tenant.offer.base) if tenant.offer.base else granted

    # -- 5. what is to be freed -------------------------------------------------------------------

    def _climb(self, now: float) -> list[Command]:
        scene = self.scene(now)
        for need in self._needs(now, scene):
            if commands := self._free(need, scene):
                return commands
        return []

    def _needs(self, now: float, scene: Scene) -> Iterator[Need]:
        """Yield what is to be freed, the most urgent first."""
        yield from self._overdrawn()
        for wish in self.ledger.waiting:
            if self._is_served(wish) and self._has_turn(wish):
                need = self._need_of(wish, now)
                yield msgspec.structs.replace(need, reach=self._reach(need, wish, scene))
        yield from self._pressed(now)
        yield from self._foreseen()

    def _overdrawn(self) -> Iterator[Need]:
        """Yield what the grants, and what is taken beyond them, are above the budget."""
        ledger = self.ledger
        over = -ledger.available_bytes
        if over <= 0:
            return
        if ledger.granted_bytes > ledger.budget_bytes:
            yield Need(over, "the budget was lowered")
        else:
            share = over / max(1, ledger.budget_bytes)
            reach = RUNGS if share > MUCH else ALL_BUT_PARK if share > LITTLE else FREE
            yield Need(over, "workers take more than they were granted", reach)

    def _has_turn(self, wish: Wanted) -> bool:
        return self.ledger.first in {None, wish.model} or wish.model in self.ledger.exempt

    def _need_of(self, wish: Wanted, now: float) -> Need:
        tenant, since = self.tenants[wish.model], wish.since or 0.0
        what = "the load of" if tenant.state == "loading" else "requests of"
        return Need(
            self.ledger.growth(wish) - self.ledger.available_bytes,
            f"{what} {wish.model}",
            RUNGS,
            wish.model,
            tenant.policy.priority + int((now - since) / self.times.turn_s),
            wish.total_bytes,
            # Who is to go finishes first: whoever is stalled makes room for it.
            since if tenant.state != "leaving" else -1.0,
            wish.resuming,
        )

    def _reach(self, need: Need, wish: Wanted, scene: Scene) -> tuple[Name, ...]:
        """Return how far up the ladder a wish may go now."""
        if scene.now - (wish.since or 0.0) < self.times.settle_s:
            return FREE
        is_last = self.tenants[wish.model].state == "leaving"
        if self.ledger.first == wish.model or is_last:
            return LAST if scene.now - (wish.since or 0.0) >= self.times.turn_s else RUNGS
        within = need.nbytes <= self._coming(need.wisher) + within_reach(need, scene)
        return RUNGS if within else FREE

    def _pressed(self, now: float) -> Iterator[Need]:
        """Yield what the system's pressure asks for, once in a while."""
        gauge, budget = self.gauge, self.ledger.budget_bytes
        wait = self.relieved_at is not None and now - self.relieved_at < gauge.marks.cool_s
        if gauge.pressure == "normal" or wait:
            return
        self.relieved_at = now
        reason = f"the system's memory pressure is {gauge.pressure}"
        offers = [it.offer for it in self.tenants.values()]
        free = sum(it.spare + it.prefixes for it in offers)
        used = max(self._measured, self.ledger.granted_bytes - free)
        yield Need(free, reason, FREE)
        above = used - int(gauge.marks.low * budget)
        if gauge.pressure == "critical":
            yield Need(max(above, used // 10), reason)
        elif above > 0:
            yield Need(above, reason, ALL_BUT_PARK)

    def _foreseen(self) -> Iterator[Need]:
        """Yield what the marks ask for: only what costs nobody anything."""
        gauge, budget = self.gauge, self.ledger.budget_bytes
        over = self._measured - int(gauge.marks.low * budget)
        if gauge.tight and over > 0:
            yield Need(over, gauge.reason, FREE)

    def _coming(self, wisher: str | None = None) -> int:
        """Return what is on its way back; for who is to go itself, from others."""
        grants = self.ledger.grants
        opened = sum(it.open.wanted_bytes for it in self.tenants.values() if it.open is not None)
        leaving = [
            name for name, it in self.tenants.items() if it.state == "leaving" and name != wisher
        ]
        return opened + sum(grants.get(name, 0) for name in leaving)

    def _free(self, need: Need, scene: Scene) -> list[Command]:
        """Take what is lacking from the cheapest rung that has something."""
        lacking = need.nbytes - self._coming(need.wisher)
        if lacking <= 0:
            return []
        for rung in need.reach:
            found = steps(rung, need, scene)
            ready = [it for it in found if self._can(it)]
            if ready:
                return self._take_steps(ready, lacking, need, scene.now)
            if any(self.tenants[it.model].open for it in found) or self._gives(rung):
                return []  # a cheaper one is on its way: see first what comes of it
        return []

    def _can(self, step: Step) -> bool:
        tenant = self.tenants[step.model]
        return tenant.open is None and step.rung not in tenant.barren

    def _gives(self, rung: str) -> bool:
        opened = [it.open for it in self.tenants.values()]
        return any(it is not None and it.rung == rung for it in opened)

    def _take_steps(self, ready: list[Step], lacking: int, need: Need, now: float) -> list[Command]:
        commands: list[Command] = []
        for step in ready:
            if lacking <= 0:
                break
            tenant, rung = self.tenants[step.model], reclaimed_by(step.rung)
            if rung is None:
                requeue = step.rung == "stalled"
                commands += self._evict(tenant, need.reason, need.wisher, requeue=requeue)
                lacking -= step.nbytes
                continue
            grain = self.ledger.budget_bytes // GRAIN
            wanted = min(step.nbytes, max(lacking, grain))
            tenant.open = Open(self.seq + 1, rung, wanted, step.level, now + self.times.reclaim_s)
            commands += self._reclaim(tenant, tenant.open, need)
            lacking -= wanted
        return commands

    def _reclaim(self, tenant: Tenant, it: Open, need: Need) -> list[Command]:
        self.seq = it.seq
        numbers = {"wanted_bytes": it.wanted_bytes, "lacking_bytes": need.nbytes}
        if it.rung == "level":
            tenant.level = max(tenant.level, it.level)
            numbers["level"] = it.level
        note = self._note(f"reclaim_{it.rung}", tenant.name, need.reason, numbers, need.wisher)
        return [note, Reclaim(tenant.name, it.seq, it.rung, it.wanted_bytes, it.level)]

    def _evict(
        self, tenant: Tenant, reason: str, wisher: str | None = None, *, requeue: bool = False
    ) -> list[Command]:
        tenant.state, tenant.evicting = "leaving", not requeue
        wish = self.ledger.refused.get(tenant.name)
        tenant.load_since = wish.since if wish is not None else None  # it comes back for this
        nbytes = self.ledger.grants.get(tenant.name, 0)
        kind = "requeue" if requeue else "evict"
        note = self._note(kind, tenant.name, reason, {"freed_bytes": nbytes}, wisher)
        return [note, Evict(tenant.name, requeue)]

    # -- 6. turns ---------------------------------------------------------------------------------

    def _turn(self, now: float, *, idle: bool) -> list[Command]:
        """Hold those in use for the first wish, if nothing else helps it; let them go after it."""
        ledger = self.ledger
        if ledger.first != self.held_for:
            return self._let_go()
        return self._hold(now) if idle and ledger.first is not None else []

    def _hold(self, now: float) -> list[Command]:
        ledger = self.ledger
        wish = ledger.refused[ledger.first or ""]
        if now - (wish.since or 0.0) < self.times.turn_s:
            return []
        lacking = ledger.growth(wish) - ledger.available_bytes - self._coming()
        lacking -= sum(self._yields(it) for it in self.tenants.values() if it.held)
        commands: list[Command] = []
        for tenant in self._to_hold(wish.model, now):
            if lacking <= 0:
                break
            lacking -= self._yields(tenant)
            tenant.held = True
            reason = f"{wish.model} waits for what it holds; what it has runs to its end"
            commands += [
                self._note("hold", tenant.name, reason, wisher=wish.model),
                Hold(tenant.name, held=True),
            ]
        return commands

    def _to_hold(self, wisher: str, now: float) -> list[Tenant]:
        busy = [
            it
            for name, it in self.tenants.items()
            if name != wisher and it.state == "ready" and not it.is_idle and not it.held
        ]
        return sorted(busy, key=lambda it: it.worth(self.ledger.grants.get(it.name, 0), now))

    def _yields(self, tenant: Tenant) -> int:
        """Return what a model that was held will have given when it is idle."""
        granted = self.ledger.grants.get(tenant.name, 0)
        return granted - (self._base(tenant) if tenant.policy.pinned else 0)

    def _let_go(self) -> list[Command]:
        self.held_for = self.ledger.first
        commands: list[Command] = []
        for tenant in self.tenants.values():
            if tenant.held:
                tenant.held = False
                note = self._note("let_go", tenant.name, "who waited has what it needs")
                commands += [note, Hold(tenant.name, held=False)]
        return commands

    # -- notes and the clock ----------------------------------------------------------------------

    def _note(
        self,
        kind: str,
        model: str,
        reason: str,
        numbers: dict[str, int] | None = None,
        wisher: str | None = None,
    ) -> Noted:
        ledger = self.ledger
        grants = {"granted_bytes": ledger.granted_bytes, "budget_bytes": ledger.budget_bytes}
        return Noted(kind, model, reason, {**(numbers or {}), **grants}, wisher)

    def _wind_up(self, now: float) -> None:
        """Say when to look again."""
        tenants = self.tenants.values()
        works = self.gauge.tight or self.ledger.refused or self.ledger.available_bytes < 0
        if works or any(it.open for it in tenants):
            new = any(now - (it.since or 0.0) < self.times.settle_s for it in self.ledger.waiting)
            self.deadline = now + (self.times.settle_s if new else self.times.tick_s)
            return
        ends = [
            it.idle_since + max(GRACE_S, it.policy.idle_ttl_s)
            for it in tenants
            if it.is_idle and not it.policy.pinned
            if it.policy.idle_ttl_s is not None and it.idle_since is not None
        ]
        self.deadline = min(ends, default=None)
