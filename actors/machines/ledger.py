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


class MemoryRequest(_Tagged, frozen=True):
    """A worker wants to hold so much in all."""

    model: str
    seq: int
    total_bytes: int
    resuming: bool = False
    """For a row that was parked."""
    since: float | None = None
    """It has waited so long already, under another number; absent: it is new."""


class WorkerExited(_Tagged, frozen=True):
    """The worker's process is gone."""

    model: str


Event = MemoryRequest | WorkerExited


class GrantDecision(_Tagged, frozen=True):
    """Tell the worker what it may hold."""

    model: str
    seq: int
    total_bytes: int
    granted: bool
    available_bytes: int
    reason: str = ""
    """Why a load is refused: who holds the rest."""


Command = GrantDecision


class Ledger(msgspec.Struct):
    """The ledger of one budget."""

    budget_bytes: int
    grants: dict[str, int] = msgspec.field(default_factory=dict)
    waiting: dict[str, MemoryRequest] = msgspec.field(default_factory=dict)
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
            case MemoryRequest():
                answers = self._want(event, now)
            case WorkerExited(model=model):
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
    def queue(self) -> list[MemoryRequest]:
        """Wishes that wait, the oldest first."""
        return sorted(
            self.waiting.values(), key=lambda request: (request.since or 0.0, request.model)
        )

    def growth(self, request: MemoryRequest) -> int:
        """Return how much more than now a wish is."""
        return request.total_bytes - self.grants.get(request.model, 0)

    def set_budget(self, total_bytes: int) -> list[Command]:
        """Change the budget; return what can be granted now."""
        self.budget_bytes = total_bytes
        self.ceiling_bytes = max(total_bytes, self.granted_bytes)
        return self.retry()

    def withdraw(self, model: str) -> None:
        """Forget a wish that waits."""
        self.waiting.pop(model, None)
        if self.first == model:
            self.first = None

    def check(self) -> None:
        """Check the invariants."""
        most = max(self.budget_bytes, self.ceiling_bytes)
        assert 0 <= self.granted_bytes <= most, "more granted than there is"
        assert all(total >= 0 for total in self.grants.values()), "a negative grant"
        assert not any(self._fits(request) for request in self.waiting.values()), (
            "a wish was forgotten"
        )
        assert self.first is None or self.first in self.waiting, "memory is kept for nobody"

    def retry(self) -> list[Command]:
        """Grant what was refused and fits now, the oldest first; a small one may overtake."""
        answers: list[Command] = []
        for request in self.queue:
            if self._fits(request):
                self.withdraw(request.model)
                self.grants[request.model] = request.total_bytes
                answers.append(self._answer(request, request.total_bytes, granted=True))
        # Who is no longer kept back by the first one may have stood before it.
        return answers + self.retry() if answers else answers

    def _want(self, request: MemoryRequest, now: float) -> list[Command]:
        held = self.grants.get(request.model, 0)
        before = self.waiting.pop(request.model, None)  # a newer wish replaces it
        if not self._fits(request):
            known = [it.since for it in (before, request) if it and it.since is not None]
            since = min(known, default=now)
            again = MemoryRequest(
                request.model, request.seq, request.total_bytes, request.resuming, since
            )
            self.waiting[request.model] = again
            return [self._answer(request, held, granted=False)]
        if self.first == request.model:
            self.first = None
        self.grants[request.model] = request.total_bytes
        answer = self._answer(request, request.total_bytes, granted=True)
        return [answer, *self.retry()]

    def _fits(self, request: MemoryRequest) -> bool:
        grown = self.growth(request)
        if request.total_bytes < 0:
            return False
        kept_back = self.first not in {None, request.model} and request.model not in self.exempt
        return grown <= 0 or (not kept_back and grown <= self.available_bytes)

    def _answer(self, request: MemoryRequest, total: int, *, granted: bool) -> GrantDecision:
        return GrantDecision(
            request.model, request.seq, total, granted, max(0, self.available_bytes)
        )
