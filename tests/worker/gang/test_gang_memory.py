"""A gang gives memory back by every method, and its requests continue with the right tokens."""

from __future__ import annotations

import pytest

from protocol.worker import Reclaim, Reclaimed, RowPreempted, RowResumed, RowTokens, StartLevel
from tests.worker.gang.gang import GangProcesses, tokens_of
from tests.worker.gang.test_gang import GREEDY, LONG, SAMPLED, Single, run
from tests.worker.process.peer import submit

pytestmark = [pytest.mark.process, pytest.mark.mlx]


@pytest.fixture(scope="module")
def single():
    made = Single("mlx")
    made.load("demo")
    yield made
    made.close()


@pytest.fixture(scope="module")
def gang():
    made = GangProcesses(2)
    made.load("demo", ranks=2)
    yield made
    made.close()


def running(worker, *requests):
    worker.reports.clear()
    worker._ends.clear()
    worker.send(*requests)
    worker.wait_for(lambda: all(len(worker.of(RowTokens, one.rid)) > 1 for one in requests))


def reclaim(worker, method, wanted_bytes, level=0):
    worker.send(Reclaim(seq=5, method=method, wanted_bytes=wanted_bytes, level=level))
    return worker.wait_for(lambda: worker.of(Reclaimed))[0]


def pair(prefix, tokens):
    """Return a greedy request of a long prompt, and a sampled one with two choices."""
    fields = {"max_tokens": tokens, "ignore_eos": True}
    return [
        submit(f"{prefix}greedy", prompt=None, tokens=LONG, sampling=GREEDY, **fields),
        submit(f"{prefix}sampled", prompt="One day", n=2, sampling=SAMPLED, **fields),
    ]


def test_preempted_requests_continue_with_the_same_tokens(gang, single):
    requests = pair("a ", 30)
    running(gang, *requests)
    found = reclaim(gang, "preempt", 1 << 30)
    assert found.freed_bytes > 0
    assert {report.where for report in gang.of(RowPreempted)} == {"recompute"}
    gang.wait_for_end(*[request.rid for request in requests])
    assert len(gang.of(RowResumed)) == len(requests)
    expected = run(single, requests)
    assert all(tokens_of(gang, rid) == tokens for rid, (tokens, *_) in expected.items())


def test_rows_step_down_while_they_decode(gang):
    requests = pair("b ", 40)
    running(gang, *requests)
    assert reclaim(gang, "precision", 1 << 30, level=2).freed_bytes > 0
    gang.wait_for_end(*[request.rid for request in requests])
    levels = [report.level for report in gang.of(RowTokens, "b greedy")]
    assert (levels[0], levels[-1]) == (0, 2)


def test_rows_that_start_at_a_lower_level_get_the_tokens_of_one_process(gang, single):
    requests = pair("c ", 10)
    for worker in (gang, single):
        worker.send(StartLevel(level=2))
    found = run(gang, requests)
    assert {report.level for report in gang.of(RowTokens)} == {2}
    assert found == run(single, requests)
    for worker in (gang, single):
        worker.send(StartLevel(level=0))


def test_spare_memory_and_checkpoints_are_given_back(gang):
    (request,) = pair("d ", 8)[:1]
    run(gang, [request])
    before = gang.granted
    assert reclaim(gang, "prefixes", 1 << 30).freed_bytes > 0
    assert gang.granted < before
    assert run(gang, [request])[request.rid][2] == 8
