"""A simulated worker that keeps the governor's contract, without tensors and without a process.

It reserves a part of each row before the row runs, extends that while the row decodes, requests
memory before it grows, gives back what the governor reclaims, preempts rows and resumes them. It
counts bytes and tokens, and has no clock. `tests.sim.day` simulates pages, pools and prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from actors.machines.governor_events import Reclaim
from protocol.types import Reclaimable

MIN_TOKENS = 256
"""Tokens that a row must generate before it can be preempted again."""
MAX_PREFIXES = 120
AHEAD = 512
"""Tokens up to which a reservation is extended, when less than half of them are left."""


@dataclass(frozen=True)
class SimModel:
    """A model; sizes are in MiB."""

    name: str
    base: int
    per_1000: tuple[int, ...]
    """Size of 1000 tokens of a row, by precision level."""
    load_s: float
    tokens_per_s: float
    max_rows: int = 8
    first: int = 20
    """Memory that the load requests in addition to the base."""


@dataclass(eq=False)
class SimRequest:
    """One request and its progress."""

    number: int
    model: SimModel
    prompt: int
    length: int
    arrived: float
    generated: int = 0
    level: int = 0
    since_preempted: int = MIN_TOKENS
    """Tokens generated since the last preemption; updated by the simulation around the worker."""
    preemptions: int = 0
    made_room: int = 0
    """How often it was preempted because an older row of its model grew."""
    ended: str = ""
    started: float | None = None
    position: int = 0
    """Tokens generated until now; updated by the simulation around the worker."""
    reserved_tokens: int = 0
    """Tokens of the answer for which memory is reserved."""
    continued: bool = False
    """Whether it was preempted, or an earlier worker had it."""
    planned_until: int = 0
    """Tokens of the answer until which the simulation has planned events."""
    stalled_at: float | None = None
    """When the reservation was used up, if the row waits for more."""

    def size(self, level: int, tokens: int) -> int:
        """Return the size of a row with so many generated tokens."""
        per_1000 = self.model.per_1000
        return -(-(self.prompt + tokens) * per_1000[min(level, len(per_1000) - 1)] // 1000)

    def worst_case(self, level: int) -> int:
        return self.size(level, self.length)

    def restart(self) -> None:
        """Continue in the next worker, which protects the row as if it had been preempted."""
        self.reserved_tokens, self.position, self.stalled_at = 0, self.generated, None
        if self.started is not None:
            self.continued, self.since_preempted = True, 0

    @property
    def target(self) -> int:
        return min(self.length, self.position + AHEAD)

    @property
    def is_due(self) -> bool:
        """Whether the reservation is to be extended."""
        left = self.reserved_tokens - self.position
        return left <= AHEAD // 2 and self.reserved_tokens < self.length

    def extra(self, level: int) -> int:
        """Return what extending the reservation takes."""
        return self.size(level, self.target) - self.size(level, self.reserved_tokens)

    @property
    def reserved(self) -> int:
        return self.size(self.level, self.reserved_tokens)


@dataclass
class SimWorker:
    """One process of one model."""

    model: SimModel
    send: Callable[[str, dict[str, object]], None]
    """Takes ``requested`` and ``reclaimed`` reports, in order. The caller delivers them later."""
    grant: int = 0
    seq: int = 0
    open_total: int | None = None
    denied: int | None = None
    """Total of the last memory request if it was denied; the ledger remembers it."""
    budget: int = 0
    running: list[SimRequest] = field(default_factory=list)
    queue: list[SimRequest] = field(default_factory=list)
    prefixes: int = 0
    level: int = 0
    preempted: set[int] = field(default_factory=set)

    @property
    def held(self) -> int:
        return self.model.base + self.prefixes + sum(row.reserved for row in self.running)

    @property
    def spare(self) -> int:
        keep = self.model.base + self.model.first
        return max(0, self.grant - max(self.held, keep))

    @property
    def idle(self) -> bool:
        return not self.running and not self.queue

    def reclaimable(self) -> Reclaimable:
        lowest = len(self.model.per_1000)
        levels, before = [], [row.reserved for row in self.running]
        for level in range(1, lowest):
            after = [row.size(max(row.level, level), row.reserved_tokens) for row in self.running]
            levels.append(sum(before) - sum(after))
            before = after
        return Reclaimable(
            spare=self.spare,
            prefixes=self.prefixes,
            levels=tuple(levels),
            preempt=sum(row.size(lowest - 1, row.reserved_tokens) for row in self._preemptible()),
            rows=len(self.running),
            waiting=len(self.queue),
            level=self.level,
            base=self.model.base + self.model.first,
        )

    # Requests.

    def submit(self, request: SimRequest) -> None:
        self.queue.append(request)

    def admit(self) -> list[SimRequest]:
        """Start queued requests in order and return them. If one lacks memory, request it."""
        started: list[SimRequest] = []
        grown = self._grow()
        while grown and self.queue and len(self.running) < self.model.max_rows:
            head = self.queue[0]
            ahead = sum(row.extra(row.level) for row in self.running)
            level = self._level_of(head)
            needed = ahead + head.size(level, head.target)
            missing = self.held + needed - self.grant
            resuming = head.number in self.preempted
            if missing > 0 and not self._find(missing, needed, resuming=resuming):
                break
            self.queue.pop(0)
            for row in [*self.running, head]:
                row.reserved_tokens = row.target
            head.level = level
            self.preempted.discard(head.number)
            self.running.append(head)
            started.append(head)
        if self.idle:
            self._give_back_idle()
        return started

    def _level_of(self, head: SimRequest) -> int:
        """Return the level at which a row starts: a lower one if it is too large for the budget."""
        level, lowest = self.level, len(self.model.per_1000) - 1
        while level < lowest and 0 < self.budget < self.model.base + head.size(level, head.target):
            level += 1
        return level

    def _grow(self) -> bool:
        """Extend the reservations that are due, the oldest first; return whether all were."""
        for row in sorted(self.running, key=lambda row: row.number):
            if not row.is_due:
                continue
            needed = row.extra(row.level)
            missing = self.held + needed - self.grant
            if missing > 0:
                allowed = row.stalled_at is not None
                if not self._find(missing, needed, resuming=True, drop_prefixes=allowed):
                    return False
            row.reserved_tokens = row.target
        return True

    def make_room(self) -> list[SimRequest]:
        """Preempt rows for the oldest stalled one, the youngest first; return them."""
        stalled = [row for row in self.running if row.stalled_at is not None]
        if not stalled or self.open_total is not None or self._grow():
            return []
        oldest = min(stalled, key=lambda row: row.number)
        if self.open_total is not None:
            return []
        preempted = []
        for row in sorted(self.running, key=lambda row: -row.number):
            if self.held + oldest.extra(oldest.level) <= self.grant:
                break
            self._take_out(row)
            preempted.append(row)
        return preempted

    def hopeless(self) -> SimRequest | None:
        """Return the head of the queue if the whole budget is too small for it."""
        if not self.queue or self.denied is None:
            return None
        head = self.queue[0]
        needed = self.model.base + head.worst_case(len(self.model.per_1000) - 1)
        return head if needed > self.budget and head.started is None else None

    def finish(self, request: SimRequest) -> None:
        self.running.remove(request)
        free = self.grant - self.held
        self.prefixes += max(0, min(free, request.prompt // 100, MAX_PREFIXES - self.prefixes))

    def drop(self, request: SimRequest) -> None:
        self.queue.remove(request)

    def _find(
        self, missing: int, needed: int, *, resuming: bool, drop_prefixes: bool = True
    ) -> bool:
        total = self.grant + missing
        if self.open_total is None and (self.denied is None or total != self.denied):
            self.request(total, resuming=resuming)
        elif self.denied == total and self.prefixes and drop_prefixes:
            self.prefixes -= min(self.prefixes, missing)
            return self.held + needed <= self.grant
        return False

    # Memory.

    def request(self, total: int, *, resuming: bool = False) -> None:
        self.seq += 1
        self.open_total, self.denied = total, None
        self.send("requested", {"seq": self.seq, "total": total, "resuming": resuming})

    def answered(self, seq: int, total: int, budget: int, *, granted: bool) -> None:
        if seq != self.seq:
            return
        self.grant, self.budget = total, budget
        self.denied = None if granted else self.open_total
        self.open_total = None

    def _give_back(self, nbytes: int) -> None:
        given = max(0, min(nbytes, self.grant - self.held))
        if given:
            self.grant -= given
            self.request(self.grant)

    def _give_back_idle(self) -> None:
        keep = self.model.base + self.model.first + self.prefixes
        if self.open_total is None and (self.grant > keep or self.denied is not None):
            self.grant = min(self.grant, keep)
            self.request(self.grant)

    def reclaim(self, reclaim: Reclaim) -> list[SimRequest]:
        """Give memory back; return the preempted rows."""
        preempted: list[SimRequest] = []
        before = self.grant
        match reclaim.method:
            case "spare":
                self._give_back(min(self.spare, reclaim.wanted_bytes))
            case "prefixes":
                dropped = min(self.prefixes, reclaim.wanted_bytes)
                self.prefixes -= dropped
                self._give_back(dropped)
            case "precision":
                self.level = max(self.level, reclaim.level)
                held = self.held
                for row in self.running:
                    row.level = max(row.level, reclaim.level)
                self._give_back(held - self.held)
            case "preempt":
                preempted = self._preempt(reclaim.wanted_bytes)
        freed = before - self.grant
        exhausted = freed < reclaim.wanted_bytes
        self.send("reclaimed", {"seq": reclaim.seq, "freed": freed, "exhausted": exhausted})
        return preempted

    def _preemptible(self) -> list[SimRequest]:
        return [row for row in self.running if row.since_preempted >= MIN_TOKENS]

    def _preempt(self, wanted: int) -> list[SimRequest]:
        preempted: list[SimRequest] = []
        freed = 0
        for row in sorted(self._preemptible(), key=lambda row: -row.number):
            if freed >= wanted:
                break
            freed += row.reserved
            self._take_out(row)
            preempted.append(row)
        self._give_back(freed)
        return preempted

    def _take_out(self, row: SimRequest) -> None:
        self.running.remove(row)
        self.queue.insert(0, row)
        self.preempted.add(row.number)
        row.preemptions += 1
        row.continued, row.since_preempted = True, 0
        row.stalled_at = None
