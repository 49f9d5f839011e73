"""A worker's day without tensors: scheduler, admission and ledger are real, the rest is counted.

The engine is a model of the real one: rows fill pages as they grow, pools grow by slabs and shrink
only when they must, prefixes are cached where there is room. Beside it another model asks for
memory and gives it back; where it is denied, a governor steps rows here down the ladder and parks
them, until pressure is over.
Answers come late, and people cancel. Every rule that is promised is asserted after every step.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from actors.machines.ledger import Ledger, MemoryRequest, WorkerExited
from kvd.worker.cache.scheme import full_pages
from kvd.worker.scheduling.admission import Admission, AdmissionResult, Held
from kvd.worker.scheduling.budget import PageBudget
from kvd.worker.scheduling.scheduler import Chunk, ReservationSizes, Scheduler
from protocol.errors import InsufficientMemory
from protocol.worker import Grant, MemoryRequested

HOUR = 3600.0
BASE, PAGE = 5000, 10
ROW_PAGES, REST, SLAB = 2, 20, 16
CHUNK, BUDGET, ROWS, AGE = 256, 384, 8, 6000


LEVELS = 3


def on(level: int, pages: int) -> int:
    """Pages of a level as pages of the top: three quarters of one, or half."""
    return -(-pages * (4 - level) // 4)


def pages_for(length: int, level: int) -> int:
    """Full attention."""
    return on(level, full_pages(length))


def own_pages(start: int, end: int, level: int = 0) -> int:
    """What a choice fills beyond the shared prompt."""
    return on(level, full_pages(end) - full_pages(start))


@dataclass(eq=False)
class Asked:
    """A request, and what became of it."""

    rid: str
    number: int
    prompt_len: int
    lengths: list[int]
    """Of its choices, in tokens; the longest first."""
    priority: int = 0
    deadline: float | None = None
    prefilled: int = 0
    sent: int = 0
    level: int = 0
    state: str = "waiting"
    began: bool = False
    ends: list[str] = field(default_factory=list)
    passed: list[Asked] = field(default_factory=list)
    """Those that came later and were admitted first."""
    in_front: int = 0
    """Groups led by rows that are not behind it, since it last could be prefilled."""
    behind: int = 0

    @property
    def max_new(self) -> int:
        return self.lengths[0]

    @property
    def work(self) -> int:
        return self.prompt_len + len(self.lengths) * self.max_new

    @property
    def alive(self) -> int:
        """Choices that have not ended."""
        return sum(length > self.sent for length in self.lengths)

    @property
    def pages(self) -> int:
        """What it fills now."""
        own = full_pages(self.prefilled + self.sent) - full_pages(self.prefilled)
        return on(self.level, full_pages(self.prefilled) + self.alive * own)


class Day:
    """One seeded day; `run` it, then look at the counts."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self.asked: dict[str, Asked] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._names = itertools.count()
        self.ledger = Ledger(budget_bytes=BASE + 560 * PAGE)
        self.ledger.handle(MemoryRequest("me", 1, BASE + REST * PAGE), 0.0)
        self.scheduler = Scheduler(
            max_rows=ROWS,
            chunk=CHUNK,
            sizes=ReservationSizes(pages_for, own_pages, LEVELS),
            budget=BUDGET,
            group=True,
            age=AGE,
        )
        self.admission = Admission(
            self.scheduler,
            PageBudget(BASE, PAGE, BASE + REST * PAGE, seq=1),
            row_pages=ROW_PAGES,
            idle_pages=REST,
        )
        self.held = Held()
        self.running: list[Asked] = []
        self.waiting: list[Asked] = []
        """Those that have never been admitted."""

    # The day's events.

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def later(self, mean: float, act: Callable[[], None]) -> None:
        self.at(self.now + self.draw.expovariate(1 / mean), act)

    def run(self) -> None:
        """Live through the day, and on until everyone has been served."""
        self._fill()
        while self._events or self.admission.has_work:
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._expire()
            if self.admission.has_work:
                self._step()
            elif self._events:
                due = self.scheduler.next_deadline
                soon = self._events[0][0]
                self.now = max(self.now, soon if due is None else min(soon, due))
        self._check_the_end()

    def _fill(self) -> None:
        draw = self.draw
        for hour in range(24):
            busy = 120 if 8 <= hour < 20 else 30
            for _ in range(draw.randint(busy // 2, busy)):
                self.at((hour + draw.random()) * HOUR, self._single)
        for _ in range(8):
            self.at(draw.uniform(8, 20) * HOUR, self._burst)
        for _ in range(60):
            self.at(draw.uniform(0, 24) * HOUR, self._other_asks)
            self.at(draw.uniform(0, 24) * HOUR, self._pause_someone)
            self.at(draw.uniform(0, 24) * HOUR, self._park_someone)
        for _ in range(20):
            self.at(draw.uniform(8, 20) * HOUR, self._park_everyone)
        for _ in range(150):
            self.at(draw.uniform(0, 24) * HOUR, self._cancel_someone)

    def _single(self) -> None:
        draw = self.draw
        length = draw.choice([1, 20, 60, 120, 400, 1000, 3000, 6000, 14_000, 40_000, 150_000])
        self._ask(draw.randint(-(-length // 2), length))

    def _burst(self) -> None:
        """32 requests with one system prompt, or as many short questions."""
        length = self.draw.choice([1550, 60])
        for _ in range(32):
            self._ask(length)

    def _ask(self, prompt_len: int) -> None:
        draw = self.draw
        number = len(self.asked)
        choices = draw.choice([1] * 9 + [3])
        asked = Asked(
            rid=f"r{next(self._names)}",
            number=number,
            prompt_len=prompt_len,
            lengths=sorted((draw.randint(1, 120) for _ in range(choices)), reverse=True),
            priority=draw.choice([0, 0, 0, 0, 1, 2, -1]),
            deadline=self.now + draw.uniform(2, 300) if draw.random() < 0.2 else None,
        )
        try:
            self.admission.submit(
                asked.rid,
                prompt_len,
                asked.max_new,
                priority=asked.priority,
                deadline=asked.deadline,
                choices=choices,
            )
        except InsufficientMemory:
            self.counts["refused"] += 1
            return
        self.asked[asked.rid] = asked
        self.waiting.append(asked)

    def _in(self, *states: str) -> list[Asked]:
        return [one for one in self.asked.values() if one.state in states]

    def _cancel_someone(self) -> None:
        if someone := self._in("waiting", "running", "parked"):
            self._end(self.draw.choice(someone), "cancelled")

    def _pause_someone(self) -> None:
        able = [one for one in self.running if not self.scheduler.find(one.rid).suspended]
        if able:
            one = self.draw.choice(able)
            self.scheduler.suspend(one.rid)
            one.in_front = one.behind = 0
            self.counts["paused"] += 1
            self.later(60, lambda: self._resume(one))

    def _resume(self, one: Asked) -> None:
        if one.state == "running" and self.scheduler.find(one.rid).suspended:
            self.scheduler.resume(one.rid)

    def _park_someone(self) -> None:
        if self.running:
            self._park(self.draw.choice(self.running), in_memory=self.draw.random() < 0.5)

    def _park_everyone(self) -> None:
        """In memory, and a new request comes before the first of them is back."""
        for one in list(self.running):
            self._park(one, in_memory=True)
        self._ask(14_000)

    def _park(self, one: Asked, *, in_memory: bool) -> None:
        self.admission.preempt(one.rid, one.pages if in_memory else 0)
        one.state = "parked"
        self.running.remove(one)
        one.in_front = one.behind = 0
        self.counts["parked"] += 1
        self.later(120, lambda: self._unpark(one))

    def _unpark(self, one: Asked) -> None:
        if one.state == "parked":
            self.admission.requeue_preempted(one.rid)
            one.state = "waiting"

    # The daemon.

    def _other_asks(self) -> None:
        total = self.draw.randint(1000, 5000)
        self._answer(MemoryRequest("other", 1, total))
        if "other" in self.ledger.waiting:
            self.later(1, self._make_room)
        self.later(900, lambda: self._answer(WorkerExited("other")))

    def _make_room(self) -> None:
        """The governor: prefixes go first, then precision, then rows, the least valuable first."""
        wish = self.ledger.waiting.get("other")
        if wish is None:
            return
        held = self.ledger.grants.get("other", 0)
        lacking = wish.total_bytes - held - self.ledger.available_bytes
        target = max(0, self.admission.budget.pages - lacking // PAGE - 1)
        self.held = Held(*self._least(0))
        for rid in self.scheduler.victims():
            if self._needed() > target:
                self._lower(self.asked[rid])
        paused = []
        for rid in self.scheduler.victims():
            if self._needed() > target:
                self._park(self.asked[rid], in_memory=False)
                self.held = Held(*self._least(0))
                paused.append(self.asked[rid])
        before = self.admission.budget.granted_bytes
        given, freed = self.admission.give_back(target, self.held)
        assert before - self.admission.budget.granted_bytes == freed >= 0
        self._tell(given)
        for one in paused:
            self._unpark(one)
        self.counts["made room"] += 1

    def _lower(self, one: Asked) -> None:
        lowest = self.scheduler.sizes.lowest_level
        self.admission.set_start_level(lowest)
        self.later(600, lambda: self.admission.set_start_level(0))
        if one.level < lowest:
            before, saved = (
                self.scheduler.reserved_pages,
                self.scheduler.step_down_savings(one.rid, lowest),
            )
            one.level = lowest
            self.admission.step_down(one.rid, lowest)
            assert self.scheduler.reserved_pages == before - saved
            self.held = Held(*self._least(self.held.cached))
            self.counts["lowered"] += 1

    def _needed(self) -> int:
        """Pages that the grant must cover."""
        admission, scheduler = self.admission, self.scheduler
        lacking = admission.missing_pages(
            scheduler.reserved_pages, scheduler.reserved_rows, self.held
        )
        return lacking + admission.budget.pages

    def _tell(self, wish: MemoryRequested | None) -> None:
        if wish is not None:
            self.later(0.5, lambda: self._answer(MemoryRequest("me", wish.seq, wish.total_bytes)))

    def _answer(self, event: MemoryRequest | WorkerExited) -> None:
        for one in self.ledger.handle(event, self.now):
            if one.model == "me":
                self.counts["granted" if one.granted else "denied"] += 1
                grant = Grant(
                    seq=one.seq,
                    total_bytes=one.total_bytes,
                    granted=one.granted,
                    available_bytes=one.available_bytes,
                    budget_bytes=self.ledger.budget_bytes,
                )
                self.later(0.5, lambda grant=grant: self.admission.granted(grant))

    # The engine.

    def _step(self) -> None:
        result = self._admit()
        if result.plan.missing_pages and self._give_up_spare():
            result = self._admit()
        plan = result.plan
        self._check_decode(plan.decode)
        decoded = sum(max(1, self.asked[rid].alive) for rid in plan.decode)
        for rid in plan.decode:
            self._decode(self.asked[rid])
        self._prefill(self._skip(plan.group), decoded)
        if result.refused is not None:
            self._end(self.asked[result.refused[0]], "refused")
        elif result.swap_out_kept:
            self._spill()
        self._grow()
        if self.admission.idle:
            self.held = Held(self.held.cached, 0, self.held.cached)
            self._tell(self.admission.give_back_idle(self.held.cached))
        self.steps += 1
        self.now += 0.3 + 0.004 * sum(chunk.length for chunk in plan.group)
        self._check()

    def _admit(self) -> AdmissionResult:
        result = self.admission.admit(self.held)
        for rid in result.plan.admitted:
            self._admitted(self.asked[rid], restored=rid in result.plan.resumed)
        self._tell(result.memory_request)
        self._grow()
        if result.evict_pages:
            assert result.refused is None
            assert result.memory_request is None
            self.held = Held(*self._least(self.held.cached - result.evict_pages))
            self.counts["evicted"] += 1
        return result

    def _least(self, cached: int) -> tuple[int, int, int]:
        """Pools cut to what may be needed."""
        return self.scheduler.reserved_pages + cached, self.scheduler.reserved_rows, cached

    def _give_up_spare(self) -> bool:
        held = self.held
        self.held = Held(*self._least(held.cached))
        return held.pages > self.held.pages

    def _grow(self) -> None:
        """Rows, parked ones and prefixes fill pages; pools grow by slabs as far as they may."""
        held, scheduler = self.held, self.scheduler
        used = sum(one.pages for one in self.running) + self._kept() + held.cached
        may = scheduler.reserved_pages + held.cached
        assert used <= may, "rows fill more than they reserved"
        pages = max(held.pages, min(-(-used // SLAB) * SLAB, may))
        self.held = Held(pages, max(held.rows, scheduler.reserved_rows), held.cached)

    def _kept(self) -> int:
        """Pages of rows that are parked in memory."""
        reserved = sum(self.scheduler.find(one.rid).pages for one in self.running)
        return self.scheduler.reserved_pages - reserved

    def _spill(self) -> None:
        """Nobody runs, the first does not fit, and more was denied: parked rows go to disk."""
        assert self._kept()
        for one in self._in("waiting", "parked"):
            self.admission.reduce_kept(one.rid, 0)
        self.counts["spilled"] += 1

    def _skip(self, group: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """Look each prompt up in the prefixes, once, just before its first chunk."""
        looked: set[str] = set()
        while new := [one for one in group if one.start == 0 and one.rid not in looked]:
            for chunk in new:
                looked.add(chunk.rid)
                most = (self.asked[chunk.rid].prompt_len - 1) // CHUNK
                hit = self.draw.randint(0, most) if self.draw.random() < 0.3 else 0
                self.scheduler.skip_to(chunk.rid, hit * CHUNK)
                self.asked[chunk.rid].prefilled = hit * CHUNK
            group = self.scheduler.next_group()
        return group

    def _prefill(self, group: tuple[Chunk, ...], decoded: int) -> None:
        if not group:
            return
        self._check_group(group, decoded)
        for chunk in group:
            self.scheduler.mark_prefilled(chunk.rid, chunk.end)
            one = self.asked[chunk.rid]
            one.prefilled = chunk.end
            if chunk.end == one.prompt_len - 1:
                self._cache(full_pages(chunk.end) // 2)

    def _cache(self, pages: int) -> None:
        """Keep what a prompt's prefix fills, if there is room beside what is promised to rows."""
        before, self.held = self.held, Held(*self._least(self.held.cached + pages))
        if self._needed() > self.admission.budget.pages:
            self.held = before
        else:
            most = max(before.pages, self.held.pages), max(before.rows, self.held.rows)
            self.held = Held(*most, self.held.cached)
            if self._needed() > self.admission.budget.pages:
                self.held = before

    def _decode(self, one: Asked) -> None:
        before = one.alive
        one.sent += 1
        for _ in range(before - max(1, one.alive)):
            self.admission.finish_choice(one.rid)
            self.counts["choices"] += 1
        if not one.alive:
            self._end(one, "finished")

    def _admitted(self, one: Asked, *, restored: bool) -> None:
        assert restored == one.began
        assert one.state == "waiting"
        one.state = "running"
        one.in_front = one.behind = 0
        self.running.append(one)
        if one.began:
            assert one.level == self.scheduler.find(one.rid).level, "it goes on where it was"
            return
        one.level = self.scheduler.find(one.rid).level
        assert one.level >= self.scheduler.start_level
        one.began = True
        for other in self.waiting:
            if other.number < one.number:
                assert other.priority < one.priority, "within a priority, the first come first"
                other.passed.append(one)
        self.waiting.remove(one)
        self._check_overtaking(one)

    def _end(self, one: Asked, how: str) -> None:
        one.ends.append(how)
        self.admission.finish(one.rid)
        if one.state == "running":
            self.running.remove(one)
        if one in self.waiting:
            self.waiting.remove(one)
        one.state = "over"
        self.counts[how] += 1

    def _expire(self) -> None:
        for rid in self.scheduler.expired(self.now):
            one = self.asked[rid]
            assert one.deadline is not None
            assert one.deadline <= self.now
            self._end(one, "expired")

    # What is promised.

    def _check(self) -> None:
        self.scheduler.check()
        self.ledger.check()
        budget = self.admission.budget
        holds = BASE + (self.held.pages + self.held.rows * ROW_PAGES) * PAGE
        assert holds <= budget.granted_bytes or self.admission.idle, "more held than granted"
        assert budget.granted_bytes <= self.ledger.grants["me"]

    def _check_overtaking(self, one: Asked) -> None:
        """The bound of `scheduling.queue`."""
        if one.passed:
            last = max(one.passed, key=lambda other: other.number)
            highest = max(other.priority for other in one.passed)
            brought = sum(other.work for other in one.passed)
            assert brought < (highest - one.priority) * AGE + last.work, "starved in the line"
            self.counts["overtaken"] += 1

    def _check_decode(self, decode: tuple[str, ...]) -> None:
        through = [
            one.rid
            for one in self.running
            if one.prefilled == one.prompt_len - 1 and not self.scheduler.find(one.rid).suspended
        ]
        assert sorted(decode) == sorted(through), "each gets a token in each step"

    def _check_group(self, group: tuple[Chunk, ...], decoded: int) -> None:
        """The budget of a step, and the bound of `scheduling.prefill_order`."""
        longest = max(chunk.length for chunk in group)
        assert longest <= CHUNK
        assert decoded + longest * len(group) <= BUDGET
        lead = self.scheduler.find(group[0].rid).queue_key
        for one in self.running:
            row = self.scheduler.find(one.rid)
            if row.remaining and not row.suspended:
                if lead <= row.queue_key:
                    one.in_front += 1
                else:
                    one.behind += 1
                assert one.behind <= one.in_front + 1, "starved in its prompt"
        self.counts["grouped"] += len(group) > 1

    def _check_the_end(self) -> None:
        for one in self.asked.values():
            assert len(one.ends) == 1, f"{one.rid} ended {len(one.ends)} times"
            if one.ends == ["finished"]:
                assert (one.prefilled, one.sent) == (one.prompt_len - 1, one.max_new)
        assert self.scheduler.states.requests == {}
        assert self.scheduler.reserved_pages == 0
        assert not self.running
        assert not self.waiting
