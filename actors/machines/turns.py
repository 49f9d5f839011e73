"""Who computes now: turns on the one accelerator, by weight. Pure.

Two processes that compute at once share an accelerator badly: what one launches stands behind all
that the other has launched, so that a decode step waits for whole chunks of a stranger's prompt.
So one worker computes at a time, for a slice, and then the next. Deficit round robin over the time
that each really used: a step cannot be cut, so a turn is overrun by up to a step, and who overran
waits for as long as that takes the others.

Work conserving: only workers that have work get turns, and while there is one of them it computes
without any. A holder that is silent for too long loses its turn and gets no other until it speaks.
Does not know what is computed, nor whether a machine needs turns (`kvd.worker.gate`).
"""

from __future__ import annotations

import math

import msgspec

SLICE_S = 0.05
"""A turn at weight 1: long beside what passing it on costs, short beside what a reader notices."""
SHORTEST = 0.2
"""Of a slice: less credit than this is kept for the next round."""
GRACE_S = 1.0
"""How long a turn may be overrun: the chunk of a long prompt takes that long."""
MOST_DEBT_S = 5.0
"""What an overrun can cost later: a process that was stopped for an hour owes no hour."""


class _Tagged(msgspec.Struct, frozen=True, tag=True):
    pass


class Wanted(_Tagged, frozen=True):
    """A worker has work from now on. If it was alone last time it has begun already."""

    model: str
    weight: float = 1.0


class Over(_Tagged, frozen=True):
    """A worker's turn is over; `more`: it wants another."""

    model: str
    seq: int
    used_s: float
    more: bool


class Gone(_Tagged, frozen=True):
    """The worker's process is gone."""

    model: str


class Tick(_Tagged, frozen=True):
    """Time has passed."""


Event = Wanted | Over | Gone | Tick


class Give(_Tagged, frozen=True):
    """Tell the worker how long it may compute; None: as long as it likes, 0: not before a turn."""

    model: str
    seq: int
    slice_s: float | None


Command = Give


class Member(msgspec.Struct):
    """A worker that has work."""

    weight: float
    credit_s: float = 0.0
    """What it may use; below zero: what it used too much."""
    silent: bool = False
    """It let a turn lapse, and has not spoken since."""


class Holder(msgspec.Struct, frozen=True):
    """Whose turn it is."""

    model: str
    seq: int
    deadline: float | None
    """When it is lost; None: nobody else wants one."""


class Debt(msgspec.Struct, frozen=True):
    """What a worker owed when it had no more work."""

    seconds: float
    since: float


