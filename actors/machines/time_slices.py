"""Who computes now: turns on the one accelerator, by weight. Pure.

Two processes that compute at once share an accelerator badly: what one launches stands behind all
that the other has launched, so that a decode step waits for whole chunks of a stranger's prompt.
So one worker computes at a time, for a slice, and then the next. Deficit round robin over the time
that each really used: a step cannot be cut, so a turn is overrun by up to a step, and who overran
waits for as long as that takes the others.

Only where that is worth it: a worker that has work alone computes without turns, and so do several
of one weight whose steps together are shorter than a slice, as they say once they have measured
them in turns. Waiting for one step of everybody is then less than waiting for a slice, and what a
step leaves of the accelerator is used.

Work conserving: only workers that have work get turns. A holder that is silent for too long loses
its turn and gets no other until it speaks.
Does not know what is computed, nor whether a machine needs turns (`kvd.worker.process.time_slice_gate`).
"""

from __future__ import annotations

import math

import msgspec

from protocol.worker import LONG_STEP_S

SLICE_S = LONG_STEP_S
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
    """A worker has work from now on, or of another kind. If it was free last it has begun already.

    ``step_s``: what its steps take alone; None: not known.
    """

    model: str
    weight: float = 1.0
    step_s: float | None = None


class Over(_Tagged, frozen=True):
    """A worker's turn is over; `more`: it wants another.

    ``left_s``: it has begun a last step that probably takes so long, for which the next one waits.
    """

    model: str
    seq: int
    used_s: float
    more: bool
    step_s: float | None = None
    left_s: float = 0.0


class Weighed(_Tagged, frozen=True):
    """A model has another weight from now on, whether it computes or not."""

    model: str
    weight: float


class Gone(_Tagged, frozen=True):
    """The worker's process is gone."""

    model: str


class Tick(_Tagged, frozen=True):
    """Time has passed."""


Event = Wanted | Over | Weighed | Gone | Tick


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
    step_s: float | None = None
    """In turns, shorter ones count from the end of its next."""
    free: bool | None = None
    """Whether it was told to compute as it likes, or to do so in its turn; None: nothing yet."""


class Holder(msgspec.Struct, frozen=True):
    """Whose turn it is."""

    model: str
    seq: int
    deadline: float
    """When it is lost."""


class Debt(msgspec.Struct, frozen=True):
    """What a worker owed when it had no more work."""

    seconds: float
    since: float


class TimeSlices(msgspec.Struct):
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
        waits = 0.0
        match event:
            case Wanted():
                self._want(event, now)
            case Over():
                waits = self._over(event, now)
            case Weighed():
                self._weigh(event)
            case Gone(model=model):
                self._leave(model)
                self.debts.pop(model, None)
            case Tick():
                self._lapse(now)
        return self._settle(now, waits)

    @property
    def deadline(self) -> float | None:
        """When the next `Tick` is due."""
        return self.holder.deadline if self.holder is not None else None

    def check(self) -> None:
        """Check the invariants."""
        able = [self.members[name] for name in self._able]
        if self._is_shared:
            assert self.holder is None, "a turn where none is needed"
            assert all(member.free for member in able), "one waits for a turn that never comes"
        else:
            assert self.holder is not None, "nobody computes"
            assert self.holder.model in self._able, "the turn of one who is silent, or has no work"
            assert all(member.free is False for member in able), "one does as it likes"
        assert not self.debts.keys() & self.members.keys(), "owes twice"
        assert all(debt.seconds > 0 for debt in self.debts.values()), "owes nothing"
        for member in self.members.values():
            most = (1 + SHORTEST) * self._quantum(member) + self.slice_s
            assert -MOST_DEBT_S <= member.credit_s <= most + 1e-9, "credit out of bounds"

    # -- who wants --------------------------------------------------------------------------------

    @property
    def _able(self) -> list[str]:
        return [name for name, member in self.members.items() if not member.silent]

    @property
    def _is_shared(self) -> bool:
        """Whether those who have work compute at once."""
        able = [self.members[name] for name in self._able]
        if len(able) < 2:
            return True
        if len({member.weight for member in able}) > 1:
            return False
        steps = [math.inf if member.step_s is None else member.step_s for member in able]
        return sum(steps) <= self.slice_s

    def _quantum(self, member: Member) -> float:
        return self.slice_s * member.weight

    def _want(self, event: Wanted, now: float) -> None:
        debt = self.debts.pop(event.model, None)
        member = self.members.setdefault(event.model, Member(event.weight))
        member.silent = False
        if member.free is not False or _is_longer(event.step_s, member.step_s):
            member.step_s = event.step_s  # else it owes for the long ones, and says so when it ends
        if debt is not None:  # the time without work has paid for some of it
            member.credit_s = min(0.0, now - debt.since - debt.seconds)

    def _weigh(self, event: Weighed) -> None:
        member = self.members.get(event.model)
        if member is not None:
            member.weight = event.weight
            member.credit_s = min(member.credit_s, self._quantum(member))

    def _over(self, event: Over, now: float) -> float:
        """Return what the next one has to wait for."""
        member = self.members.get(event.model)
        if member is None:
            return 0.0
        member.silent = False
        member.step_s = event.step_s
        if not member.free:
            member.credit_s = max(-MOST_DEBT_S, member.credit_s - event.used_s)
        holder = self.holder
        if not event.more:
            self._leave(event.model)
            if member.credit_s < 0:
                self.debts[event.model] = Debt(-member.credit_s, now)
        elif holder is not None and (holder.model, holder.seq) == (event.model, event.seq):
            self.holder = None
            return min(event.left_s, self.slice_s)
        return 0.0

    def _leave(self, model: str) -> None:
        self.members.pop(model, None)
        if self.holder is not None and self.holder.model == model:
            self.holder = None

    def _lapse(self, now: float) -> None:
        if self.holder is not None and now >= self.holder.deadline:
            self.members[self.holder.model].silent = True
            self.holder = None

    # -- whose turn it is -------------------------------------------------------------------------

    def _settle(self, now: float, waits: float) -> list[Command]:
        """Let all compute, or tell who has no turn to wait, and give the turn if nobody has it.

        ``waits``: how long the one who gets it waits for the one before; it does not pay for that.
        """
        able = self._able
        if self._is_shared:
            self.holder = None
            return [self._release(name) for name in able if not self.members[name].free]
        going_on = next((name for name in able if self.members[name].free), None)
        told = [
            self._stop(name)
            for name in able
            if self.members[name].free is not False and name != going_on
        ]
        if going_on is not None:
            member = self.members.pop(going_on)
            member.free, member.credit_s = False, self._quantum(member)
            self.members[going_on] = member  # behind the others
        if self.holder is None:
            holder = going_on or self._next()
            self.members[holder].credit_s += waits
            told.append(self._begin(holder, now))
        return told

    def _release(self, model: str) -> Command:
        """Let one compute as it likes; it owes nobody anything."""
        self.members[model].free, self.members[model].credit_s = True, 0.0
        return self._give(model, None)

    def _stop(self, model: str) -> Command:
        self.members[model].free = False
        return self._give(model, 0.0)  # it computes already, if it was free

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


def _is_longer(step_s: float | None, known_s: float | None) -> bool:
    """Return whether steps take longer than was known; ones that nobody knows are the longest."""
    return known_s is not None and (step_s is None or step_s > known_s)
