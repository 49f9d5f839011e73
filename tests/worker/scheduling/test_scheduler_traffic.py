"""The scheduler under any order of events, against a naive model."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.worker.cache.scheme import full_pages
from kvd.worker.scheduling.scheduler import ReservationSizes
from tests.worker.scheduling.helpers import CHUNK, PAGES, grouping, own, within
from tests.worker.scheduling.invariants import check_scheduler


class Traffic(RuleBasedStateMachine):
    """Any order of events keeps the invariants, the page counts and the queue's order.

    A naive model, a dictionary per request, predicts the scheduler's state.
    """

    @initialize(group=st.booleans(), budget=st.sampled_from([CHUNK + 5, 3 * CHUNK]))
    def start(self, group, budget):
        self.scheduler = grouping(
            max_rows=5, group=group, budget=budget, sizes=ReservationSizes(own_pages=own), age=500
        )
        self.group, self.budget = group, budget
        self.requests = {}
        self.names = 0
        self.now = 0.0

    def of(self, *states):
        return [rid for rid, one in self.requests.items() if one["state"] in states]

    @rule(
        prompt_len=st.one_of(st.integers(1, 700), st.integers(1, 60)),
        max_new=st.integers(1, 300),
        priority=st.integers(-2, 2),
        choices=st.sampled_from([1, 1, 1, 2, 5]),
        time_left=st.one_of(st.none(), st.floats(0, 50)),
        family=st.sampled_from(["", "a", "b"]),
    )
    def submit(self, prompt_len, max_new, priority, choices, time_left, family):
        rid = f"r{self.names}"
        self.names += 1
        deadline = None if time_left is None else self.now + time_left
        beginnings = range((prompt_len - 1) // CHUNK) if family else ()
        self.scheduler.submit(
            rid,
            prompt_len,
            max_new,
            priority=priority,
            deadline=deadline,
            choices=choices,
            path=tuple(f"{family}{number}" for number in beginnings),
        )
        self.requests[rid] = {
            "state": "waiting",
            "number": self.names,
            "priority": priority,
            "choices": choices,
            "deadline": deadline,
            "at": 0,
            "end": prompt_len - 1,
            "one": full_pages(prompt_len + max_new),
            "more": own(prompt_len - 1, prompt_len + max_new),
            "kept": 0,
            "suspended": False,
            "was_admitted": False,
        }

    def pages(self, rid):
        one = self.requests[rid]
        if one["state"] != "running":
            return one["kept"]
        return one["one"] + (one["choices"] - 1) * one["more"]

    @rule(run=st.sampled_from(["all", "lead", "nothing"]))
    def step(self, run):
        plan = self.scheduler.plan(within(PAGES))
        for rid in plan.admitted:
            one = self.requests[rid]
            assert one["state"] == "waiting"
            for other in self.of("waiting"):  # no earlier request of the same priority waits
                if self.requests[other]["priority"] == one["priority"]:
                    assert self.requests[other]["number"] >= one["number"]
            assert (rid in plan.resumed) == one["was_admitted"]
            one |= {"state": "running", "kept": 0, "was_admitted": True}
        assert sum(self.pages(rid) for rid in self.requests) <= PAGES
        for rid in self.of("running"):
            one = self.requests[rid]
            prefilled = one["at"] == one["end"]
            assert (rid in plan.decode) == (prefilled and not one["suspended"])
        self.check_group(plan)
        count = {"all": len(plan.group), "lead": 1, "nothing": 0}[run]
        for chunk in plan.group[:count]:
            self.scheduler.mark_prefilled(chunk.rid, chunk.end)
            self.requests[chunk.rid]["at"] = chunk.end

    def check_group(self, plan):
        able = [
            rid
            for rid in self.of("running")
            if not self.requests[rid]["suspended"]
            and self.requests[rid]["at"] < self.requests[rid]["end"]
        ]
        assert bool(plan.group) == bool(able)
        assert {chunk.rid for chunk in plan.group} <= set(able)
        prefilled = sum(chunk.length for chunk in plan.group)
        decoded = sum(self.requests[rid]["choices"] for rid in plan.decode)
        assert decoded + prefilled <= self.budget
        assert self.group or len(plan.group) <= 1
        at = {rid: self.requests[rid]["at"] for rid in able}
        for chunk in plan.group:
            one = self.requests[chunk.rid]
            assert chunk.start == at[chunk.rid] < chunk.end <= one["end"]
            at[chunk.rid] = chunk.end
            assert chunk.end == min((chunk.start // CHUNK + 1) * CHUNK, one["end"])

    @precondition(lambda self: self.scheduler.cache_candidates)
    @rule(data=st.data())
    def skip(self, data):
        rid = data.draw(st.sampled_from(self.scheduler.cache_candidates))
        one = self.requests[rid]
        assert (one["state"], one["at"]) == ("running", 0)
        one["at"] = data.draw(st.integers(0, one["end"] // CHUNK)) * CHUNK
        self.scheduler.skip_to(rid, one["at"])

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data())
    def suspend_or_resume(self, data):
        rid = data.draw(st.sampled_from(self.of("running")))
        one = self.requests[rid]
        (self.scheduler.resume if one["suspended"] else self.scheduler.suspend)(rid)
        one["suspended"] = not one["suspended"]

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data())
    def preempt(self, data):
        rid = data.draw(st.sampled_from(self.of("running")))
        pages = self.pages(rid)
        kept = data.draw(st.integers(0, pages))
        reserved = self.scheduler.reserved_pages
        self.scheduler.preempt(rid, kept)
        assert self.scheduler.reserved_pages == reserved - pages + kept
        self.requests[rid] |= {"state": "preempted", "kept": kept, "suspended": False}

    @precondition(lambda self: self.of("preempted"))
    @rule(data=st.data())
    def requeue(self, data):
        rid = data.draw(st.sampled_from(self.of("preempted")))
        self.scheduler.states.requeue_preempted(rid)
        self.requests[rid]["state"] = "waiting"

    @precondition(lambda self: any(self.requests[rid]["kept"] for rid in self.requests))
    @rule(data=st.data())
    def reduce_kept(self, data):
        rid = data.draw(st.sampled_from([rid for rid, one in self.requests.items() if one["kept"]]))
        self.scheduler.states.reduce_kept(rid, 0)
        self.requests[rid]["kept"] = 0

    @precondition(lambda self: self.of("running"))
    @rule(data=st.data())
    def finish_choice(self, data):
        rid = data.draw(st.sampled_from(self.of("running")))
        one = self.requests[rid]
        if one["choices"] > 1 and one["at"] == one["end"]:
            reserved = self.scheduler.reserved_pages
            self.scheduler.states.remove_choice(rid)
            assert self.scheduler.reserved_pages == reserved - one["more"]
            one["choices"] -= 1

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def finish(self, data):
        rid = data.draw(st.sampled_from(sorted(self.requests)))
        reserved = self.scheduler.reserved_pages
        self.scheduler.finish(rid)
        assert self.scheduler.reserved_pages == reserved - self.pages(rid)
        del self.requests[rid]

    @rule(seconds=st.floats(0, 20))
    def time(self, seconds):
        self.now += seconds
        late = [
            rid
            for rid, one in self.requests.items()
            if one["deadline"] is not None and one["deadline"] <= self.now
        ]
        assert sorted(self.scheduler.expired(self.now)) == sorted(late)
        for rid in late:
            self.scheduler.finish(rid)
            del self.requests[rid]
        assert self.scheduler.next_deadline is None or self.scheduler.next_deadline > self.now

    @invariant()
    def holds(self):
        if not hasattr(self, "scheduler"):
            return
        check_scheduler(self.scheduler)
        running = self.of("running")
        assert self.scheduler.waiting == len(self.of("waiting"))
        assert len(self.scheduler.states.preempted) == len(self.of("preempted"))
        assert self.scheduler.prefilling + self.scheduler.decoding == len(running)
        assert self.scheduler.states.active == sum(
            not self.requests[rid]["suspended"] for rid in running
        )
        assert (
            self.scheduler.reserved_rows
            == sum(self.requests[rid]["choices"] for rid in running)
            <= 5
        )
        assert self.scheduler.reserved_pages == sum(self.pages(rid) for rid in self.requests)
        assert set(self.scheduler.victims()) == set(running)


Traffic.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase
