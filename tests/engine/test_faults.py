"""Steps that go wrong, at any point of them: who is not at fault does not notice."""

from __future__ import annotations

import pytest

from kvd.worker import mlx_engine, shortage
from protocol.types import Sampling
from tests.engine.driver import Driver, Outcome
from tests.engine.faults import LATE, memory_runs_out
from tests.engine.test_mlx_engine import prompt_of

pytestmark = pytest.mark.mlx

REQUESTS = {
    "greedy": (prompt_of(300, 1), Sampling(seed=1), {"max_tokens": 90}),
    "drawn": (
        prompt_of(70, 2),
        Sampling(temperature=0.9, repetition_penalty=1.2, seed=2),
        {"max_tokens": 100, "n": 2, "logprobs": 2},
    ),
    "short": ([7], Sampling(temperature=0.7, seed=3), {"max_tokens": 40, "prompt_logprobs": 0}),
    "scored": (prompt_of(270, 4), Sampling(seed=4), {"max_tokens": 20, "prompt_logprobs": 1}),
}


def serve(driver: Driver, requests: dict[str, tuple] = REQUESTS) -> dict[str, Outcome]:
    """Run all of them, one joining after the other."""
    for rid, (prompt, sampling, more) in requests.items():
        driver.submit(rid, prompt, sampling, **more)
        driver.step()
        driver.step()
    driver.run()
    outcomes, driver.outcomes = driver.outcomes, {}
    return outcomes


@pytest.fixture(scope="module")
def wanted(_demo: Driver) -> dict[str, Outcome]:
    outcomes = serve(_demo)
    assert all(outcome.error is None for outcome in outcomes.values())
    return outcomes


@pytest.fixture(scope="module")
def evaluations(_demo: Driver, wanted: dict) -> int:
    """So many are at least made for all that."""
    _demo.engine._prompts.tree.clear()
    with memory_runs_out(lambda _: False) as seen:
        assert serve(_demo) == wanted
    return seen.count


@pytest.fixture
def cold(demo: Driver) -> Driver:
    """An engine that remembers no prompt and no shortage."""
    demo.engine._prompts.tree.clear()
    demo.engine._calm = mlx_engine.CALM_STEPS
    return demo


def test_memory_that_comes_back_at_once_costs_nothing(cold: Driver, wanted: dict) -> None:
    with memory_runs_out(lambda number: number % 5 in {0, 1}) as seen:
        outcomes = serve(cold)

    assert seen.failed > 10
    assert cold.engine._shortages == 0, seen.failed
    assert outcomes == wanted


@pytest.mark.parametrize("part", [0.02, 0.1, 0.3, 0.5, 0.7, 0.9])
def test_a_step_that_lacks_memory_drops_nothing(
    cold: Driver, wanted: dict, evaluations: int, part: float
) -> None:
    first = int(part * evaluations)
    with memory_runs_out(range(first, first + shortage.TRIES + 1).__contains__) as seen:
        outcomes = serve(cold)

    assert seen.failed == shortage.TRIES + 1
    assert cold.engine._shortages == 1
    assert outcomes == wanted


@pytest.mark.parametrize("part", [0.25, 0.6])
def test_what_the_device_lost_is_computed_again(
    cold: Driver, wanted: dict, evaluations: int, part: float
) -> None:
    with memory_runs_out(int(part * evaluations).__eq__, LATE) as seen:
        outcomes = serve(cold)

    assert seen.failed == 1
    assert cold.engine._shortages == 1
    assert outcomes == wanted
