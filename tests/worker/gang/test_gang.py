"""A gang gives the same tokens as one process, for every kind of request, and gives memory back.

One gang and one process serve all tests, the last of which ends the gang.
"""

from __future__ import annotations

import re

import pytest

from kvd.host.memory import reader
from protocol.embedding import EmbedOptions, vector_of
from protocol.gang import PEER_LOST
from protocol.tools import Grammar
from protocol.types import Sampling
from protocol.worker import (
    ChoiceFinished,
    Reclaim,
    Reclaimed,
    RowCached,
    RowPreempted,
    RowPrompt,
    RowResumed,
    RowTokens,
    StartLevel,
    Stop,
)
from tests.worker.gang.gang import GangProcesses, tokens_of
from tests.worker.process.peer import Process, submit

pytestmark = [pytest.mark.process, pytest.mark.mlx]
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=0.8, top_p=0.9, seed=7)


class Single(Process):
    deadline_s = GangProcesses.deadline_s


@pytest.fixture(scope="module")
def single():
    made = Single("mlx")
    made.load("demo", embeddings="any")
    yield made
    made.close()


@pytest.fixture(scope="module")
def gang():
    made = GangProcesses(2)
    made.load("demo", ranks=2, embeddings="any")
    yield made
    made.close()


def run(worker, requests, later=()):
    """Run requests, and the ``later`` ones once the first has its first tokens."""
    worker.reports.clear()
    worker._ends.clear()
    worker.send(*requests)
    if later:
        worker.wait_for(lambda: len(worker.of(RowTokens, requests[0].rid)) > 2)
        worker.send(*later)
    rids = [request.rid for request in [*requests, *later]]
    ends = worker.wait_for_end(*rids)
    return {
        end.rid: (tokens_of(worker, end.rid), end.reason, end.usage.completion_tokens)
        for end in ends
    }


LONG = list(range(5, 305))


def requests(prefix):
    def made(rid, **fields):
        return submit(f"{prefix}{rid}", ignore_eos=True, **fields)

    first = [
        # Its row commits a page that a flush has written.
        made("greedy", prompt=None, tokens=LONG[:120], max_tokens=14, sampling=GREEDY),
        made("sampled", prompt="Once upon a time", max_tokens=10, sampling=SAMPLED),
    ]
    later = [
        made("long", prompt=None, tokens=LONG, max_tokens=8, sampling=GREEDY),
        made("choices", prompt="A list of", max_tokens=6, n=3, sampling=SAMPLED),
        made("one token", prompt=None, tokens=[9], max_tokens=5, sampling=GREEDY),
        made(
            "penalized",
            prompt="one two one two",
            max_tokens=7,
            sampling=Sampling(temperature=0.7, repetition_penalty=1.3, seed=3),
            logprobs=2,
        ),
    ]
    return first, later


def test_joins_and_leaves_in_the_middle_of_others(gang, single):
    first, later = requests("a ")
    found = run(gang, first, later)
    assert found == run(single, first, later)
    assert all(count > 0 for _, _, count in found.values())
    assert len(found["a choices"][0]) == 3
    assert len(gang.of(ChoiceFinished, "a choices")) == 3


def test_a_request_gets_the_same_tokens_alone_and_in_company(gang):
    first, later = requests("b ")
    company = run(gang, first, later)
    for request in (first[1], later[1]):
        assert run(gang, [request])[request.rid] == company[request.rid]


def test_a_prompt_continues_from_a_checkpoint(gang, single):
    def again(worker):
        one = submit("c", prompt=None, tokens=[*LONG, 17], max_tokens=5, sampling=GREEDY)
        found = run(worker, [one])
        return found, worker.of(RowCached, "c")[0].outcome.reused_tokens

    found, cached = again(gang)
    assert cached >= 256
    assert (found, cached) == again(single)


def test_prompts_are_scored_and_answers_follow_a_grammar(gang, single):
    scored = submit(
        "d", prompt=None, tokens=LONG[:150], max_tokens=3, sampling=GREEDY, prompt_logprobs=1
    )
    grammar = Grammar("regex", r"[a-c]{3} \d{2}")
    bound = submit("e", prompt="Now", max_tokens=12, sampling=SAMPLED, grammar=grammar)

    def both(worker):
        found = run(worker, [scored, bound])
        parts = [report.logprobs for report in worker.of(RowPrompt, "d")]
        logprobs = [token.logprob for part in parts for token in part]
        return found, worker.text("e"), logprobs

    (found, text, logprobs), (expected, expected_text, right) = both(gang), both(single)
    assert (found, text) == (expected, expected_text)
    assert re.fullmatch(grammar.value, text)
    assert len(logprobs) == 150
    assert logprobs[0] is None
    assert logprobs[1:] == pytest.approx(right[1:], abs=1e-3)


def test_an_embedding_is_that_of_one_process(gang, single):
    request = submit("f", prompt=None, tokens=LONG[:90], max_tokens=1, embed=EmbedOptions())

    def vector(worker):
        run(worker, [request])
        return vector_of(worker.ends()[0].embedding)

    assert vector(gang) == pytest.approx(vector(single), abs=1e-4)


def test_one_grant_covers_what_all_ranks_hold(gang):
    run(gang, [submit("g", prompt=None, tokens=LONG, max_tokens=3, sampling=GREEDY)])
    held = [reader().footprint(process.pid) for process in gang.processes]
    assert min(held) > 0.2 * max(held)
    assert sum(held) <= gang.granted


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
    requests = pair("h ", 30)
    running(gang, *requests)
    found = reclaim(gang, "preempt", 1 << 30)
    assert found.freed_bytes > 0
    assert {report.where for report in gang.of(RowPreempted)} == {"recompute"}
    gang.wait_for_end(*[request.rid for request in requests])
    assert len(gang.of(RowResumed)) == len(requests)
    expected = run(single, requests)
    assert all(tokens_of(gang, rid) == tokens for rid, (tokens, *_) in expected.items())


def test_rows_step_down_while_they_decode(gang):
    requests = pair("i ", 40)
    running(gang, *requests)
    assert reclaim(gang, "precision", 1 << 30, level=2).freed_bytes > 0
    gang.wait_for_end(*[request.rid for request in requests])
    levels = [report.level for report in gang.of(RowTokens, "i greedy")]
    assert (levels[0], levels[-1]) == (0, 2)


def test_rows_that_start_at_a_lower_level_get_the_tokens_of_one_process(gang, single):
    requests = pair("j ", 10)
    for worker in (gang, single):
        worker.send(StartLevel(level=2))
    found = run(gang, requests)
    assert {report.level for report in gang.of(RowTokens)} == {2}
    assert found == run(single, requests)
    for worker in (gang, single):
        worker.send(StartLevel(level=0))


def test_spare_memory_and_checkpoints_are_given_back(gang):
    (request,) = pair("k ", 8)[:1]
    run(gang, [request])
    before = gang.granted
    assert reclaim(gang, "prefixes", 1 << 30).freed_bytes > 0
    assert gang.granted < before
    assert run(gang, [request])[request.rid][2] == 8


def test_an_ordered_end_leaves_no_process(gang):
    gang.send(Stop())
    gang.read_all()
    assert gang.wait() == [0, PEER_LOST]
