"""Prompts with the same beginning: waiting, its bound, and where checkpoints are needed."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.worker.prefix.queued_paths import QueuedPaths, path_of
from kvd.worker.scheduling.prefill_order import PrefillOrder
from kvd.worker.scheduling.request import QueueKey, ScheduledRequest
from kvd.worker.scheduling.scheduler import Scheduler
from kvd.worker.scheduling.shared_prompts import without_waiting

C = 4


def request(number, prompt, priority=0, prompt_started=None):
    """Return a request with this many prefilled tokens; None: its prompt has not started."""
    return ScheduledRequest(
        rid=f"{number:02}",
        prompt_len=len(prompt),
        max_new=1,
        queue_key=QueueKey(number - 1000 * priority, number),
        priority=priority,
        deadline=None,
        choices=1,
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
    """At most twice the chunks of the requests ahead, even if some of them are cancelled."""
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


# Where prompts diverge.


@given(
    waiting=st.lists(st.tuples(PROMPTS, st.sampled_from(["", "salt"])), max_size=8),
    removed=st.integers(0, 8),
    reads=PROMPTS,
)
def test_checkpoints_are_made_where_a_queued_prompt_diverges(waiting, removed, reads):
    paths = QueuedPaths()
    for prompt, salt in waiting:
        paths.add(path_of(prompt, salt, C))
    for prompt, salt in waiting[:removed]:
        paths.remove(path_of(prompt, salt, C))
    common = set()
    for prompt, salt in waiting[removed:]:
        whole = min(len(prompt) - 1, len(reads) - 1) // C
        shared = 0
        while shared < whole and prompt[: C * shared + C] == reads[: C * shared + C]:
            shared += 1
        common |= {shared} - {0} if not salt else set()
    path = path_of(reads, "", C)

    assert paths.divergences(path) == common
    assert not any(paths.diverges_at(path, chunks) for chunks in (0, len(path) + 1))
    for prompt, salt in waiting[removed:]:
        paths.remove(path_of(prompt, salt, C))
    assert not len(paths)


def test_a_lookup_among_ten_thousand_queued_prompts_reads_only_the_path():
    """One stored name per distinct beginning, and a lookup for each name of the path."""
    paths, shared = QueuedPaths(), [1] * 1500
    for number in range(10_000):
        paths.add(path_of([*shared, number, number], "", 256))
    assert len(paths) == 5
    lookups = Counter()

    class Counted(Counter):
        def __getitem__(self, name):
            lookups[name] += 1
            return super().__getitem__(name)

    paths._counts = Counted(paths._counts)
    assert paths.divergences(path_of([*shared, *range(600)], "", 256)) == {5}
    assert lookups.total() <= 2 * 8
