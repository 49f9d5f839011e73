"""A step may fail at any point: requests that did not cause the failure get the same output."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.cache.steps import PackedPrefill, PrefillStep
from kvd.worker.core import out_of_memory
from kvd.worker.engine import ignore_phase
from kvd.worker.process import shortage
from kvd.worker.sampling.sampler import Sampler
from protocol.errors import InsufficientMemory
from protocol.types import Sampling, TokenLogprob
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.faults import LATE, UNABLE, memory_runs_out
from tests.worker.core.prompts import prompt_of

pytestmark = pytest.mark.mlx

REQUESTS = {
    "greedy": (prompt_of(300, 1), Sampling(seed=1), {"max_tokens": 90, "logprobs": 0}),
    "drawn": (
        prompt_of(70, 2),
        Sampling(temperature=0.9, repetition_penalty=1.2, seed=2),
        {"max_tokens": 100, "n": 2, "logprobs": 2},
    ),
    "short": (
        [7],
        Sampling(temperature=0.7, seed=3),
        {"max_tokens": 40, "logprobs": 0, "prompt_logprobs": 0},
    ),
    "scored": (prompt_of(270, 4), Sampling(seed=4), {"max_tokens": 20, "prompt_logprobs": 1}),
}


def serve(driver: Driver, requests: dict[str, tuple] = REQUESTS) -> dict[str, Outcome]:
    """Run all requests; each joins two steps after the one before."""
    driver.outcomes = {}
    for rid, (prompt, sampling, more) in requests.items():
        driver.submit(rid, prompt, sampling, **more)
        driver.step()
        driver.step()
    driver.run()
    outcomes, driver.outcomes = driver.outcomes, {}
    return outcomes


def assert_same(got: dict[str, Outcome], wanted: dict[str, Outcome]) -> None:
    """Compare all that a client sees; logprobs may differ by the order of summation."""
    assert got.keys() == wanted.keys()
    for rid, outcome in got.items():
        expected = wanted[rid]
        for actual, right in ((outcome, expected), *zip_values(outcome.others, expected.others)):
            assert [one.token for one in actual.logprobs] == [one.token for one in right.logprobs]
            for logprobs, expected_logprobs in (
                (actual.logprobs, right.logprobs),
                (actual.prompt_logprobs, right.prompt_logprobs),
            ):
                numbers = logprobs_of(logprobs)
                assert np.isfinite(numbers).all()
                np.testing.assert_allclose(numbers, logprobs_of(expected_logprobs), atol=1e-4)
        assert without_logprobs(outcome) == without_logprobs(expected)


def zip_values(got: dict[int, Outcome], wanted: dict[int, Outcome]) -> list[tuple]:
    assert got.keys() == wanted.keys()
    return [(outcome, wanted[choice]) for choice, outcome in got.items()]


def logprobs_of(logprobs: list[TokenLogprob]) -> list[float]:
    return [one.logprob for one in logprobs if one.logprob is not None]


def without_logprobs(outcome: Outcome) -> Outcome:
    others = {choice: without_logprobs(one) for choice, one in outcome.others.items()}
    return replace(outcome, logprobs=[], prompt_logprobs=[], others=others)


@pytest.fixture(scope="module")
def wanted(_demo: Driver) -> dict[str, Outcome]:
    outcomes = serve(_demo)
    assert all(outcome.error is None for outcome in outcomes.values())
    return outcomes


@pytest.fixture(scope="module")
def evaluations(_demo: Driver, wanted: dict) -> int:
    """Number of evaluations that all requests take if none fails."""
    _demo.engine._prefix_cache.tree.clear()
    with memory_runs_out(lambda _: False) as seen:
        assert_same(serve(_demo), wanted)
    return seen.count


@pytest.fixture
def cold(demo: Driver) -> Driver:
    """An engine without checkpoints and without recent shortages."""
    demo.engine._prefix_cache.tree.clear()
    demo.engine._out_of_memory.calm_steps = out_of_memory.CALM_STEPS
    demo.engine._out_of_memory.count = 0
    return demo


def test_a_shortage_that_passes_at_once_is_not_counted(cold: Driver, wanted: dict) -> None:
    with memory_runs_out(lambda number: number % 5 in {0, 1}) as seen:
        outcomes = serve(cold)

    assert seen.failed > 10
    assert cold.engine._out_of_memory.count == 0, seen.failed
    assert_same(outcomes, wanted)


@pytest.mark.parametrize("part", [0.02, 0.3, 0.6, 0.9])
def test_a_step_without_memory_loses_nothing(
    cold: Driver, wanted: dict, evaluations: int, part: float
) -> None:
    first = int(part * evaluations)
    with memory_runs_out(range(first, first + shortage.TRIES + 1).__contains__) as seen:
        outcomes = serve(cold)

    assert seen.failed == shortage.TRIES + 1
    assert cold.engine._out_of_memory.count == 1
    assert_same(outcomes, wanted)


def test_arrays_that_the_device_failed_to_compute_are_computed_again(
    cold: Driver, wanted: dict, evaluations: int
) -> None:
    with memory_runs_out((evaluations // 2).__eq__, LATE) as seen:
        outcomes = serve(cold)

    assert seen.failed == 1
    assert cold.engine._out_of_memory.count == 1
    assert_same(outcomes, wanted)


def test_while_memory_stays_short_the_newest_requests_fail_one_by_one(cold: Driver) -> None:
    rids = ["first", "second", "third", "fourth"]
    expected = {rid: cold.alone(prompt_of(150, at), max_tokens=40) for at, rid in enumerate(rids)}
    for at, rid in enumerate(rids):
        cold.submit(rid, prompt_of(150, at), max_tokens=40)
    cold.run(until=lambda: all(len(cold.outcomes[rid].tokens) > at for at, rid in enumerate(rids)))
    decoding = cold.engine._scheduler
    with memory_runs_out(lambda _: decoding.decoding > 2):
        cold.run()

    for rid in ("third", "fourth"):
        error = cold.outcomes[rid].error
        assert error is not None
        assert (error.code, error.retryable) == ("overloaded", True)
        assert error.detail["retry_after_s"] > 0
        assert cold.outcomes[rid].tokens == expected[rid].tokens[: len(cold.outcomes[rid].tokens)]
    assert cold.engine._out_of_memory.count == 3
    assert {rid: cold.outcomes[rid] for rid in rids[:2]} == {rid: expected[rid] for rid in rids[:2]}


def test_a_request_that_never_fits_fails_and_the_next_one_runs(cold: Driver) -> None:
    expected = cold.alone(prompt_of(100), max_tokens=5)
    cold.submit("large", prompt_of(600), max_tokens=5)
    with memory_runs_out(lambda _: "large" in cold.engine._batch.requests):
        cold.run()
    error = cold.outcomes["large"].error
    assert error is not None
    assert error.code == "overloaded"
    assert cold.alone(prompt_of(100), max_tokens=5) == expected


@pytest.mark.parametrize("text", [UNABLE, LATE])
def test_preempted_rows_continue_after_a_shortage(cold: Driver, text: str) -> None:
    requests = {
        "stays": prompt_of(100, 1),
        "preempted": prompt_of(300, 2),
        "reads": prompt_of(2500, 3),
    }
    expected = {rid: cold.alone(prompt, max_tokens=40, n=2) for rid, prompt in requests.items()}
    cold.engine._prefix_cache.tree.clear()
    for rid, prompt in requests.items():
        cold.submit(rid, prompt, max_tokens=40, n=2)
    cold.run(until=lambda: bool(cold.outcomes["preempted"].tokens))
    assert not cold.outcomes["reads"].tokens
    for rid in ("preempted", "reads"):
        cold.preempt(rid)
    tries = 1 if text == LATE else shortage.TRIES + 1
    with memory_runs_out(range(3, 3 + tries).__contains__, text):
        cold.run(until=lambda: len(cold.outcomes["stays"].tokens) > 30)
    assert cold.engine._out_of_memory.count == 1
    cold.requeue("preempted")
    cold.requeue("reads")
    cold.run()

    assert cold.outcomes == expected


def test_other_device_errors_are_not_shortages(cold: Driver) -> None:
    cold.submit("a", prompt_of(30), max_tokens=5)
    hung = "[METAL] Command buffer execution failed: Caused GPU Timeout Error (00000002)"
    with memory_runs_out((2).__eq__, hung), pytest.raises(RuntimeError, match="Timeout"):
        cold.run()
    cold.engine._out_of_memory._recovery.discard(late=True)


def test_a_load_without_memory_reports_it() -> None:
    with memory_runs_out((5).__le__), pytest.raises(InsufficientMemory, match="while the model"):
        Driver("demo")


@pytest.mark.parametrize("poison", [mx.nan, 0.0])
def test_bad_logits_of_a_scored_prompt_are_never_reported(
    cold: Driver, monkeypatch: pytest.MonkeyPatch, poison: float
) -> None:
    expected = cold.alone(prompt_of(700, 1), max_tokens=10)
    runner = cold.engine._runner
    plain = runner.score_parts

    def poisoned(row: object, tokens: list[int], *rest: object) -> Iterator[mx.array]:
        for logits in plain(row, tokens):
            yield logits if len(tokens) == 256 else mx.full(logits.shape, poison)

    monkeypatch.setattr(runner, "score_parts", poisoned)
    cold.submit("other", prompt_of(700, 1), max_tokens=10)
    cold.submit("bad", prompt_of(300, 2), max_tokens=10, prompt_logprobs=1)
    cold.run()

    bad = cold.outcomes["bad"]
    assert bad.error is not None
    assert bad.error.code == "numerical_error"
    assert (bad.tokens, len(bad.prompt_logprobs)) == ([], 257)
    assert cold.outcomes["other"].tokens == expected.tokens
    assert cold.engine._prefix_cache.tree.peek(prompt_of(300, 2)).tokens == 0


def test_one_bad_choice_of_several_fails_only_its_request(
    cold: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = cold.alone(prompt_of(300, 1), max_tokens=20)
    draw = Sampler.draw
    cold.submit("bad", prompt_of(300, 2), Sampling(temperature=1.0, seed=1), max_tokens=20, n=3)
    cold.submit("other", prompt_of(300, 1), max_tokens=20)
    scheduler = cold.engine._scheduler
    cold.run(until=lambda: cold.outcomes["other"].tokens and not scheduler.prefilling)
    with monkeypatch.context() as patch:
        poison = mx.array([0, mx.nan, 0, 0])[:, None]
        patch.setattr(Sampler, "draw", lambda one, logits, *a: draw(one, logits + poison, *a))
        cold.step()
    cold.run()

    assert cold.outcomes["bad"].error is not None
    assert cold.outcomes["bad"].error.code == "numerical_error"
    assert cold.outcomes["other"] == expected
    assert cold.engine._prefix_cache.tree.peek(prompt_of(300, 2)).tokens == 0


def test_the_engine_reports_each_phase_before_it_begins(cold: Driver) -> None:
    phases: list[str] = []
    cold.engine.watch(phases.append)
    cold.submit("a", prompt_of(600), max_tokens=5)
    cold.step()
    assert phases[0] == "prefill"
    cold.run()
    assert "decode" in phases
    cold.engine.watch(ignore_phase)


def test_a_chunk_without_memory_is_prefilled_again_and_other_rows_stay(
    cold: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = {"runs": prompt_of(200, 1), "reads": prompt_of(700, 2), "with": prompt_of(100, 3)}
    more = {"max_tokens": 30, "logprobs": 0}
    expected = {rid: cold.alone(prompt, **more) for rid, prompt in requests.items()}
    cold.engine._prefix_cache.tree.clear()
    cold.submit("runs", requests["runs"], **more)
    cold.run(until=lambda: len(cold.outcomes["runs"].tokens) > 2)
    for rid in ("reads", "with"):
        cold.submit(rid, requests[rid], **more)
    store = cold.engine._runner.cache.stores[0]
    forwards = 0

    def in_a_chunk(_: int) -> bool:
        nonlocal forwards
        if not isinstance(store.step, PrefillStep | PackedPrefill):
            return False
        forwards += 1
        return 2 <= forwards <= shortage.TRIES + 2

    monkeypatch.setattr(cold.engine._out_of_memory._recovery, "discard", None)
    with memory_runs_out(in_a_chunk) as seen:
        cold.run()

    assert seen.failed == shortage.TRIES + 1
    assert cold.engine._out_of_memory.count == 1
    assert_same(cold.outcomes, expected)


def test_prompts_are_rebuilt_in_passes_of_several_chunks(cold: Driver) -> None:
    """One chunk for each pass would take longer, above all for many short prompts."""
    requests = {
        f"r{number}": (prompt_of(length, number), Sampling(seed=number), {"max_tokens": 30})
        for number, length in enumerate((40, 40, 60, 70, 300))
    }
    expected = serve(cold, requests)
    cold.engine._prefix_cache.tree.clear()
    for rid, (prompt, sampling, more) in requests.items():
        cold.submit(rid, prompt, sampling, **more)
    cold.run(until=lambda: all(outcome.tokens for outcome in cold.outcomes.values()))
    cold.engine._prefix_cache.tree.clear()
    passes: list[int] = []
    runner = cold.engine._runner
    prefill_pass = runner.prefill_pass

    def noted(rows: list, chunks: list[list[int]], *rest: object, **more: object) -> None:
        passes.append(sum(map(len, chunks)))
        prefill_pass(rows, chunks, *rest, **more)

    runner.prefill_pass = noted  # type: ignore[method-assign]
    try:
        with memory_runs_out({1}.__contains__, LATE) as seen:
            cold.run()
    finally:
        del runner.prefill_pass
    assert seen.failed == 1
    assert sum(passes) == sum(len(prompt) - 1 for prompt, *_ in requests.values())
    assert passes == [39 + 39 + 59 + 69, 256, 43]
    assert max(passes) <= runner.pass_tokens(256)
    assert_same(cold.outcomes, expected)


def test_a_shortage_while_completions_get_their_rows_leaves_no_snapshot(demo: Driver) -> None:
    """The snapshot from which they are copied would keep its pages for ever."""
    cache, calm = demo.engine._runner.cache, demo.engine._out_of_memory
    request = {"prompt": prompt_of(150, 1), "max_tokens": 5, "n": 3}
    wanted = demo.alone(**request)
    for first in range(1, 30):
        demo.engine._prefix_cache.tree.clear()
        calm.calm_steps = out_of_memory.CALM_STEPS
        with memory_runs_out(range(first, first + shortage.TRIES + 1).__contains__):
            assert demo.alone(**request) == wanted, first
        demo.engine._prefix_cache.tree.clear()
        assert not cache.snapshots.all, f"evaluation {first} failed"
