"""Which worker computes now: time slices on one accelerator, by weight. Pure.

Processes that compute at the same time share an accelerator badly. Each launch waits for everything
that other processes have launched before, so a decode step waits for whole chunks of another
model's prompt. Therefore one worker computes at a time, for a slice, then the next. The order is
deficit round robin over the time that each worker really used. A step cannot be interrupted, so a
slice is overrun by up to one step. A worker that overran waits until the others had the same time.

Time slices are in force only where they help. A worker that is the only one with work computes
without them. So do several workers of equal weight whose steps together are shorter than a slice,
once they have measured their steps in time slices. Waiting for one step of every worker is then
shorter than waiting for a slice, and the accelerator has fewer gaps.

Only workers that have work get time slices. A worker that does not report the end of its slice in
time loses the slice, and gets none until it reports.
"""

from __future__ import annotations

import math

import msgspec

from actors.machines.machine import ModelRecord, Record
from protocol.time_slices import LONG_STEP_S

SLICE_S = LONG_STEP_S
"""A slice at weight 1: long compared to the cost of a switch, too short for a reader to notice."""
MIN_SHARE = 0.2
"""Smallest part of a slice that is given. A worker with less credit keeps it for the next round."""
GRACE_S = 1.0
"""Seconds by which a slice may be overrun: the chunk of a long prompt takes that long."""
MAX_DEBT_S = 5.0
"""Limit of the debt from an overrun: a process that was stopped for an hour owes no hour."""


class TimeSliceRequested(Record, frozen=True):
    """A worker has work, or its kind of work changed. An unlimited worker has already begun."""

    model: str
    weight: float = 1.0
    step_s: float | None = None
    """Seconds of one step while no other worker computes; None: not measured."""


class TimeSliceEnded(Record, frozen=True):
    """A worker's slice is over. ``more``: it requests another."""

    model: str
    seq: int
    used_s: float
    more: bool
    step_s: float | None = None
    left_s: float = 0.0
    """Expected seconds of one more step, which the worker has begun and the next one waits for."""


class WeightChanged(Record, frozen=True):
    """The weight of a model changed. The model need not have work."""

    model: str
    weight: float


class WorkerExited(ModelRecord, frozen=True):
    """The worker's process is gone."""


class AlarmFired(Record, frozen=True):
    """`TimeSlices.deadline` may have passed."""


Event = TimeSliceRequested | TimeSliceEnded | WeightChanged | WorkerExited | AlarmFired


class GiveTimeSlice(Record, frozen=True):
    """Let the worker compute for ``slice_s`` seconds. None: without limit; 0: wait for a slice."""

    model: str
    seq: int
    slice_s: float | None


Command = GiveTimeSlice


class Member(msgspec.Struct):
    """A worker that has work."""

    weight: float
    credit_s: float = 0.0
    """Seconds that it may use; negative after an overrun."""
    silent: bool = False
    """Whether it lost a slice and has reported nothing since."""
    step_s: float | None = None
    """Seconds of one step while no other worker computes; None: not measured. While time slices are
    in force, a shorter value takes effect only at the end of the next slice."""
    unlimited: bool | None = None
    """Whether its last command has no time limit; None: no command yet."""


class Holder(msgspec.Struct, frozen=True):
    """The worker whose slice runs."""

    model: str
    seq: int
    deadline: float


class Debt(msgspec.Struct, frozen=True):
    """Seconds that a worker owed when it ran out of work."""

    seconds: float
    since: float


