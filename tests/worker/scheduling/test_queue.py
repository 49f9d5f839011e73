"""The queue's order, and what those that come later can bring in front of a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.scheduling.queue import RequestQueue
from kvd.worker.scheduling.request import ScheduledRequest

AGE = 100


def arrive(line, rid, work, priority=0):
    place = line.new_key(work, priority)
    row = ScheduledRequest(rid, 1, 1, place, priority, None, choices=1)
    line.add(row)
    return row


def served(line):
    order = []
    while (head := line.head) is not None:
        line.remove(head)
        order.append(head.rid)
    return "".join(order)


def test_first_come_first_served():
    line = RequestQueue(AGE)
    for rid in "abc":
        arrive(line, rid, 10)
    assert len(line) == 3
    assert served(line) == "abc"
    assert line.head is None


def test_the_docstrings_example():
    line = RequestQueue(AGE)
    for rid, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        arrive(line, rid, 60, priority)
    assert [row.queue_key.start for row in sorted(line, key=lambda row: row.rid)] == [
        0,
        -40,
        120,
        80,
    ]
    assert served(line) == "badc"


@pytest.mark.parametrize(("work", "order"), [(99, "ba"), (100, "ab"), (101, "ab")])
def test_a_step_of_priority_is_worth_so_much_later_work_and_no_more(work, order):
    line = RequestQueue(AGE)
    arrive(line, "a", work)
    arrive(line, "b", 1, priority=1)
    assert served(line) == order


def test_negative_priorities_wait_for_others():
    line = RequestQueue(AGE)
    arrive(line, "a", 10, priority=-1)
    arrive(line, "b", 10)
    assert served(line) == "ba"


def test_who_comes_back_has_the_place_of_its_arrival():
    line = RequestQueue(AGE)
    first = arrive(line, "a", 10)
    arrive(line, "b", 10, priority=1)
    line.remove(first)
    arrive(line, "c", 10)
    line.add(first)
    assert served(line) == "bac"


def overtaking(arrivals, serve_first):
    """Serve as the adversary says until the first arrival is served.

    ``arrivals``: (work, priority) each. ``serve_first``: how many are served after each arrival.
    Returns, of those that came later and went first, (work, priority) in order of arrival.
    """
    line = RequestQueue(AGE)
    gone = []
    for number, (work, priority) in enumerate(arrivals):
        arrive(line, str(number), work, priority)
        for _ in range(serve_first[number]):
            if line.head is not None and line.head.rid != "0":
                gone.append(int(line.head.rid))
                line.remove(line.head)
    while line.head.rid != "0":
        gone.append(int(line.head.rid))
        line.remove(line.head)
    return [arrivals[number] for number in sorted(gone)]


def bound(victim, overtakers):
    """Of the module docstring."""
    highest = max(priority for _, priority in overtakers)
    return (highest - victim[1]) * AGE + overtakers[-1][0]


def test_no_adversary_passes_the_bound_and_one_comes_close():
    """Every sequence of up to five later requests, of all these works and priorities."""
    victim = (1, 0)
    choices = [(work, priority) for work in (1, 49, 99, 300) for priority in (0, 1, 2)]
    closest = 0.0

    def attack(arrivals, depth):
        nonlocal closest
        gone = overtaking(arrivals, [0] * len(arrivals))
        if gone:
            brought, allowed = sum(work for work, _ in gone), bound(victim, gone)
            assert brought < allowed
            closest = max(closest, brought / allowed)
        if depth:
            for choice in choices:
                attack([*arrivals, choice], depth - 1)

    attack([victim], 4)
    assert closest > 0.99


requests = st.tuples(st.integers(1, 400), st.integers(-3, 3))


@given(
    arrivals=st.lists(requests, min_size=2, max_size=40),
    data=st.data(),
)
def test_the_bound_holds_however_the_line_moves(arrivals, data):
    serve = data.draw(st.lists(st.integers(0, 2), min_size=len(arrivals), max_size=len(arrivals)))
    gone = overtaking(arrivals, serve)
    if gone:
        assert sum(work for work, _ in gone) < bound(arrivals[0], gone)
        assert all(priority > arrivals[0][1] for _, priority in gone)


@given(st.lists(requests, max_size=40))
def test_within_a_priority_the_order_is_that_of_arrival(arrivals):
    line = RequestQueue(AGE)
    for number, (work, priority) in enumerate(arrivals):
        arrive(line, f"{number:02}", work, priority)
    last = {}
    while (head := line.head) is not None:
        line.remove(head)
        assert last.get(head.priority, "") < head.rid
        last[head.priority] = head.rid
