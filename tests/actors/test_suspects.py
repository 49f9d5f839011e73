"""Poison is told from bad luck: who dies alone is found, and nobody else is blamed."""

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


def test_a_kill_from_outside_is_nobodys_fault() -> None:
    subject = inside("a")
    for _ in range(5):
        assert died(subject, "a", attributable=False) is None
        assert not subject.careful
        subject.enter("a")
    assert subject.stories == {}


def test_one_alone_is_tried_twice_and_then_blamed_with_its_story() -> None:
    subject = inside("a")
    assert died(subject, "a") is None
    assert subject.careful
    assert subject.next_group() == ["a"]
    subject.enter("a")
    assert died(subject, "a") == [f"{HOW}; 1 inside, 1 without a new token"] * 2
    assert subject.next_group() == []
    assert not subject.careful


def test_a_new_token_ends_the_suspicion() -> None:
    subject = inside("a")
    died(subject, "a")
    subject.next_group()
    subject.enter("a")
    subject.note_progress("a")
    assert died(subject, "a") is None  # it goes on from where it is
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
    assert died(subject, "a", "b", "c") is None  # c is tried apart, then those who work
    assert subject.groups == [["c"], ["a", "b"]]
    assert subject.next_group() == ["c"]
    subject.enter("c")
    assert died(subject, "c") is not None
    assert subject.next_group() == ["a", "b"]


def test_a_long_queue_does_not_hold_up_those_who_run() -> None:
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
    subject.note_queued("q2")  # it is in it for the second time
    died(subject, "runs", "reads", "q1", "q2")
    assert subject.groups == [["q1", "q2"], ["reads", "runs"]]


def test_where_all_are_in_the_queue_one_of_them_it_was() -> None:
    subject = inside("a", "b")
    subject.note_queued("a")
    subject.note_queued("b")
    died(subject, "a", "b")
    assert subject.groups == [["a"], ["b"]]


def test_a_kill_from_outside_in_a_trial_repeats_it() -> None:
    subject = inside("a", "b")
    died(subject, "a", "b")
    assert subject.next_group() == ["a"]
    subject.enter("a")
    assert died(subject, "a", attributable=False) is None
    assert subject.groups == [["a"], ["b"]]


def test_who_was_on_the_way_was_not_there() -> None:
    subject = inside("a", "b")
    assert died(subject, "a") is None
    subject.note_returned("b")
    assert set(subject.stories) == {"a"}
    assert subject.next_group() == ["a"]


def test_who_is_over_is_tried_no_more() -> None:
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
    """A model whose process dies of some requests, and is killed now and then."""

    def __init__(self, draw: random.Random, lengths: list[int], deadly: dict[int, int]) -> None:
        self.draw = draw
        self.subject = Suspects()
        self.lengths = {f"r{at}": length for at, length in enumerate(lengths)}
        self.deadly = {f"r{at}": place for at, place in deadly.items() if at < len(lengths)}
        """The token that ends the process, in place of being made."""
        self.made = dict.fromkeys(self.lengths, 0)
        self.waiting = list(self.lengths)
        self.blamed: list[str] = []
        self.barren = 0
        """Deaths that were nobody's doing but the process's since the last token or blame."""
        self.most_barren = 0

    def go(self) -> None:
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
            # Some come later than others.
            count = self.draw.randint(0 if subject.inside else 1, len(self.waiting) or 1)
            self.enter(self.waiting[:count])

    def enter(self, rids: list[str]) -> None:
        for rid in list(rids):
            self.waiting.remove(rid)
            self.subject.enter(rid)
            if self.draw.random() < 0.4:
                self.subject.note_queued(rid)

    def step(self, rid: str) -> None:
        if self.deadly.get(rid) == self.made[rid]:
            self.barren += 1
            self.most_barren = max(self.most_barren, self.barren)
            self.die(attributable=True)
            return
        self.barren = 0
        self.made[rid] += 1
        self.subject.note_progress(rid)
        if self.made[rid] == self.lengths[rid]:
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
def test_the_deadly_are_found_and_nobody_else(
    seed: int, lengths: list[int], deadly: dict[int, int]
) -> None:
    run = Run(random.Random(seed), lengths, deadly)
    run.go()

    found = {rid for rid, place in run.deadly.items() if place < run.lengths[rid]}
    assert sorted(run.blamed) == sorted(found)
    for rid, length in run.lengths.items():
        assert run.made[rid] == (run.deadly[rid] if rid in found else length)
    assert run.most_barren <= 3 + math.ceil(math.log2(len(lengths)))
    assert not run.subject.stories


@given(st.integers(0, 2**32), st.integers(1, 33))
def test_where_everything_is_deadly_all_are_blamed_one_by_one(seed: int, count: int) -> None:
    run = Run(random.Random(seed), [3] * count, dict.fromkeys(range(count), 0))
    run.go()

    assert sorted(run.blamed) == sorted(run.lengths)
    assert run.most_barren <= 3 + math.ceil(math.log2(count))
