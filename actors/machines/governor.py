"""Who may hold how much of the one memory budget. Pure.

Grants come before growth: a worker asks before it grows, and the sum of all grants never exceeds
the budget. A grant ends with the exit of the process (`Released`), or when its worker itself asks
for less. A wish that was refused is remembered, and granted when others give back enough.
Does not know who is asked to give something back: there is no ladder here yet.
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


Command = Answer


class Governor(msgspec.Struct):
    """The ledger of one budget."""

    budget_bytes: int
    grants: dict[str, int] = msgspec.field(default_factory=dict)
    refused: dict[str, Wanted] = msgspec.field(default_factory=dict)
    """The last wish of each model that waits, the oldest first."""

    def handle(self, event: Event, now: float) -> list[Command]:  # noqa: ARG002 - a machine's form
        """Take an event and return the answers."""
        match event:
            case Wanted():
                return self._want(event)
            case Released(model=model):
                self.grants.pop(model, None)
                self.refused.pop(model, None)
                return self._retry()

    @property
    def granted_bytes(self) -> int:
        """The sum of all grants."""
        return sum(self.grants.values())

    @property
    def available_bytes(self) -> int:
        """What is left of the budget."""
        return self.budget_bytes - self.granted_bytes

    def check(self) -> None:
        """Check the invariants."""
        assert 0 <= self.granted_bytes <= self.budget_bytes, "more granted than there is"
        assert all(total >= 0 for total in self.grants.values()), "a negative grant"
        assert not any(self._fits(wish) for wish in self.refused.values()), "a wish was forgotten"

    def _want(self, wish: Wanted) -> list[Command]:
        held = self.grants.get(wish.model, 0)
        self.refused.pop(wish.model, None)  # a newer wish replaces it
        if not self._fits(wish):
            self.refused[wish.model] = wish
            return [self._answer(wish, held, granted=False)]
        self.grants[wish.model] = wish.total_bytes
        answer = self._answer(wish, wish.total_bytes, granted=True)
        return [answer, *(self._retry() if wish.total_bytes < held else [])]

    def _fits(self, wish: Wanted) -> bool:
        grown = wish.total_bytes - self.grants.get(wish.model, 0)
        return wish.total_bytes >= 0 and grown <= self.available_bytes

    def _retry(self) -> list[Command]:
        """Grant what was refused and fits now, the oldest first; a small one may overtake."""
        answers: list[Command] = []
        for wish in list(self.refused.values()):
            if self._fits(wish):
                del self.refused[wish.model]
                self.grants[wish.model] = wish.total_bytes
                answers.append(self._answer(wish, wish.total_bytes, granted=True))
        return answers

    def _answer(self, wish: Wanted, total: int, *, granted: bool) -> Answer:
        return Answer(wish.model, wish.seq, total, granted, self.available_bytes)
