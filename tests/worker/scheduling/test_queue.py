"""The queue's order, and the bound on later requests that overtake an earlier one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.worker.scheduling.queue import RequestQueue
from kvd.worker.scheduling.request import ScheduledRequest

AGE = 100


def submit(queue, rid, work, priority=0):
    key = queue.new_key(work, priority)
    request = ScheduledRequest(rid, 1, 1, key, priority, None, choices=1)
    queue.add(request)
    return request


def served(queue):
    order = []
    while (head := queue.head) is not None:
        queue.remove(head)
        order.append(head.rid)
    return "".join(order)


def test_first_come_first_served():
    queue = RequestQueue(AGE)
    for rid in "abc":
        submit(queue, rid, 10)
    assert len(queue) == 3
    assert served(queue) == "abc"
    assert queue.head is None


def test_the_example_in_the_docstring_of_the_queue():
    queue = RequestQueue(AGE)
    for rid, priority in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        submit(queue, rid, 60, priority)
    assert [
        request.queue_key.start for request in sorted(queue, key=lambda request: request.rid)
    ] == [
        0,
        -40,
        120,
        80,
    ]
    assert served(queue) == "badc"


@pytest.mark.parametrize(("work", "order"), [(99, "ba"), (100, "ab"), (101, "ab")])
def test_a_priority_step_is_worth_age_tokens_of_later_work(work, order):
    queue = RequestQueue(AGE)
    submit(queue, "a", work)
    submit(queue, "b", 1, priority=1)
    assert served(queue) == order


def test_negative_priorities_are_served_after_later_requests():
    queue = RequestQueue(AGE)
    submit(queue, "a", 10, priority=-1)
    submit(queue, "b", 10)
    assert served(queue) == "ba"


def test_a_requeued_request_keeps_its_key():
    queue = RequestQueue(AGE)
    first = submit(queue, "a", 10)
    submit(queue, "b", 10, priority=1)
    queue.remove(first)
    submit(queue, "c", 10)
    queue.add(first)
    assert served(queue) == "bac"


def overtaking(arrivals, serve_first):
    """Serve requests in an adversary's pattern until the first arrival is the head.

    ``arrivals``: (work, priority) of each request. ``serve_first``: how many requests to serve
    after each arrival. Return (work, priority) of the later arrivals that were served before the
    first one, in arrival order.
    """
    queue = RequestQueue(AGE)
    overtakers = []
    for number, (work, priority) in enumerate(arrivals):
        submit(queue, str(number), work, priority)
        for _ in range(serve_first[number]):
            if queue.head is not None and queue.head.rid != "0":
                overtakers.append(int(queue.head.rid))
                queue.remove(queue.head)
    while queue.head.rid != "0":
        overtakers.append(int(queue.head.rid))
        queue.remove(queue.head)
    return [arrivals[number] for number in sorted(overtakers)]


def bound(victim, overtakers):
    """Return the bound that the docstring of `queue` states."""
    highest = max(priority for _, priority in overtakers)
    return (highest - victim[1]) * AGE + overtakers[-1][0]


def test_no_arrival_pattern_exceeds_the_bound_and_one_comes_close():
    """Try every sequence of up to five later requests with these works and priorities."""
    victim = (1, 0)
    choices = [(work, priority) for work in (1, 49, 99, 300) for priority in (0, 1, 2)]
    closest = 0.0

    def attack(arrivals, depth):
        nonlocal closest
        overtakers = overtaking(arrivals, [0] * len(arrivals))
        if overtakers:
            brought, allowed = sum(work for work, _ in overtakers), bound(victim, overtakers)
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
def test_the_bound_holds_for_any_serving_pattern(arrivals, data):
    serve = data.draw(st.lists(st.integers(0, 2), min_size=len(arrivals), max_size=len(arrivals)))
    overtakers = overtaking(arrivals, serve)
    if overtakers:
        assert sum(work for work, _ in overtakers) < bound(arrivals[0], overtakers)
        assert all(priority > arrivals[0][1] for _, priority in overtakers)


@given(st.lists(requests, max_size=40))
def test_requests_of_one_priority_are_served_in_arrival_order(arrivals):
    queue = RequestQueue(AGE)
    for number, (work, priority) in enumerate(arrivals):
        submit(queue, f"{number:02}", work, priority)
    last = {}
    while (head := queue.head) is not None:
        queue.remove(head)
        assert last.get(head.priority, "") < head.rid
        last[head.priority] = head.rid
