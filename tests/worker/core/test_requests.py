"""All options of a request on the real engine: sampling, stops, logprobs, choices, preemption."""

from __future__ import annotations

import functools
import gc
import math
import random
import tracemalloc
from collections.abc import Callable

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from protocol.framing import decode_command, encode_frame
from protocol.kv import KVSpec
from protocol.types import Sampling
from protocol.worker import Submit
from tests.breadth import ALL
from tests.worker import shallow
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.prompts import prompt_of

pytestmark = pytest.mark.mlx
WARM = Sampling(temperature=0.9, seed=3)


@pytest.fixture(scope="module")
def dense() -> Driver:
    return Driver(shallow.path(), kv=KVSpec(16, 16))


def logprobs_of(driver: Driver, tokens: list[int]) -> np.ndarray:
    """Return the logprobs of mlx-lm, ``[tokens, vocabulary]``."""
    model = driver.engine._runner.model
    logits = model(mx.array([tokens]), cache=make_prompt_cache(model))[0].astype(mx.float32)
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


@pytest.mark.parametrize("length", [1, 2, 70, 300])
def test_logprobs_are_those_of_a_plain_forward_pass(dense: Driver, length: int) -> None:
    prompt = prompt_of(length, 5)
    found = dense.alone(prompt, WARM, max_tokens=70, logprobs=4, prompt_logprobs=3, ignore_eos=True)
    right = logprobs_of(dense, prompt + found.tokens)

    assert [one.token for one in found.prompt_logprobs] == prompt
    assert [one.token for one in found.logprobs] == found.tokens
    assert found.prompt_logprobs[0].logprob is None
    logprobs = found.prompt_logprobs[1:] + found.logprobs
    for position, one in enumerate(logprobs):
        assert one.logprob is not None
        assert math.isfinite(one.logprob)
        assert abs(one.logprob - right[position][one.token]) < 1e-4
        best = sorted(right[position], reverse=True)[: len(one.top)]
        values = [other.logprob for other in one.top]
        np.testing.assert_allclose(values, best, atol=1e-4)
    assert {len(one.top) for one in found.logprobs} == {4}
    assert {len(one.top) for one in found.prompt_logprobs[1:]} <= {3}


def test_a_queued_prompt_takes_few_bytes_per_token(
    demo: Driver, request: pytest.FixtureRequest
) -> None:
    """Its command, decoded from the daemon's frame, takes 40 bytes per token until it is queued."""
    tokens = demo.info.context_length - 8
    assert tokens > 10_000
    frame = encode_frame(
        Submit(rid="long", tokens=prompt_of(tokens, 1), sampling=WARM, max_tokens=4)
    )
    demo.alone("What loads lazily does not count.", WARM, max_tokens=1)
    gc.collect()
    tracemalloc.start()
    request.addfinalizer(tracemalloc.stop)
    demo.engine.submit(decode_command(frame[4:]))
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    demo.outcomes["long"] = Outcome()
    demo.engine.cancel("long")
    demo.run()
    demo.outcomes.clear()

    assert held < 6 * tokens


def test_several_choices_share_the_prompt(demo: Driver) -> None:
    prompt = prompt_of(300, 1)
    one = demo.alone(prompt, WARM, max_tokens=40, ignore_eos=True)
    demo.submit("n", prompt, WARM, max_tokens=40, ignore_eos=True, n=4)
    pages = 0
    while not demo.outcomes["n"].over:
        demo.step()
        pages = max(pages, demo.engine._runner.cache.stores[0].pages.allocators[0].used)
    found = demo.outcomes["n"]

    assert found.tokens == one.tokens
    assert sorted(found.others) == [1, 2, 3]
    answers = [found.tokens, *(other.tokens for other in found.others.values())]
    assert all(len(tokens) == 40 for tokens in answers)
    assert len({tuple(tokens) for tokens in answers}) == 4
    assert found.usage is not None
    assert found.usage.completion_tokens == 160
    assert pages < 2 * 4  # the prompt's four pages are shared


def test_choices_end_one_by_one(demo: Driver) -> None:
    prompt = prompt_of(70, 2)
    whole = demo.alone(prompt, WARM, max_tokens=60, ignore_eos=True)
    demo.submit(
        "n", prompt, WARM, max_tokens=60, ignore_eos=True, n=3, stop_tokens=[whole.tokens[20]]
    )
    demo.run()
    found = demo.outcomes["n"]

    assert found.tokens == whole.tokens[: whole.tokens.index(whole.tokens[20])]
    assert {other.reason for other in found.others.values()} <= {"stop", "length"}


@pytest.mark.parametrize("after", [0, 1, 4, 20])
def test_a_request_with_several_choices_can_be_cancelled_at_any_time(
    demo: Driver, after: int
) -> None:
    demo.submit("n", prompt_of(600, 3), WARM, max_tokens=40, n=3)
    for _ in range(after):
        demo.step()
    demo.engine.cancel("n")
    demo.run()

    assert demo.outcomes["n"].reason == "cancelled"


