"""Simulates a worker's day: scheduler, admission and ledger are real, pages are only counted.

The simulated engine follows the real one: rows fill pages as they grow, pools grow by slabs and
shrink only when they must, and prefixes are cached if memory is free. Another model requests memory
and gives it back. If its request is denied, a simulated governor steps rows down and preempts rows
until it is granted. Grants arrive late, and clients cancel. Every promised rule is asserted after
every step.
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
from tests.worker.scheduling.invariants import check_scheduler

HOUR = 3600.0
BASE, PAGE = 5000, 10
ROW_PAGES, REST, SLAB = 2, 20, 16
CHUNK, BUDGET, ROWS, AGE = 256, 384, 8, 6000


LEVELS = 3


def on(level: int, pages: int) -> int:
    """Pages at a precision level, counted in pages of level 0: a page is 1, 3/4 or 1/2."""
    return -(-pages * (4 - level) // 4)


def pages_for(length: int, level: int) -> int:
    """Pages of a row with full attention."""
    return on(level, full_pages(length))


def own_pages(start: int, end: int, level: int = 0) -> int:
    """Pages that a choice fills beyond the shared prompt."""
    return on(level, full_pages(end) - full_pages(start))


@dataclass(eq=False)
class SimRequest:
    """A request and its progress."""

    rid: str
    number: int
    prompt_len: int
    lengths: list[int]
    """Tokens of each choice, longest first."""
    priority: int = 0
    deadline: float | None = None
    prefilled: int = 0
    sent: int = 0
    level: int = 0
    state: str = "waiting"
    started: bool = False
    ends: list[str] = field(default_factory=list)
    overtaken_by: list[SimRequest] = field(default_factory=list)
    """Requests that arrived later and were admitted first."""
    groups_ahead: int = 0
    """Prefill groups that a request up to this one in queue order led, while this one was in
    prefill. Admission, suspension and preemption reset both counts."""
    groups_behind: int = 0
    """Prefill groups that a request behind this one led."""

    @property
    def max_new(self) -> int:
        return self.lengths[0]

    @property
    def total_tokens(self) -> int:
        return self.prompt_len + len(self.lengths) * self.max_new

    @property
    def open_choices(self) -> int:
        """Number of choices that have not ended."""
        return sum(length > self.sent for length in self.lengths)

    @property
    def pages(self) -> int:
        """Pages that the request fills now."""
        own = full_pages(self.prefilled + self.sent) - full_pages(self.prefilled)
        return on(self.level, full_pages(self.prefilled) + self.open_choices * own)


class Day:
    """One seeded day. `counts` has the number of each kind of event."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.now = 0.0
        self.steps = 0
        self.counts: Counter[str] = Counter()
        self.requests: dict[str, SimRequest] = {}
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
        self.running: list[SimRequest] = []
        self.waiting: list[SimRequest] = []
        """Requests that have never been admitted."""

    # The day's events.

    def at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), act))

    def later(self, mean: float, act: Callable[[], None]) -> None:
        self.at(self.now + self.draw.expovariate(1 / mean), act)

    def run(self) -> None:
        """Simulate the day, then continue until every request has ended."""
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
                self.at((hour + draw.random()) * HOUR, self._submit_one)
        for _ in range(8):
            self.at(draw.uniform(8, 20) * HOUR, self._submit_burst)
        for _ in range(60):
            self.at(draw.uniform(0, 24) * HOUR, self._other_requests)
            self.at(draw.uniform(0, 24) * HOUR, self._suspend_one)
            self.at(draw.uniform(0, 24) * HOUR, self._preempt_one)
        for _ in range(20):
            self.at(draw.uniform(8, 20) * HOUR, self._preempt_all)
        for _ in range(150):
            self.at(draw.uniform(0, 24) * HOUR, self._cancel_one)

    def _submit_one(self) -> None:
        draw = self.draw
        length = draw.choice([1, 20, 60, 120, 400, 1000, 3000, 6000, 14_000, 40_000, 150_000])
        self._submit(draw.randint(-(-length // 2), length))

    def _submit_burst(self) -> None:
        """Submit 32 prompts of one length: long, as with a system prompt, or short questions."""
        length = self.draw.choice([1550, 60])
        for _ in range(32):
            self._submit(length)

    def _submit(self, prompt_len: int) -> None:
        draw = self.draw
        number = len(self.requests)
        choices = draw.choice([1] * 9 + [3])
        request = SimRequest(
            rid=f"r{next(self._names)}",
            number=number,
            prompt_len=prompt_len,
            lengths=sorted((draw.randint(1, 120) for _ in range(choices)), reverse=True),
            priority=draw.choice([0, 0, 0, 0, 1, 2, -1]),
            deadline=self.now + draw.uniform(2, 300) if draw.random() < 0.2 else None,
        )
        try:
            self.admission.submit(
                request.rid,
                prompt_len,
                request.max_new,
                priority=request.priority,
                deadline=request.deadline,
                choices=choices,
            )
        except InsufficientMemory:
            self.counts["refused"] += 1
            return
        self.requests[request.rid] = request
        self.waiting.append(request)

    def _in_state(self, *states: str) -> list[SimRequest]:
        return [request for request in self.requests.values() if request.state in states]

    def _cancel_one(self) -> None:
        if candidates := self._in_state("waiting", "running", "preempted"):
            self._end(self.draw.choice(candidates), "cancelled")

    def _suspend_one(self) -> None:
        able = [it for it in self.running if not self.scheduler.find(it.rid).suspended]
        if able:
            request = self.draw.choice(able)
            self.scheduler.suspend(request.rid)
            request.groups_ahead = request.groups_behind = 0
            self.counts["suspended"] += 1
            self.later(60, lambda: self._resume(request))

    def _resume(self, request: SimRequest) -> None:
        if request.state == "running" and self.scheduler.find(request.rid).suspended:
            self.scheduler.resume(request.rid)

    def _preempt_one(self) -> None:
        if self.running:
            self._preempt(self.draw.choice(self.running), in_memory=self.draw.random() < 0.5)

    def _preempt_all(self) -> None:
        """Preempt all rows in memory; a new request arrives before the first of them resumes."""
        for request in list(self.running):
            self._preempt(request, in_memory=True)
        self._submit(14_000)

    def _preempt(self, request: SimRequest, *, in_memory: bool) -> None:
        self.admission.preempt(request.rid, request.pages if in_memory else 0)
        request.state = "preempted"
        self.running.remove(request)
        request.groups_ahead = request.groups_behind = 0
        self.counts["preempted"] += 1
        self.later(120, lambda: self._requeue(request))

    def _requeue(self, request: SimRequest) -> None:
        if request.state == "preempted":
            self.admission.requeue_preempted(request.rid)
            request.state = "waiting"

    # The daemon.

    def _other_requests(self) -> None:
        total = self.draw.randint(1000, 5000)
        self._apply(MemoryRequest("other", 1, total))
        if "other" in self.ledger.waiting:
            self.later(1, self._serve_other)
        self.later(900, lambda: self._apply(WorkerExited("other")))

    def _serve_other(self) -> None:
        """Reclaim for the other model: prefixes, then precision, then the least valuable rows."""
        wanted = self.ledger.waiting.get("other")
        if wanted is None:
            return
        held = self.ledger.grants.get("other", 0)
        missing = wanted.total_bytes - held - self.ledger.available_bytes
        target = max(0, self.admission.budget.pages - missing // PAGE - 1)
        self.held = Held(*self._smallest_pools(0))
        for rid in self.scheduler.victims():
            if self._needed() > target:
                self._step_down(self.requests[rid])
        preempted = []
        for rid in self.scheduler.victims():
            if self._needed() > target:
                self._preempt(self.requests[rid], in_memory=False)
                self.held = Held(*self._smallest_pools(0))
                preempted.append(self.requests[rid])
        before = self.admission.budget.granted_bytes
        given, freed = self.admission.give_back(target, self.held)
        assert before - self.admission.budget.granted_bytes == freed >= 0
        self._send(given)
        for request in preempted:
            self._requeue(request)
        self.counts["made room"] += 1

    def _step_down(self, request: SimRequest) -> None:
        lowest = self.scheduler.sizes.lowest_level
        self.admission.set_start_level(lowest)
        self.later(600, lambda: self.admission.set_start_level(0))
        if request.level < lowest:
            before, saved = (
                self.scheduler.reserved_pages,
                self.scheduler.step_down_savings(request.rid, lowest),
            )
            request.level = lowest
            self.admission.step_down(request.rid, lowest)
            assert self.scheduler.reserved_pages == before - saved
            self.held = Held(*self._smallest_pools(self.held.cached))
            self.counts["stepped down"] += 1

    def _needed(self) -> int:
        """Return the pages that the grant must cover."""
        admission, scheduler = self.admission, self.scheduler
        missing = admission.missing_pages(
            scheduler.reserved_pages, scheduler.reserved_rows, self.held
        )
        return missing + admission.budget.pages

    def _send(self, wanted: MemoryRequested | None) -> None:
        if wanted is not None:
            request = MemoryRequest("me", wanted.seq, wanted.total_bytes)
            self.later(0.5, lambda: self._apply(request))

    def _apply(self, event: MemoryRequest | WorkerExited) -> None:
        for decision in self.ledger.handle(event, self.now):
            if decision.model == "me":
                self.counts["granted" if decision.granted else "denied"] += 1
                grant = Grant(
                    seq=decision.seq,
                    total_bytes=decision.total_bytes,
                    granted=decision.granted,
                    available_bytes=decision.available_bytes,
                    limit_bytes=self.ledger.budget_bytes,
                )
                self.later(0.5, lambda grant=grant: self.admission.granted(grant))

    # The engine.

    def _step(self) -> None:
        result = self._admit()
        if result.plan.missing_pages and self._give_up_spare():
            result = self._admit()
        plan = result.plan
        self._check_decode(plan.decode)
        decoded = sum(max(1, self.requests[rid].open_choices) for rid in plan.decode)
        for rid in plan.decode:
            self._decode(self.requests[rid])
        self._prefill(self._look_up_prefixes(plan.group), decoded)
        if result.refused is not None:
            self._end(self.requests[result.refused[0]], "refused")
        elif result.swap_out_kept:
            self._swap_out_kept()
        self._grow()
        if self.admission.idle:
            self.held = Held(self.held.cached, 0, self.held.cached)
            self._send(self.admission.give_back_idle(self.held.cached))
        self.steps += 1
        self.now += 0.3 + 0.004 * sum(chunk.length for chunk in plan.group)
        self._check()

    def _admit(self) -> AdmissionResult:
        result = self.admission.admit(self.held)
        for rid in result.plan.admitted:
            self._admitted(self.requests[rid], restored=rid in result.plan.resumed)
        self._send(result.memory_request)
        self._grow()
        if result.evict_pages:
            assert result.refused is None
            assert result.memory_request is None
            self.held = Held(*self._smallest_pools(self.held.cached - result.evict_pages))
            self.counts["evicted"] += 1
        return result

    def _smallest_pools(self, cached: int) -> tuple[int, int, int]:
        """Return the fields of `Held` for pools without spare pages and rows."""
        return self.scheduler.reserved_pages + cached, self.scheduler.reserved_rows, cached

    def _give_up_spare(self) -> bool:
        held = self.held
        self.held = Held(*self._smallest_pools(held.cached))
        return held.pages > self.held.pages

    def _grow(self) -> None:
        """Grow the pools by slabs for running rows, preempted rows and prefixes."""
        held, scheduler = self.held, self.scheduler
        used = sum(request.pages for request in self.running) + self._kept() + held.cached
        limit = scheduler.reserved_pages + held.cached
        assert used <= limit, "rows fill more than they reserved"
        pages = max(held.pages, min(-(-used // SLAB) * SLAB, limit))
        self.held = Held(pages, max(held.rows, scheduler.reserved_rows), held.cached)

    def _kept(self) -> int:
        """Return the pages of rows that are preempted in memory."""
        reserved = sum(self.scheduler.find(request.rid).pages for request in self.running)
        return self.scheduler.reserved_pages - reserved

    def _swap_out_kept(self) -> None:
        """Swap preempted rows out: no row runs, and memory for the head of the queue was denied."""
        assert self._kept()
        for request in self._in_state("waiting", "preempted"):
            self.admission.reduce_kept(request.rid, 0)
        self.counts["swapped out"] += 1

    def _look_up_prefixes(self, group: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """Look each prompt up in the prefix cache, once, just before its first chunk."""
        looked_up: set[str] = set()
        while new := [it for it in group if it.start == 0 and it.rid not in looked_up]:
            for chunk in new:
                looked_up.add(chunk.rid)
                most = (self.requests[chunk.rid].prompt_len - 1) // CHUNK
                hit = self.draw.randint(0, most) if self.draw.random() < 0.3 else 0
                self.scheduler.skip_to(chunk.rid, hit * CHUNK)
                self.requests[chunk.rid].prefilled = hit * CHUNK
            group = self.scheduler.next_group()
        return group

    def _prefill(self, group: tuple[Chunk, ...], decoded: int) -> None:
        if not group:
            return
        self._check_group(group, decoded)
        for chunk in group:
            self.scheduler.mark_prefilled(chunk.rid, chunk.end)
            request = self.requests[chunk.rid]
            request.prefilled = chunk.end
            if chunk.end == request.prompt_len - 1:
                self._cache(full_pages(chunk.end) // 2)

    def _cache(self, pages: int) -> None:
        """Cache a prefix if memory is left beyond what rows have reserved."""
        before, self.held = self.held, Held(*self._smallest_pools(self.held.cached + pages))
        if self._needed() > self.admission.budget.pages:
            self.held = before
        else:
            most = max(before.pages, self.held.pages), max(before.rows, self.held.rows)
            self.held = Held(*most, self.held.cached)
            if self._needed() > self.admission.budget.pages:
                self.held = before

    def _decode(self, request: SimRequest) -> None:
        before = request.open_choices
        request.sent += 1
        for _ in range(before - max(1, request.open_choices)):
            self.admission.finish_choice(request.rid)
            self.counts["choices"] += 1
        if not request.open_choices:
            self._end(request, "finished")

    def _admitted(self, request: SimRequest, *, restored: bool) -> None:
        assert restored == request.started
        assert request.state == "waiting"
        request.state = "running"
        request.groups_ahead = request.groups_behind = 0
        self.running.append(request)
        if request.started:
            assert request.level == self.scheduler.find(request.rid).level, (
                "resumes at the same level"
            )
            return
        request.level = self.scheduler.find(request.rid).level
        assert request.level >= self.scheduler.start_level
        request.started = True
        for other in self.waiting:
            if other.number < request.number:
                assert other.priority < request.priority, (
                    "within a priority, older requests are admitted first"
                )
                other.overtaken_by.append(request)
        self.waiting.remove(request)
        self._check_overtaking(request)

    def _end(self, request: SimRequest, how: str) -> None:
        request.ends.append(how)
        self.admission.finish(request.rid)
        if request.state == "running":
            self.running.remove(request)
        if request in self.waiting:
            self.waiting.remove(request)
        request.state = "over"
        self.counts[how] += 1

    def _expire(self) -> None:
        for rid in self.scheduler.expired(self.now):
            request = self.requests[rid]
            assert request.deadline is not None
            assert request.deadline <= self.now
            self._end(request, "expired")

    # Promises.

    def _check(self) -> None:
        check_scheduler(self.scheduler)
        self.ledger.check()
        budget = self.admission.budget
        holds = BASE + (self.held.pages + self.held.rows * ROW_PAGES) * PAGE
        assert holds <= budget.granted_bytes or self.admission.idle, "more held than granted"
        assert budget.granted_bytes <= self.ledger.grants["me"]

    def _check_overtaking(self, request: SimRequest) -> None:
        """Check the bound on overtaking that `scheduling.queue` promises."""
        if request.overtaken_by:
            last = max(request.overtaken_by, key=lambda other: other.number)
            highest = max(other.priority for other in request.overtaken_by)
            overtaken_tokens = sum(other.total_tokens for other in request.overtaken_by)
            limit = (highest - request.priority) * AGE + last.total_tokens
            assert overtaken_tokens < limit, "starved in the queue"
            self.counts["overtaken"] += 1

    def _check_decode(self, decode: tuple[str, ...]) -> None:
        prefilled = [it.rid for it in self.running if it.prefilled == it.prompt_len - 1]
        active = [rid for rid in prefilled if not self.scheduler.find(rid).suspended]
        assert sorted(decode) == sorted(active), "a row without a token in this step"

    def _check_group(self, group: tuple[Chunk, ...], decoded: int) -> None:
        """Check a step's token budget and the bound that `scheduling.prefill_order` promises."""
        longest = max(chunk.length for chunk in group)
        assert longest <= CHUNK
        assert decoded + sum(chunk.length for chunk in group) <= BUDGET
        lead = self.scheduler.find(group[0].rid).queue_key
        for request in self.running:
            row = self.scheduler.find(request.rid)
            if row.remaining and not row.suspended:
                if lead <= row.queue_key:
                    request.groups_ahead += 1
                else:
                    request.groups_behind += 1
                assert request.groups_behind <= request.groups_ahead + 1, "starved during prefill"
        self.counts["grouped"] += len(group) > 1

    def _check_the_end(self) -> None:
        for request in self.requests.values():
            assert len(request.ends) == 1, f"{request.rid} ended {len(request.ends)} times"
            if request.ends == ["finished"]:
                progress = (request.prefilled, request.sent)
                assert progress == (request.prompt_len - 1, request.max_new)
        assert self.scheduler.states.requests == {}
        assert self.scheduler.reserved_pages == 0
        assert not self.running
        assert not self.waiting
