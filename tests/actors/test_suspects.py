"""Suspects: the request that kills the process is found, and no other request is blamed."""

from __future__ import annotations

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from actors.machines.suspects import MAX_LINES, Suspects

HOW = "it was ended by SIGSEGV"


def inside(*rids: str) -> Suspects:
    subject = Suspects()
    for rid in rids:
        subject.enter(rid)
    return subject


def died(subject: Suspects, *rids: str, attributable: bool = True) -> list[str] | None:
    story = subject.note_death(rids, HOW, attributable=attributable)
    subject.check()
    return story


def test_a_kill_from_outside_makes_no_request_suspect() -> None:
    subject = inside("a")
    for _ in range(5):
        assert died(subject, "a", attributable=False) is None
        assert not subject.careful
        subject.enter("a")
    assert subject.stories == {}


def test_a_request_alone_is_tried_twice_and_then_blamed_with_its_story() -> None:
    subject = inside("a")
    assert died(subject, "a") is None
    assert subject.careful
    assert subject.next_group() == ["a"]
    subject.enter("a")
    assert died(subject, "a") == [f"{HOW}; 1 inside, 1 without a new token"] * 2
    assert subject.next_group() == []
    assert not subject.careful


def test_a_new_token_clears_a_suspect() -> None:
    subject = inside("a")
    died(subject, "a")
    subject.next_group()
    subject.enter("a")
    subject.note_progress("a")
    assert died(subject, "a") is None  # it made progress, so it is not blamed
    assert subject.stories == {}


def test_suspects_are_tried_in_halves_one_after_the_other() -> None:
    subject = inside("a", "b", "c")
    assert died(subject, "a", "b", "c") is None
    assert subject.next_group() == ["a", "b"]
    subject.enter("a")
    subject.enter("b")
    subject.note_progress("a")
    assert subject.trying
    subject.note_progress("b")
    assert subject.next_group() == ["c"]
    subject.enter("c")
    assert died(subject, "a", "b", "c") is None
    assert subject.groups == [["c"], ["a", "b"]]  # a and b made progress, so c is tried first
    assert subject.next_group() == ["c"]
    subject.enter("c")
    assert died(subject, "c") is not None
    assert subject.next_group() == ["a", "b"]


def test_a_long_queue_does_not_delay_running_requests() -> None:
    subject = inside("runs", "reads", "q1", "q2")
    subject.note_progress("runs")
    subject.note_queued("q1")
    subject.note_queued("q2")
    died(subject, "runs", "reads", "q1", "q2")
    assert subject.groups == [["reads"], ["runs"], ["q1", "q2"]]
    for group in (subject.next_group(), subject.next_group(), subject.next_group()):
        for rid in group:
            subject.enter(rid)
            if not rid.startswith("q"):
                subject.note_progress(rid)
    subject.note_queued("q2")  # ignored: q2 is suspected already
    died(subject, "runs", "reads", "q1", "q2")
    assert subject.groups == [["q1", "q2"], ["reads", "runs"]]


def test_if_all_are_queued_all_are_suspected() -> None:
    subject = inside("a", "b")
    subject.note_queued("a")
    subject.note_queued("b")
    died(subject, "a", "b")
    assert subject.groups == [["a"], ["b"]]


def test_a_kill_from_outside_during_a_trial_repeats_the_trial() -> None:
    subject = inside("a", "b")
    died(subject, "a", "b")
    assert subject.next_group() == ["a"]
    subject.enter("a")
    assert died(subject, "a", attributable=False) is None
    assert subject.groups == [["a"], ["b"]]


def test_a_returned_request_is_not_suspected() -> None:
    subject = inside("a", "b")
    assert died(subject, "a") is None
    subject.note_returned("b")
    assert set(subject.stories) == {"a"}
    assert subject.next_group() == ["a"]