def test_bias_penalties_and_min_tokens_affect_the_draw(demo: Driver) -> None:
    prompt = prompt_of(50, 4)
    plain = demo.alone(prompt, max_tokens=30)
    biased = demo.alone(prompt, Sampling(seed=0, logit_bias={77: 100.0}), max_tokens=5)
    assert biased.tokens == [77] * 5
    varied = demo.alone(
        prompt, Sampling(seed=0, logit_bias={77: 20.0}, frequency_penalty=2.0), max_tokens=30
    )
    assert 1 < varied.tokens.count(77) < 30
    end = plain.tokens[0]
    least = demo.alone(prompt, max_tokens=30, stop_tokens=[end], min_tokens=10)
    assert len(least.tokens) >= 10
    assert end not in least.tokens[:10]


@pytest.mark.slow
def test_a_shared_beginning_is_prefilled_once(demo: Driver) -> None:
    shared = prompt_of(1500, 6)
    prompts = [shared + prompt_of(40, 10 + index) for index in range(3)]
    tree = demo.engine._prefix_cache.tree
    tree.clear()
    alone = Driver(shallow.path(), kv=KVSpec(prefix_cache=0))
    before = tree.counts.hit_tokens
    hits = []
    for prompt in prompts:
        found = demo.alone(prompt, WARM, max_tokens=30)
        assert found == alone.alone(prompt, WARM, max_tokens=30)
        hits.append(tree.counts.hit_tokens - before)
        before = tree.counts.hit_tokens

    assert hits == [0, 1024, 1280]


def test_different_salts_share_nothing_and_scored_prompts_are_prefilled_completely(
    demo: Driver,
) -> None:
    prompt = prompt_of(600, 7)
    tree = demo.engine._prefix_cache.tree
    demo.alone(prompt, max_tokens=2)
    before = tree.counts.hit_tokens
    demo.alone(prompt, max_tokens=2, prefix_salt="other")
    assert tree.counts.hit_tokens == before
    scored = demo.alone(prompt, max_tokens=2, prompt_logprobs=0)
    assert len(scored.prompt_logprobs) == 600
    demo.alone(prompt, max_tokens=2)
    assert tree.counts.hit_tokens == before + 512


@pytest.mark.slow
def test_checkpoints_are_evicted_for_requests_under_a_tight_budget() -> None:
    driver = Driver(shallow.path())
    for index in range(4):
        driver.alone(prompt_of(1100, 20 + index), max_tokens=2)
    tree = driver.engine._prefix_cache.tree
    assert len(tree) >= 4
    driver.budget = driver.total
    found = driver.alone(prompt_of(4500, 30), max_tokens=4)

    assert found.error is None
    assert tree.counts.evicted > 0


def test_tails_of_ended_rows_are_freed_for_a_queued_request() -> None:
    driver = Driver(shallow.path())
    for index in range(12):
        driver.submit(f"{index}", prompt_of(10, index), max_tokens=4, ignore_eos=True)
    driver.run(until=lambda: driver.engine._scheduler.reserved_rows == 12)
    driver.budget = driver.total
    driver.submit("long", prompt_of(1500), max_tokens=4)
    driver.run()

    assert driver.outcomes["long"].error is None


PENALIZED = Sampling(temperature=0.8, seed=9, frequency_penalty=0.3)


@pytest.fixture(scope="module")
def undisturbed(_demo: Driver) -> dict[str, Outcome]:
    return {
        rid: _demo.alone(prompt_of(700, 8), sampling, max_tokens=60, ignore_eos=True, n=n)
        for rid, sampling, n in (("goes", PENALIZED, 1), ("many", WARM, 2), ("stays", WARM, 1))
    }


@pytest.mark.parametrize("after", [1, 3, 6, 30])
def test_preempted_and_suspended_requests_get_the_same_tokens(
    undisturbed: dict[str, Outcome], demo: Driver, after: int
) -> None:
    prompt = prompt_of(700, 8)
    demo.submit("goes", prompt, PENALIZED, max_tokens=60, ignore_eos=True)
    demo.submit("many", prompt, WARM, max_tokens=60, ignore_eos=True, n=2)
    demo.submit("stays", prompt, WARM, max_tokens=60, ignore_eos=True)
    for _ in range(after):
        demo.step()
    admitted = set(demo.engine._scheduler.victims())
    for rid in {"goes", "many"} & admitted:
        demo.preempt(rid)
    if "stays" in admitted:
        demo.engine._scheduler.suspend("stays")
        held = len(demo.outcomes["stays"].tokens) + 1
        for _ in range(5):
            demo.step()
        assert len(demo.outcomes["stays"].tokens) <= held
        demo.engine._scheduler.resume("stays")
    demo.run(until=lambda: demo.outcomes["stays"].over)
    preempted = [rid for rid in ("goes", "many") if rid in admitted]
    assert not any(demo.outcomes[rid].over for rid in preempted)
    for rid in preempted:
        demo.requeue(rid)
    demo.run()

    assert demo.outcomes == undisturbed


