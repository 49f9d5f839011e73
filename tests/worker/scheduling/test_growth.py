"""Reservations that grow: order, memory, preemption and progress."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from actors.machines.ledger import GrantDecision, Ledger, MemoryRequest
from kvd.worker.scheduling.admission import Admission, Held
from kvd.worker.scheduling.budget import PageBudget
from kvd.worker.scheduling.scheduler import ReservationSizes, Scheduler
from protocol.errors import InsufficientMemory
from protocol.worker import Grant
from tests.worker.scheduling.helpers import BASE, PAGE
from tests.worker.scheduling.invariants import check_scheduler

AHEAD = 32
PAGE_TOKENS = 8
ROW_PAGES = 1


def admission_of(pages: int, max_rows: int = 4) -> Admission:
    """Return an admission with ``pages`` pages, small ones, and reservations of 32 tokens."""
    sizes = ReservationSizes(lambda length, _level: length // PAGE_TOKENS)
    return Admission(
        Scheduler(max_rows=max_rows, chunk=128, sizes=sizes, ahead=AHEAD),
        PageBudget(BASE, PAGE, BASE + pages * PAGE, seq=1, limit_bytes=BASE + pages * PAGE),
        row_pages=ROW_PAGES,
        idle_pages=0,
    )


def decode(admission: Admission, count: int) -> None:
    """Decode ``count`` tokens of each running request; nothing is reserved meanwhile."""
    for request in admission.scheduler.states.decoding.values():
        for _ in range(count):
            assert request.generated < request.reserved_new, "a token without a reservation"
            request.generated += 1


def deny(admission: Admission, budget_pages: int) -> None:
    seq, total = admission.budget.seq, admission.budget.granted_bytes
    limit = BASE + budget_pages * PAGE
    admission.granted(Grant(seq=seq, total_bytes=total, granted=False, limit_bytes=limit))


def test_a_request_reserves_a_part_and_grows_before_it_needs_more() -> None:
    admission = admission_of(100)
    admission.submit("a", 1, 200)
    admission.submit("small", 1, 20)
    admission.admit(Held())
    find = admission.scheduler.find
    assert (find("a").reserved_new, find("small").reserved_new) == (32, 20)
    decode(admission, 16)
    admission.admit(Held())
    assert find("a").reserved_new == 32
    decode(admission, 1)
    admission.admit(Held())
    assert (find("a").reserved_new, find("small").reserved_new) == (17 + 32, 20)


def test_growth_asks_the_daemon_first_and_preempts_only_when_stalled() -> None:
    admission = admission_of(12)
    for rid in ("old", "new"):
        admission.submit(rid, 1, 80)
    assert admission.admit(Held()).plan.admitted == ("old", "new")  # 4 pages and a row each
    decode(admission, 17)
    result = admission.admit(Held())
    assert result.plan.growing == "new", "the two spare pages went to the older one"
    assert result.memory_request is not None
    assert result.memory_request.resuming, "no row of another model is preempted for it"
    deny(admission, 12)
    result = admission.admit(Held())
    assert (result.memory_request, result.stalled) == (None, None)
    decode(admission, 15)
    result = admission.admit(Held())
    assert result.plan.decode == ("old",), "a request without reservation does not decode"
    assert admission.scheduler.victims()[0] == "new"


def test_cached_prefixes_go_before_a_request_is_preempted() -> None:
    admission = admission_of(12)
    for rid in ("old", "new"):
        admission.submit(rid, 1, 80)
    admission.admit(Held())
    decode(admission, 32)
    held = Held(cached=2)
    for _ in range(2):  # memory for both, then for the older one
        assert admission.admit(held).memory_request is not None
        deny(admission, 12)
    result = admission.admit(held)
    assert (result.evict_pages, result.stalled) == (2, None)
    assert admission.admit(Held()).memory_request is not None, "now it lacks less"
    deny(admission, 12)
    result = admission.admit(Held())
    assert (result.evict_pages, result.stalled) == (0, "old")


def test_no_request_is_admitted_before_a_running_one_has_its_memory() -> None:
    admission = admission_of(11)
    admission.budget.granted_bytes -= 5 * PAGE
    admission.submit("old", 1, 80)
    admission.admit(Held())
    decode(admission, 32)
    admission.submit("tiny", 1, 6)
    result = admission.admit(Held())
    assert (result.plan.growing, result.plan.admitted) == ("old", ()), "a row would fit"


def test_running_requests_are_extended_before_another_is_admitted() -> None:
    admission = admission_of(11)
    admission.submit("old", 1, 80)
    admission.admit(Held())
    decode(admission, 16)
    admission.submit("new", 1, 32)
    result = admission.admit(Held())
    assert result.plan.admitted == (), "5 + 4 pages would fit, with the extension they do not"
    assert result.plan.missing_pages == 1


def test_open_ended_requests_end_where_the_budget_ends() -> None:
    admission = admission_of(6)
    admission.submit("open", 1, 10_000, open_ended=True)
    admission.admit(Held())
    for _ in range(100):
        if admission.admit(Held()).refused:
            break
        decode(admission, 1)
    assert admission.scheduler.find("open").generated == 5 * PAGE_TOKENS + 6


def test_a_request_that_was_promised_too_much_is_refused_when_it_is_submitted() -> None:
    admission = admission_of(6)
    try:
        admission.submit("long", 1, 10_000)
    except InsufficientMemory:
        return
    raise AssertionError("it was queued")


@dataclass
class Wanted:
    """A request, and after how many tokens it ends on its own."""

    prompt: int
    max_new: int
    ends: int
    priority: int
    choices: int
    open_ended: bool
    at: int
    """The round in which it is submitted."""


WANTED = st.builds(
    Wanted,
    prompt=st.integers(1, 100),
    max_new=st.integers(1, 200),
    ends=st.integers(1, 200),
    priority=st.integers(-1, 1),
    choices=st.sampled_from([1, 1, 1, 2]),
    open_ended=st.booleans(),
    at=st.integers(0, 100),
)


class Model:
    """One model that decodes, beside another that takes and returns memory at random."""

    def __init__(self, wanted: list[Wanted], pages: int, draw: random.Random) -> None:
        self.wanted = {f"r{number}": one for number, one in enumerate(wanted)}
        self.draw = draw
        self.pages = pages
        self.ledger = Ledger(budget_bytes=BASE + pages * PAGE)
        self.ledger.handle(MemoryRequest("me", 1, BASE), 0.0)
        self.admission = admission_of(0)
        self.admission.budget.limit_bytes = self.ledger.budget_bytes
        self.scheduler = self.admission.scheduler
        self.messages: deque[tuple[int, MemoryRequest | Grant]] = deque()
        self.round = 0
        self.ended: set[str] = set()

    def run(self) -> None:
        work = sum(one.prompt // 128 + 2 + one.max_new for one in self.wanted.values())
        limit = 200 + 8 * work
        while len(self.ended) < len(self.wanted):
            self.round += 1
            assert self.round < limit, f"no progress: {self.scheduler.states.requests}"
            self.submit()
            if self.round < 150:
                self.other_model()
            elif self.round == 150:
                self.answer(MemoryRequest("other", 1, 0))
            self.exchange()
            self.step()
            self.check()

    def submit(self) -> None:
        for rid, one in self.wanted.items():
            if one.at == self.round - 1:
                try:
                    self.admission.submit(
                        rid,
                        one.prompt,
                        one.max_new,
                        priority=one.priority,
                        choices=one.choices,
                        open_ended=one.open_ended,
                    )
                except InsufficientMemory:
                    self.ended.add(rid)

    def other_model(self) -> None:
        if self.draw.random() < 0.1:
            total = self.draw.randint(0, self.ledger.budget_bytes - BASE)
            self.answer(MemoryRequest("other", 1, total))

    def answer(self, event: MemoryRequest) -> None:
        for one in self.ledger.handle(event, 0.0):
            if one.model == "me":
                self.messages.append((self.round + self.draw.randint(0, 3), self.grant(one)))

    def grant(self, one: GrantDecision) -> Grant:
        return Grant(
            seq=one.seq,
            total_bytes=one.total_bytes,
            granted=one.granted,
            limit_bytes=self.ledger.budget_bytes,
        )

    def exchange(self) -> None:
        while self.messages and self.messages[0][0] <= self.round:
            _, message = self.messages.popleft()
            if isinstance(message, Grant):
                self.admission.granted(message)
            else:
                self.answer(message)

    def step(self) -> None:
        result = self.admission.admit(Held())
        if (asked := result.memory_request) is not None:
            request = MemoryRequest("me", asked.seq, asked.total_bytes)
            self.messages.append((self.round + self.draw.randint(0, 3), request))
        if result.refused is not None:
            self.refuse(result.refused[0])
        if result.stalled is not None:
            self.make_room(result.stalled, result.plan.missing_pages)
        for chunk in result.plan.group:
            if self.scheduler.is_admitted(chunk.rid):
                self.scheduler.mark_prefilled(chunk.rid, chunk.end)
        for rid in result.plan.decode:
            if rid in self.scheduler.states.decoding:
                self.decode(rid)

    def refuse(self, rid: str) -> None:
        one, request = self.wanted[rid], self.scheduler.find(rid)
        most = (one.prompt + request.generated + 1) // PAGE_TOKENS + ROW_PAGES
        assert one.open_ended, "the budget did not shrink"
        assert most * request.choices > self.pages, "it could go on"
        self.finish(rid)

    def make_room(self, stalled: str, pages: int) -> None:
        victims = self.scheduler.victims()
        for rid in victims[: victims.index(stalled) + 1]:
            if pages <= 0:
                return
            pages -= self.scheduler.find(rid).pages
            self.admission.preempt(rid)
            self.admission.requeue_preempted(rid)

    def decode(self, rid: str) -> None:
        request = self.scheduler.find(rid)
        assert request.generated < request.reserved_new, "a token without a reservation"
        self.scheduler.note_generated(rid, request.generated + 1)
        if request.generated in {self.wanted[rid].ends, request.max_new}:
            self.finish(rid)

    def finish(self, rid: str) -> None:
        self.admission.finish(rid)
        self.ended.add(rid)

    def check(self) -> None:
        self.ledger.check()
        check_scheduler(self.scheduler)
        scheduler, budget = self.scheduler, self.admission.budget
        reserved = scheduler.reserved_pages + scheduler.reserved_rows * ROW_PAGES
        assert reserved <= budget.pages, "more reserved than granted"
        assert budget.granted_bytes <= self.ledger.grants["me"], "more used than granted"


@settings(max_examples=150, deadline=None)
@given(
    wanted=st.lists(WANTED, min_size=1, max_size=8),
    pages=st.integers(20, 80),
    seed=st.integers(0, 1 << 20),
)
def test_all_requests_end_within_the_grant(wanted: list[Wanted], pages: int, seed: int) -> None:
    Model(wanted, pages, random.Random(seed)).run()