def test_a_finished_request_is_not_tried_again() -> None:
    subject = inside("a", "b")
    died(subject, "a", "b")
    subject.forget("a")
    assert subject.next_group() == ["b"]
    subject.forget("b")
    assert subject.stories == {}


def test_a_story_is_bounded() -> None:
    subject = inside("a", "b")
    for _ in range(3 * MAX_LINES):
        died(subject, "a", "b")
        subject.groups.clear()
        subject.enter("a")
        subject.enter("b")
    assert len(subject.stories["a"]) == MAX_LINES


class Run:
    """A model whose process dies of some requests, and is sometimes killed from outside."""

    def __init__(self, draw: random.Random, lengths: list[int], deadly: dict[int, int]) -> None:
        self.draw = draw
        self.subject = Suspects()
        self.lengths = {f"r{at}": length for at, length in enumerate(lengths)}
        self.deadly = {f"r{at}": position for at, position in deadly.items() if at < len(lengths)}
        """By request, the position of the token at which it kills the process."""
        self.generated = dict.fromkeys(self.lengths, 0)
        self.waiting = list(self.lengths)
        self.blamed: list[str] = []
        self.barren = 0
        """Deaths caused by requests since the last token or blame."""
        self.max_barren = 0

    def simulate(self) -> None:
        while self.waiting or self.subject.inside:
            self.subject.check()
            self.release()
            if self.draw.random() < 0.03:
                self.die(attributable=False)
            else:
                self.step(self.draw.choice(list(self.subject.inside)))

    def release(self) -> None:
        subject = self.subject
        while subject.careful and not subject.trying:
            if group := subject.next_group():
                self.enter(group)
                return
        if not subject.careful:
            # Some requests arrive later.
            count = self.draw.randint(0 if subject.inside else 1, len(self.waiting) or 1)
            self.enter(self.waiting[:count])

    def enter(self, rids: list[str]) -> None:
        for rid in list(rids):
            self.waiting.remove(rid)
            self.subject.enter(rid)
            if self.draw.random() < 0.4:
                self.subject.note_queued(rid)

    def step(self, rid: str) -> None:
        if self.deadly.get(rid) == self.generated[rid]:
            self.barren += 1
            self.max_barren = max(self.max_barren, self.barren)
            self.die(attributable=True)
            return
        self.barren = 0
        self.generated[rid] += 1
        self.subject.note_progress(rid)
        if self.generated[rid] == self.lengths[rid]:
            self.subject.forget(rid)

    def die(self, *, attributable: bool) -> None:
        present = list(self.subject.inside)
        story = self.subject.note_death(present, HOW, attributable=attributable)
        assert not self.subject.inside
        if story is not None:
            [rid] = present
            self.subject.forget(rid)
            self.blamed.append(rid)
            self.barren = 0
            present = []
        self.waiting += present


@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 6), min_size=1, max_size=33),
    st.dictionaries(st.integers(0, 32), st.integers(0, 5), max_size=5),
)
def test_exactly_the_deadly_requests_are_found(
    seed: int, lengths: list[int], deadly: dict[int, int]
) -> None:
    run = Run(random.Random(seed), lengths, deadly)
    run.simulate()

    found = {rid for rid, position in run.deadly.items() if position < run.lengths[rid]}
    assert sorted(run.blamed) == sorted(found)
    for rid, length in run.lengths.items():
        assert run.generated[rid] == (run.deadly[rid] if rid in found else length)
    assert run.max_barren <= 3 + math.ceil(math.log2(len(lengths)))
    assert not run.subject.stories


@given(st.integers(0, 2**32), st.integers(1, 33))
def test_if_all_are_deadly_all_are_blamed_one_by_one(seed: int, count: int) -> None:
    run = Run(random.Random(seed), [3] * count, dict.fromkeys(range(count), 0))
    run.simulate()

    assert sorted(run.blamed) == sorted(run.lengths)
    assert run.max_barren <= 3 + math.ceil(math.log2(count))
