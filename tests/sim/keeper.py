"""A worker that keeps the governor's contract, without tensors and without a process.

It reserves each row's worst case before it runs, asks before it grows, gives back what it is told
to, parks rows and takes them up again. Counts bytes and tokens, and knows no clock.
Does not cover what the real one does about pages, pools and prompts (`tests.sim.day`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from actors.machines.governor_events import Reclaim
from protocol.types import Reclaimable

AGAIN = 256
"""Tokens that a row makes before it is parked again."""
PREFIX_CAP = 120


@dataclass(frozen=True)
class Kind:
    """A model: sizes in MiB, for 1000 tokens at each level; times in seconds."""

    name: str
    base: int
    per_1000: tuple[int, ...]
    load_s: float
    tokens_per_s: float
    most_rows: int = 8
    first: int = 20
    """What it asks for beside its base when it is loaded."""


@dataclass(eq=False)
class Asked:
    """One request, and what became of it."""

    number: int
    kind: Kind
    prompt: int
    length: int
    arrived: float
    made: int = 0
    level: int = 0
    since_parked: int = AGAIN
    parks: int = 0
    ended: str = ""
    waited_s: float = 0.0
    began: float | None = None

    def size(self, level: int) -> int:
        per_1000 = self.kind.per_1000
        return -(-(self.prompt + self.length) * per_1000[min(level, len(per_1000) - 1)] // 1000)

    @property
    def reserved(self) -> int:
        return self.size(self.level)


@dataclass
class Keeper:
    """One life of one worker. What it wants to say goes to `say`, in order."""

    kind: Kind
    say: Callable[[str, dict[str, object]], None]
    """``wanted``, ``reclaimed``; the caller delivers them a moment later."""
    grant: int = 0
    seq: int = 0
    open_total: int | None = None
    denied: int | None = None
    """The total of a wish that the governor remembers."""
    budget: int = 0
    running: list[Asked] = field(default_factory=list)
    queue: list[Asked] = field(default_factory=list)
    prefixes: int = 0
    level: int = 0
    paused: set[int] = field(default_factory=set)

    @property
    def held(self) -> int:
        return self.kind.base + self.prefixes + sum(row.reserved for row in self.running)

    @property
    def spare(self) -> int:
        keep = self.kind.base + self.kind.first
        return max(0, self.grant - max(self.held, keep))

    @property
    def idle(self) -> bool:
        return not self.running and not self.queue

    def reclaimable(self) -> Reclaimable:
        lowest = len(self.kind.per_1000)
        levels, before = [], [row.reserved for row in self.running]
        for level in range(1, lowest):
            after = [row.size(max(row.level, level)) for row in self.running]
            levels.append(sum(before) - sum(after))
            before = after
        return Reclaimable(
            spare=self.spare,
            prefixes=self.prefixes,
            levels=tuple(levels),
            preempt=sum(row.size(lowest - 1) for row in self._parkable()),
            rows=len(self.running),
            waiting=len(self.queue),
            level=self.level,
            base=self.kind.base + self.kind.first,
        )

    # Requests.

    def submit(self, asked: Asked) -> None:
        self.queue.append(asked)

    def admit(self) -> list[Asked]:
        """Start rows from the head of the queue; ask for what lacks. Return the new ones."""
        started: list[Asked] = []
        while self.queue and len(self.running) < self.kind.most_rows:
            head = self.queue[0]
            size = head.size(self.level)
            lacking = self.held + size - self.grant
            if lacking > 0 and not self._find(lacking):
                break
            self.queue.pop(0)
            head.level = self.level
            self.paused.discard(head.number)
            self.running.append(head)
            started.append(head)
        if self.idle:
            self._rest()
        return started

    def hopeless(self) -> Asked | None:
        """Return the head of the queue, if the whole budget is too small for it."""
        if not self.queue or self.denied is None:
            return None
        head = self.queue[0]
        least = self.kind.base + head.size(len(self.kind.per_1000) - 1)
        return head if least > self.budget and head.began is None else None

    def finish(self, asked: Asked) -> None:
        self.running.remove(asked)
        free = self.grant - self.held
        self.prefixes += max(0, min(free, asked.prompt // 100, PREFIX_CAP - self.prefixes))

    def drop(self, asked: Asked) -> None:
        self.queue.remove(asked)

    def _find(self, lacking: int) -> bool:
        total = self.grant + lacking
        if self.open_total is None and (self.denied is None or total != self.denied):
            self._ask(total, resuming=self.queue[0].number in self.paused)
        elif self.denied == total and self.prefixes:
            self.prefixes -= min(self.prefixes, lacking)
            return self.held + self.queue[0].size(self.level) <= self.grant
        return False

    # Memory.

    def _ask(self, total: int, *, resuming: bool = False) -> None:
        self.seq += 1
        self.open_total, self.denied = total, None
        self.say("wanted", {"seq": self.seq, "total": total, "resuming": resuming})

    def answered(self, seq: int, total: int, budget: int, *, granted: bool) -> None:
        if seq != self.seq:
            return
        self.grant, self.budget = total, budget
        self.denied = None if granted else self.open_total
        self.open_total = None

    def _give(self, nbytes: int) -> int:
        given = max(0, min(nbytes, self.grant - self.held))
        if given:
            self.grant -= given
            self.seq += 1
            self.open_total = self.grant
            self.denied = None
            self.say("wanted", {"seq": self.seq, "total": self.grant, "resuming": False})
        return given

    def _rest(self) -> None:
        keep = self.kind.base + self.kind.first + self.prefixes
        if self.open_total is None and (self.grant > keep or self.denied is not None):
            self.denied = None
            self.grant = min(self.grant, keep)
            self._ask(self.grant)

    def reclaim(self, it: Reclaim) -> list[Asked]:
        """Do as told; return the rows that were parked."""
        paused: list[Asked] = []
        before = self.grant
        match it.method:
            case "spare":
                self._give(min(self.spare, it.wanted_bytes))
            case "prefixes":
                dropped = min(self.prefixes, it.wanted_bytes)
                self.prefixes -= dropped
                self._give(dropped)
            case "precision":
                self.level = max(self.level, it.level)
                free = self.held
                for row in self.running:
                    row.level = max(row.level, it.level)
                self._give(free - self.held)
            case "preempt":
                paused = self._park(it.wanted_bytes)
        freed = before - self.grant
        exhausted = freed < it.wanted_bytes
        self.say("reclaimed", {"seq": it.seq, "freed": freed, "exhausted": exhausted})
        return paused

    def _parkable(self) -> list[Asked]:
        return [row for row in self.running if row.since_parked >= AGAIN]

    def _park(self, wanted: int) -> list[Asked]:
        paused: list[Asked] = []
        freed = 0
        for row in sorted(self._parkable(), key=lambda row: -row.number):
            if freed >= wanted:
                break
            freed += row.reserved
            self.running.remove(row)
            self.queue.insert(0, row)
            self.paused.add(row.number)
            row.parks += 1
            row.since_parked = 0
            paused.append(row)
        self._give(freed)
        return paused
