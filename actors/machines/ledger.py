"""Who may hold how much of the one memory budget: the ledger. Pure.

Grants come before growth: a worker asks before it grows, and the sum of all grants never exceeds
the budget. A grant ends with the exit of the process (`Released`), or when its worker itself asks
for less. A wish that was refused is remembered, and granted when others give back enough.

Wishes are granted the oldest first, and a small one may overtake a large one: until the ladder
names it `first`. From then on nobody else grows before it. After a budget was lowered the grants
may be above it for a while: then they only fall. Does not know who is asked to give something back
(`actors.machines.governor`).
"""

from __future__ import annotations

import msgspec


class _Tagged(msgspec.Struct, frozen=True, tag=True):
    pass


class Wanted(_Tagged, frozen=True):
    """A worker wants to hold so much in all."""

    model: str
    seq: int
    total_bytes: int
    resuming: bool = False
    """For a row that was parked."""
    since: float | None = None
    """It has waited so long already, under another number; absent: it is new."""


class Released(_Tagged, frozen=True):
    """The worker's process is gone."""

    model: str


Event = Wanted | Released


class Answer(_Tagged, frozen=True):
    """Tell the worker what it may hold."""

    model: str
    seq: int
    total_bytes: int
    granted: bool
    available_bytes: int
    reason: str = ""
    """Why a load is refused: who holds the rest."""


Command = Answer


class Governor(msgspec.Struct):
    """The ledger of one budget."""

    budget_bytes: int
    grants: dict[str, int] = msgspec.field(default_factory=dict)
    refused: dict[str, Wanted] = msgspec.field(default_factory=dict)
    """The last wish of each model that waits, with the time since when."""
    first: str | None = None
    """Nobody else grows before this model's wish is granted."""
    exempt: list[str] = msgspec.field(default_factory=list)
    """But these: they are loading, and to stop half-way would help nobody."""
    excess_bytes: int = 0
    """Taken beyond the grants, as measured: nobody else can have it."""
    ceiling_bytes: int = 0
    """What the grants may sum up to while a lowered budget is worked off."""

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event and return the answers."""
        match event:
            case Wanted():
                answers = self._want(event, now)
            case Released(model=model):
                self.grants.pop(model, None)
                self.withdraw(model)
                answers = self.retry()
        self.ceiling_bytes = max(self.budget_bytes, min(self.ceiling_bytes, self.granted_bytes))
        return answers

    @property
    def granted_bytes(self) -> int:
        """The sum of all grants."""
        return sum(self.grants.values())

    @property
    def available_bytes(self) -> int:
        """What is left of the budget; negative while more is taken than there is."""
        return self.budget_bytes - self.granted_bytes - self.excess_bytes

    @property
    def waiting(self) -> list[Wanted]:
        """Wishes that wait, the oldest first."""
        return sorted(self.refused.values(), key=lambda wish: (wish.since or 0.0, wish.model))

    def growth(self, wish: Wanted) -> int:
        """Return how much more than now a wish is."""
        return wish.total_bytes - self.grants.get(wish.model, 0)

    def set_budget(self, total_bytes: int) -> list[Command]:
        """Change the budget; return what can be granted now."""
        self.budget_bytes = total_bytes
        self.ceiling_bytes = max(total_bytes, self.granted_bytes)
        return self.retry()

    def withdraw(self, model: str) -> None:
        """Forget a wish that waits."""
        self.refused.pop(model, None)
        if self.first == model:
            self.first = None

    def check(self) -> None:
        """Check the invariants."""
        most = max(self.budget_bytes, self.ceiling_bytes)
        assert 0 <= self.granted_bytes <= most, "more granted than there is"
        assert all(total >= 0 for total in self.grants.values()), "a negative grant"
        assert not any(self._fits(wish) for wish in self.refused.values()), "a wish was forgotten"
        assert self.first is None or self.first in self.refused, "memory is kept for nobody"

    def retry(self) -> list[Command]:
        """Grant what was refused and fits now, the oldest first; a small one may overtake."""
        answers: list[Command] = []
        for wish in self.waiting:
            if self._fits(wish):
                self.withdraw(wish.model)
                self.grants[wish.model] = wish.total_bytes
                answers.append(self._answer(wish, wish.total_bytes, granted=True))
        # Who is no longer kept back by the first one may have stood before it.
        return answers + self.retry() if answers else answers

    def _want(self, wish: Wanted, now: float) -> list[Command]:
        held = self.grants.get(wish.model, 0)
        before = self.refused.pop(wish.model, None)  # a newer wish replaces it
        if not self._fits(wish):
            known = [it.since for it in (before, wish) if it and it.since is not None]
            since = min(known, default=now)
            again = Wanted(wish.model, wish.seq, wish.total_bytes, wish.resuming, since)
            self.refused[wish.model] = again
            return [self._answer(wish, held, granted=False)]
        if self.first == wish.model:
            self.first = None
        self.grants[wish.model] = wish.total_bytes
        answer = self._answer(wish, wish.total_bytes, granted=True)
        return [answer, *self.retry()]

    def _fits(self, wish: Wanted) -> bool:
        grown = self.growth(wish)
        if wish.total_bytes < 0:
            return False
        kept_back = self.first not in {None, wish.model} and wish.model not in self.exempt
        return grown <= 0 or (not kept_back and grown <= self.available_bytes)

    def _answer(self, wish: Wanted, total: int, *, granted: bool) -> Answer:
        return Answer(wish.model, wish.seq, total, granted, max(0, self.available_bytes))