def test_preempted_requests_can_be_cancelled(demo: Driver) -> None:
    for rid, n in (("one", 1), ("three", 3)):
        demo.submit(rid, prompt_of(300, 9), WARM, max_tokens=40, n=n)
    demo.run(until=lambda: all(len(demo.outcomes[rid].tokens) > 3 for rid in ("one", "three")))
    for rid in ("one", "three"):
        demo.preempt(rid)
    for rid in ("one", "three"):
        demo.engine.cancel(rid)
    demo.run()

    assert {outcome.reason for outcome in demo.outcomes.values()} == {"cancelled"}
    assert not demo.engine._runner.cache.sequences


def test_a_deadline_ends_a_request_in_any_state(demo: Driver) -> None:
    now = [0.0]
    demo.engine._clock, clock = (lambda: now[0]), demo.engine._clock
    try:
        demo.submit("runs", prompt_of(20), max_tokens=200, deadline_s=5.0)
        demo.submit("reads", prompt_of(3000), max_tokens=5, deadline_s=5.0)
        demo.submit("later", prompt_of(10), max_tokens=5, deadline_s=50.0)
        for _ in range(4):
            demo.step()
        assert demo.engine.next_deadline == 5.0
        now[0] = 6.0
        demo.run()
    finally:
        demo.engine._clock = clock

    errors = {rid: outcome.error for rid, outcome in demo.outcomes.items()}
    assert errors["later"] is None
    for rid in ("runs", "reads"):
        assert errors[rid] is not None
        assert errors[rid].code == "deadline_exceeded"


MIXED = 120 if ALL else 70


@pytest.mark.slow
def test_mixed_requests_get_the_same_output_alone_and_in_random_batches(demo: Driver) -> None:
    rng = random.Random(11)
    requests = [_mixed(rng, index) for index in range(MIXED)]
    alone = {rid: demo.alone(prompt, **more) for rid, prompt, more in requests}
    demo.engine._prefix_cache.tree.clear()
    waiting, preempted, cancelled = list(requests), [], set()
    while waiting or preempted or not all(one.over for one in demo.outcomes.values()):
        moves: list[Callable[[], None]] = [demo.step] * 6
        if waiting:
            moves += [lambda: _join(demo, waiting)] * 2
        running = [rid for rid in demo.engine._scheduler.victims() if rid in demo.outcomes]
        if running:
            rid = rng.choice(running)
            moves.append(functools.partial(_preempt, demo, rid, preempted))
            if rng.random() < 0.06:
                cancelled.add(rid)
                demo.engine.cancel(rid)
        if preempted:
            moves.append(lambda: _requeue(demo, preempted.pop(0)))
        rng.choice(moves)()
    demo.run()

    assert len(demo.outcomes) == MIXED
    for rid, outcome in demo.outcomes.items():
        if rid in cancelled:
            assert outcome.tokens == alone[rid].tokens[: len(outcome.tokens)]
        else:
            assert_same(outcome, alone[rid])
    assert MIXED / 30 < len(cancelled) < MIXED / 2


def assert_same(one: Outcome, other: Outcome) -> None:
    """Assert that two outcomes are equal; logprobs may differ by rounding."""
    logprobs = zip(one.logprobs, other.logprobs, strict=True)
    assert all(abs(a.logprob - b.logprob) < 1e-4 for a, b in logprobs)
    for a, b in ((one, other), *((one.others[at], other.others[at]) for at in one.others)):
        assert (a.tokens, a.text, a.reason, a.usage, a.error) == (
            b.tokens,
            b.text,
            b.reason,
            b.usage,
            b.error,
        )
    assert set(one.others) == set(other.others)


def _mixed(rng: random.Random, index: int) -> tuple[str, list[int], dict]:
    shared = prompt_of(600, 50)[: rng.choice([0, 0, 300, 600])]
    prompt = shared + prompt_of(rng.choice([1, 5, 64, 200]), 100 + index)
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.7, 1.2]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 20]),
        min_p=rng.choice([0.0, 0.05]),
        seed=index,
        repetition_penalty=rng.choice([1.0, 1.1]),
        presence_penalty=rng.choice([0.0, 0.5]),
        logit_bias=rng.choice([{}, {400: 2.0}]),
    )
    more = {
        "sampling": sampling,
        "max_tokens": rng.randrange(1, 32),
        "n": rng.choice([1, 1, 1, 2]),
        "ignore_eos": rng.random() < 0.5,
        "logprobs": rng.choice([None, None, 0, 2]),
        "priority": rng.choice([0, 0, 1]),
    }
    return f"m{index}", prompt, more


def _join(demo: Driver, waiting: list[tuple[str, list[int], dict]]) -> None:
    rid, prompt, more = waiting.pop(0)
    demo.submit(rid, prompt, **more)


def _preempt(demo: Driver, rid: str, preempted: list[str]) -> None:
    demo.preempt(rid)
    preempted.append(rid)


def _requeue(demo: Driver, rid: str) -> None:
    if rid in demo.engine._batch.requests:
        demo.requeue(rid)


def test_outcomes_compare_all_choices() -> None:
    assert Outcome([1], "a", "stop") != Outcome([1], "a", "stop", others={1: Outcome()})
