"""Layers as operations over two and three ranks: the tokens of one process in all situations."""

from __future__ import annotations

import pytest

from kvd.worker.native import build
from protocol.worker import RowCached, RowPreempted, RowResumed, RowTokens, StartLevel
from tests.worker.gang.gang import GangProcesses, tokens_of
from tests.worker.gang.models import save
from tests.worker.gang.test_gang import GREEDY, LONG, SAMPLED, Single, pair, reclaim, run, running
from tests.worker.process.peer import submit

pytestmark = [
    pytest.mark.process,
    pytest.mark.mlx,
    pytest.mark.skipif(build.compiler() is None, reason="needs a compiler"),
]
THREE = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 192, "head_dim": 64}
CONTINUED = submit(
    "continued", prompt=None, tokens=[*LONG, 17], max_tokens=6, sampling=GREEDY, ignore_eos=True
)


@pytest.fixture(scope="module", params=[("qwen2", 2, {}), ("llama", 3, THREE)], ids=["2", "3"])
def workers(request, tmp_path_factory):
    """A gang and a process that serve the same model; both have a checkpoint of ``LONG``."""
    name, ranks, changes = request.param
    source = str(save(tmp_path_factory.mktemp(name) / "model", name, **changes))
    gang, single = GangProcesses(ranks), Single("mlx")
    try:
        for worker, fields in ((gang, {"ranks": ranks}), (single, {})):
            info = worker.load(source, **fields)
            used = {path.name for path in info.paths if path.used}
            assert {"native library", "whole layers", "compiled steps", "packed prefill"} <= used
        first = [submit("first", prompt=None, tokens=LONG, max_tokens=4, sampling=GREEDY)]
        assert run(gang, first) == run(single, first)
        yield gang, single
    finally:
        gang.close()
        single.close()


def test_rows_that_join_and_leave(workers):
    first, later = pair("joined ", 24), [CONTINUED, *pair("later ", 8)]
    found, expected = (run(worker, first, later) for worker in workers)
    assert found == expected
    assert len(found["joined sampled"][0]) == 2


def test_a_prompt_that_continues_from_a_checkpoint(workers):
    found, expected = (
        (run(worker, [CONTINUED]), worker.of(RowCached, "continued")[0].outcome.reused_tokens)
        for worker in workers
    )
    assert found == expected
    assert found[1] >= 256


def test_preempted_rows(workers):
    gang, single = workers
    requests = pair("preempted ", 30)
    running(gang, *requests)
    assert reclaim(gang, "preempt", 1 << 30).freed_bytes > 0
    gang.wait_for_end(*[request.rid for request in requests])
    assert gang.of(RowPreempted)
    assert len(gang.of(RowResumed)) == len(requests)
    expected = run(single, requests)
    assert all(tokens_of(gang, rid) == tokens for rid, (tokens, *_) in expected.items())


def test_rows_of_less_precision(workers):
    for worker in workers:
        worker.send(StartLevel(level=2))
    requests = pair("low ", 12)
    found, expected = (run(worker, requests) for worker in workers)
    for worker in workers:
        worker.send(StartLevel(level=0))
    assert found == expected
    assert {report.level for report in workers[0].of(RowTokens)} == {2}


def test_rows_that_step_down_and_later_ones(workers):
    later = [
        submit("after", prompt="Now", max_tokens=20, n=3, sampling=SAMPLED, ignore_eos=True),
        submit("own", prompt=None, tokens=LONG[90:], max_tokens=9, sampling=GREEDY),
    ]
    found = []
    for worker in workers:
        requests = pair("stepped ", 40)
        running(worker, *requests)
        assert reclaim(worker, "precision", 1 << 30, level=2).freed_bytes > 0
        worker.wait_for_end(*[request.rid for request in requests])
        levels = [report.level for report in worker.of(RowTokens, "stepped greedy")]
        assert (levels[0], levels[-1]) == (0, 2)
        found.append(run(worker, later))
    assert found[0] == found[1]
