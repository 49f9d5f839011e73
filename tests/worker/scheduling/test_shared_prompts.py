"""A prompt waits while an earlier request prefills the same beginning, for a bounded time."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.worker.prefix.queued_paths import path_of
from kvd.worker.scheduling.prefill_order import PrefillOrder
from kvd.worker.scheduling.scheduler import Scheduler
from kvd.worker.scheduling.shared_prompts import without_waiting
from tests.worker.scheduling.helpers import request_of

C = 4


def request(number, prompt, priority=0, prompt_started=None):
    """Return a request; ``prompt_started``: its prefilled tokens, None before its prefill."""
    return request_of(
        f"{number:02}",
        len(prompt),
        number,
        priority,
        prefilled=prompt_started or 0,
        prompt_started=prompt_started is not None,
        path=path_of(prompt, "", C),
    )


@pytest.mark.parametrize(
    ("reads", "waits"),
    [(None, False), (0, True), (C, True), (2 * C, False), (3 * C, False)],
)
def test_a_prompt_waits_while_its_own_beginning_is_prefilled(reads, waits):
    first, second = request(0, [1] * 20, prompt_started=reads), request(1, [1] * 11 + [2] * 9)
    assert (second not in without_waiting([second, first], C)) == waits
    assert first in without_waiting([second, first], C)


@pytest.mark.parametrize(
    ("shared", "read", "waits"),
    [(2, 2, True), (3, 2, True), (1, 2, False), (0, 2, False), (3, 0, False), (4, 4, True)],
)
def test_a_prompt_waits_for_a_read_of_which_it_shares_everything(shared, read, waits):
    """A read leaves a checkpoint at its end only."""
    first = request(0, [1] * 20, prompt_started=read * C)
    first.suspended = first.reads_prompt = True
    second = request(1, [1] * (shared * C) + [2] * (20 - shared * C))
    earlier = request(-1, [1] * 20)
    expected = [earlier] if waits else [earlier, second]
    assert without_waiting([second, first, earlier], C) == expected


def test_a_prompt_that_is_being_read_is_waited_for_until_its_row_is_complete():
    scheduler = Scheduler(max_rows=3, chunk=C)
    path = path_of([1] * (2 * C + 1), "", C)
    for rid in "ab":
        scheduler.submit(rid, 2 * C + 1, 1, path=path)
    scheduler.plan(lambda _pages, _rows: 0)
    scheduler.suspend("a", reads_prompt=True)
    scheduler.skip_to("a", 2 * C)  # all of it: the request counts as decoding
    assert scheduler.cache_candidates == ()
    assert scheduler.next_group() == ()
    scheduler.resume("a")
    assert scheduler.cache_candidates == ("b",)


def test_requests_wait_only_for_equal_beginnings_ahead_of_them():
    prefilling = request(1, [1] * 20, prompt_started=C)
    before, other, begun = (
        request(0, [1] * 20),
        request(2, [2] * 20),
        request(3, [1] * 20, prompt_started=0),
    )
    assert without_waiting([begun, other, before, prefilling], C) == [
        before,
        prefilling,
        other,
        begun,
    ]


def test_a_prompt_without_path_never_waits():
    scored = request(1, [1] * 20)
    scored.path = ()
    assert scored in without_waiting([request(0, [1] * 20, prompt_started=0), scored], C)


def test_suspended_preempted_and_finished_requests_are_not_waited_for():
    scheduler = Scheduler(max_rows=3, chunk=C)
    path = path_of([1] * 20, "", C)
    for rid in "abc":
        scheduler.submit(rid, 20, 1, path=path)
    scheduler.plan(lambda _pages, _rows: 0)
    scheduler.skip_to("a", 0)
    assert scheduler.cache_candidates == ()
    for leave, come_back in (
        (scheduler.suspend, scheduler.resume),
        (scheduler.preempt, scheduler.states.requeue_preempted),
    ):
        leave("a")
        assert scheduler.cache_candidates == ("b", "c")
        come_back("a")
        scheduler.plan(lambda _pages, _rows: 0)
        assert scheduler.cache_candidates == ()
    scheduler.finish("a")
    assert scheduler.cache_candidates == ("b", "c")


PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=14).map(
    lambda halves: [half for half in halves for _ in range(2)]
)


@settings(max_examples=200)
@given(
    crowd=st.lists(
        st.tuples(PROMPTS, st.integers(0, 2), st.integers(0, 12)), min_size=1, max_size=9
    ),
    cancelled=st.sets(st.integers(0, 8)),
    group=st.booleans(),
)
def test_the_bound_of_the_prefill_order_includes_waiting(crowd, cancelled, group):
    """A request waits for at most twice the chunks of those ahead, even if some are cancelled."""
    order = PrefillOrder(chunk=C, budget=C, group=group)
    coming = [(when, request(at, prompt, rank)) for at, (prompt, rank, when) in enumerate(crowd)]
    allowed = {
        one.rid: 2
        * sum(-(-other.remaining // C) for _, other in coming if other.queue_key <= one.queue_key)
        for _, one in coming
    }
    waited, here = Counter(), []
    for step in range(200):
        here += [one for when, one in coming if when == step]
        requests = [one for one in here if one.remaining]
        waited.update(one.rid for one in requests)
        able = without_waiting(requests, C)
        chosen = order.choose(able)
        assert bool(chosen) == bool(requests)
        for chunk in chosen:
            one = next(one for one in requests if one.rid == chunk.rid)
            one.prompt_started, one.prefilled = True, chunk.end
        if chosen:
            order.pass_done()
        if step == 6:  # a prefilling request may end
            here = [one for one in here if int(one.rid) not in cancelled]
    assert not any(one.remaining for one in here)
    assert all(groups <= allowed[rid] for rid, groups in waited.items())