class TimeSlices(msgspec.Struct):
    """Deficit round robin over the workers that have work."""

    slice_s: float = SLICE_S
    members: dict[str, Member] = msgspec.field(default_factory=dict)
    """Workers that have work, in the order of their next slices."""
    holder: Holder | None = None
    debts: dict[str, Debt] = msgspec.field(default_factory=dict)
    seq: int = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        last_step_s = 0.0
        match event:
            case TimeSliceRequested():
                self._requested(event, now)
            case TimeSliceEnded():
                last_step_s = self._ended(event, now)
            case WeightChanged(model=model) if model in self.members:
                member = self.members[model]
                member.weight = event.weight
                member.credit_s = min(member.credit_s, self._quantum(member))
            case WorkerExited(model=model):
                self._remove(model)
                self.debts.pop(model, None)
            case AlarmFired() if self.holder is not None and now >= self.holder.deadline:
                self.members[self.holder.model].silent = True
                self.holder = None
        return self._assign(now, last_step_s)

    @property
    def deadline(self) -> float | None:
        return self.holder.deadline if self.holder is not None else None

    def check(self) -> None:
        able = self._able
        if self._is_shared:
            assert self.holder is None, "a slice although all compute"
            assert all(member.unlimited for member in able.values()), (
                "a worker waits although all compute"
            )
        else:
            assert self.holder is not None, "no worker computes"
            assert self.holder.model in able, "the holder is silent or has no work"
            limited = all(member.unlimited is False for member in able.values())
            assert limited, "an unlimited worker while slices are in force"
        assert not self.debts.keys() & self.members.keys(), "a debt of a member"
        assert all(debt.seconds > 0 for debt in self.debts.values()), "an empty debt"
        for member in self.members.values():
            limit = (1 + MIN_SHARE) * self._quantum(member) + self.slice_s
            assert -MAX_DEBT_S <= member.credit_s <= limit + 1e-9, "credit out of bounds"

    # -- members ----------------------------------------------------------------------------------

    @property
    def _able(self) -> dict[str, Member]:
        return {name: member for name, member in self.members.items() if not member.silent}

    @property
    def _is_shared(self) -> bool:
        """Whether all workers that have work compute at once."""
        able = self._able.values()
        if len(able) < 2:
            return True
        if len({member.weight for member in able}) > 1:
            return False
        steps = [math.inf if member.step_s is None else member.step_s for member in able]
        return sum(steps) <= self.slice_s

    def _quantum(self, member: Member) -> float:
        return self.slice_s * member.weight

    def _requested(self, event: TimeSliceRequested, now: float) -> None:
        debt = self.debts.pop(event.model, None)
        member = self.members.setdefault(event.model, Member(event.weight))
        member.silent = False
        known_s = member.step_s
        longer = known_s is not None and (event.step_s is None or event.step_s > known_s)
        # A shorter step time counts from the end of the slice, after its long steps were charged.
        if member.unlimited is not False or longer:
            member.step_s = event.step_s
        if debt is not None:  # the time without work has paid a part
            member.credit_s = min(0.0, now - debt.since - debt.seconds)

    def _ended(self, event: TimeSliceEnded, now: float) -> float:
        """Charge a slice; return the seconds that the next worker waits for the last step."""
        member = self.members.get(event.model)
        if member is None:
            return 0.0
        member.silent = False
        member.step_s = event.step_s
        if not member.unlimited:
            member.credit_s = max(-MAX_DEBT_S, member.credit_s - event.used_s)
        holder = self.holder
        if not event.more:
            self._remove(event.model)
            if member.credit_s < 0:
                self.debts[event.model] = Debt(-member.credit_s, now)
        elif holder is not None and (holder.model, holder.seq) == (event.model, event.seq):
            self.holder = None
            return min(event.left_s, self.slice_s)
        return 0.0

    def _remove(self, model: str) -> None:
        self.members.pop(model, None)
        if self.holder is not None and self.holder.model == model:
            self.holder = None

    # -- assigning slices -------------------------------------------------------------------------

    def _assign(self, now: float, last_step_s: float) -> list[Command]:
        """Let all workers compute, or make them wait and give one of them a slice.

        ``last_step_s``: seconds that a new holder waits for the previous one's last step. They are
        added to its slice.
        """
        able = self._able
        if self._is_shared:
            self.holder = None
            limited = {name: it for name, it in able.items() if not it.unlimited}
            for member in limited.values():
                member.credit_s = 0.0
            return [self._give(name, None) for name in limited]
        # When slices begin, one of the workers that compute goes on and gets the first slice.
        first = next((name for name, it in able.items() if it.unlimited), None)
        commands = [
            self._give(name, 0.0)
            for name, it in able.items()
            if it.unlimited is not False and name != first
        ]
        if first is not None:
            member = self.members.pop(first)
            member.unlimited, member.credit_s = False, self._quantum(member)
            self.members[first] = member  # to the end of the order
        if self.holder is None:
            holder = first or self._next()
            member = self.members[holder]
            member.credit_s += last_step_s
            commands.append(self._give(holder, member.credit_s))
            self.holder = Holder(holder, self.seq, now + member.credit_s + GRACE_S)
        return commands

    def _give(self, model: str, slice_s: float | None) -> GiveTimeSlice:
        self.seq += 1
        self.members[model].unlimited = slice_s is None
        return GiveTimeSlice(model, self.seq, slice_s)

    def _next(self) -> str:
        """Go through the order, each worker earning its quantum, until one has enough for a slice.

        Whole rounds in which no worker gets enough are computed at once.
        """
        able = self._able
        missing_rounds = (
            (MIN_SHARE * self._quantum(member) - member.credit_s) / self._quantum(member)
            for member in able.values()
        )
        skipped = max(1, math.ceil(min(missing_rounds))) - 1
        for member in able.values():
            self._earn(member, skipped)
        while True:
            for name, member in able.items():
                self._earn(member, 1)
                self.members[name] = self.members.pop(name)  # to the end of the order
                if member.credit_s >= MIN_SHARE * self._quantum(member):
                    return name

    def _earn(self, member: Member, rounds: int) -> None:
        quantum = self._quantum(member)
        member.credit_s = min(member.credit_s + rounds * quantum, (1 + MIN_SHARE) * quantum)