class Turns(msgspec.Struct):
    """The ring of those who want to compute."""

    slice_s: float = SLICE_S
    members: dict[str, Member] = msgspec.field(default_factory=dict)
    """Who has work, in the order of the next turns."""
    holder: Holder | None = None
    debts: dict[str, Debt] = msgspec.field(default_factory=dict)
    """Of those who have no work now."""
    seq: int = 0
    """Of the newest turn."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event and return who is to be told what."""
        match event:
            case Wanted():
                waits = self._want(event, now)
            case Over():
                waits = self._over(event, now)
            case Gone(model=model):
                waits = []
                self._leave(model)
                self.debts.pop(model, None)
            case Tick():
                waits = []
                self._lapse(now)
        return [*waits, *self._settle(now)]

    @property
    def deadline(self) -> float | None:
        """When the next `Tick` is due."""
        return self.holder.deadline if self.holder is not None else None

    def check(self) -> None:
        """Check the invariants."""
        able = self._able
        assert (self.holder is None) == (not able), "nobody computes, or one without work"
        if self.holder is not None:
            assert self.holder.model in able, "the turn of one who does not speak, or has no work"
            alone = self.holder.deadline is None
            assert alone == (len(able) == 1), "turns for one, or none for several"
        assert not self.debts.keys() & self.members.keys(), "owes twice"
        assert all(debt.seconds > 0 for debt in self.debts.values()), "owes nothing"
        for member in self.members.values():
            most = (1 + SHORTEST) * self._quantum(member)
            assert -MOST_DEBT_S <= member.credit_s <= most + 1e-9, "credit out of bounds"

    # -- who wants --------------------------------------------------------------------------------

    @property
    def _able(self) -> list[str]:
        return [name for name, member in self.members.items() if not member.silent]

    def _quantum(self, member: Member) -> float:
        return self.slice_s * member.weight

    def _want(self, event: Wanted, now: float) -> list[Command]:
        debt = self.debts.pop(event.model, None)
        member = self.members.setdefault(event.model, Member(event.weight))
        member.silent = False
        if debt is not None:  # the time without work has paid for some of it
            member.credit_s = min(0.0, now - debt.since - debt.seconds)
        if self.holder is None or self.holder.model == event.model:
            return []
        return [self._give(event.model, 0.0)]  # it computes already, if it was alone last time

    def _over(self, event: Over, now: float) -> list[Command]:
        member = self.members.get(event.model)
        if member is None:
            return []
        member.silent = False
        member.credit_s = max(-MOST_DEBT_S, member.credit_s - event.used_s)
        held = self.holder is not None and self.holder.model == event.model
        if not event.more:
            self._leave(event.model)
            if member.credit_s < 0:
                self.debts[event.model] = Debt(-member.credit_s, now)
        elif held and self.holder is not None and event.seq == self.holder.seq:
            self.holder = None
        return []

    def _leave(self, model: str) -> None:
        self.members.pop(model, None)
        if self.holder is not None and self.holder.model == model:
            self.holder = None

    def _lapse(self, now: float) -> None:
        holder = self.holder
        if holder is not None and holder.deadline is not None and now >= holder.deadline:
            self.members[holder.model].silent = True
            self.holder = None

    # -- whose turn it is -------------------------------------------------------------------------

    def _settle(self, now: float) -> list[Command]:
        """Pass the turn on if nobody has it; bound it if it was without end and others came."""
        able = self._able
        if not able:
            return []
        if len(able) == 1:
            return self._leave_alone(able[0])
        holder = self.holder
        if holder is None:
            return [self._begin(self._next(), now)]
        if holder.deadline is None:
            member = self.members.pop(holder.model)
            member.credit_s = self._quantum(member)
            self.members[holder.model] = member  # behind the others
            return [self._begin(holder.model, now)]
        return []

    def _leave_alone(self, model: str) -> list[Command]:
        """Let the only one compute as it likes; it owes nobody anything."""
        holder = self.holder
        if holder is not None and holder.deadline is None:
            return []
        self.members[model].credit_s = 0.0
        give = self._give(model, None)
        self.holder = Holder(model, give.seq, None)
        return [give]

    def _begin(self, model: str, now: float) -> Command:
        give = self._give(model, self.members[model].credit_s)
        assert give.slice_s is not None, "a turn of several has an end"
        self.holder = Holder(model, give.seq, now + give.slice_s + GRACE_S)
        return give

    def _give(self, model: str, slice_s: float | None) -> Give:
        self.seq += 1
        return Give(model, self.seq, slice_s)

    def _next(self) -> str:
        """Go round the ring, each getting its quantum, until one has enough for a turn.

        Rounds in which nobody has enough are counted and not walked.
        """
        able = [(name, self.members[name]) for name in self._able]
        missing = (
            (SHORTEST * self._quantum(one) - one.credit_s) / self._quantum(one) for _, one in able
        )
        empty = max(1, math.ceil(min(missing))) - 1
        for _, member in able:
            self._earn(member, empty)
        while True:
            for name, member in able:
                self._earn(member, 1)
                self.members[name] = self.members.pop(name)  # behind the others
                if member.credit_s >= SHORTEST * self._quantum(member):
                    return name

    def _earn(self, member: Member, rounds: int) -> None:
        quantum = self._quantum(member)
        member.credit_s = min(member.credit_s + rounds * quantum, (1 + SHORTEST) * quantum)
