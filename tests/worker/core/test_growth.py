"""Reservations grow while requests decode: long answers share memory that is too small for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.worker.core import memory_account
from protocol.resume import ChoiceProgress
from protocol.types import Sampling
from tests.worker import shallow
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.prompts import periodic_prompt

pytestmark = pytest.mark.mlx

WARM = Sampling(temperature=0.9, seed=5)
LONG = 400
"""Tokens of an answer that grows several times."""
AHEAD = 128
"""Tokens that these tests reserve at a time, to be quick."""


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = tmp_path_factory.mktemp("swap")
    return Driver(shallow.path(), swap_folder=str(folder), swap_bytes=1 << 30)


@pytest.fixture
def driver(loaded: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    monkeypatch.setattr(loaded.engine._scheduler.growth, "ahead", AHEAD)
    budget = loaded.budget
    loaded.engine._admission.budget.limit_bytes = budget
    yield loaded
    loaded.budget = budget
    loaded.run(until=lambda: not loaded.engine.has_work)
    loaded.engine._prefix_cache.tree.clear()
    assert loaded.engine._scheduler.reserved_pages == 0
    assert loaded.engine._runner.cache.usage.pages_used == 0
    loaded.outcomes.clear()
    loaded.preemptions.clear()


def leave_room_for(driver: Driver, pages: int, rows: int) -> None:
    """Set the budget to the model, ``rows`` rows and so many pages."""
    admission = driver.engine._admission
    units = pages + rows * admission.row_pages
    driver.budget = admission.budget.base_bytes + units * admission.budget.page_bytes
    driver.reclaim("spare", 1 << 40)


def pages_of(driver: Driver, prompt: int, new: int) -> int:
    return driver.engine._scheduler.sizes.of(prompt, new, 0)[0]


def submit_long(driver: Driver, **fields: object) -> None:
    fields = {"max_tokens": LONG, "ignore_eos": True, **fields}
    driver.submit("old", periodic_prompt(200, 1), WARM, **fields)
    driver.submit("new", periodic_prompt(200, 2), WARM, **fields)


def alone(driver: Driver, **fields: object) -> dict[str, Outcome]:
    submit_long(driver, **fields)
    driver.run()
    found = dict(driver.outcomes)
    driver.outcomes.clear()
    driver.engine._prefix_cache.tree.clear()
    return found


def test_two_answers_that_do_not_fit_together_are_the_same_as_alone(driver: Driver) -> None:
    wanted = alone(driver)
    whole = pages_of(driver, 200, LONG)
    leave_room_for(driver, 2 * whole - 3, rows=2)
    submit_long(driver)
    driver.run()

    assert driver.outcomes == wanted
    assert "old" not in driver.preemptions, "the oldest request is never preempted for another one"
    assert driver.preemptions["new"][-1] == "resumed"


def test_choices_grow_together(driver: Driver) -> None:
    wanted = alone(driver, n=2)
    first, further = driver.engine._scheduler.sizes.of(200, LONG, 0)
    leave_room_for(driver, 2 * (first + further) - 3, rows=4)
    submit_long(driver, n=2)
    driver.run()

    assert driver.outcomes == wanted
    assert driver.preemptions["new"][-1] == "resumed"


def test_a_reservation_covers_a_part_of_a_long_answer(driver: Driver) -> None:
    driver.submit("long", periodic_prompt(200, 1), max_tokens=LONG, ignore_eos=True)
    driver.run(until=lambda: bool(driver.outcomes["long"].tokens))
    scheduler = driver.engine._scheduler
    assert scheduler.reserved_pages == pages_of(driver, 200, AHEAD)
    driver.run(until=lambda: len(driver.outcomes["long"].tokens) > AHEAD)
    assert (
        pages_of(driver, 200, 2 * AHEAD) >= scheduler.reserved_pages > pages_of(driver, 200, AHEAD)
    )
    driver.run()
    assert len(driver.outcomes["long"].tokens) == LONG


def test_without_max_tokens_the_answer_ends_with_length_where_the_budget_ends(
    driver: Driver,
) -> None:
    leave_room_for(driver, pages_of(driver, 200, 300), rows=1)
    driver.submit("long", periodic_prompt(200, 1), WARM, ignore_eos=True)
    driver.run()

    outcome = driver.outcomes["long"]
    assert (outcome.error, outcome.reason) == (None, "length")
    assert 300 <= len(outcome.tokens) < 300 + 64


def test_without_max_tokens_the_answer_ends_where_the_context_ends(tmp_path: Path) -> None:
    driver = Driver(shallow.path(), max_context=700, max_rows=1)
    driver.submit("long", periodic_prompt(100, 1), WARM, ignore_eos=True)
    driver.run()

    assert driver.outcomes["long"].reason == "length"
    assert len(driver.outcomes["long"].tokens) == 600


def test_a_request_from_an_earlier_worker_is_not_preempted_before_it_has_new_tokens(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_account, "MIN_TOKENS_BETWEEN_PREEMPTIONS", 10)
    resume = [ChoiceProgress([], 0)]
    prompt = periodic_prompt(200, 1)
    driver.submit("old", prompt, WARM, max_tokens=40, ignore_eos=True, resume=resume)
    driver.run(until=lambda: len(driver.outcomes["old"].tokens) > 4)
    assert driver.engine.stats().reclaimable.preempt == 0
    driver.run(until=lambda: len(driver.outcomes["old"].tokens) > 14)
    assert driver.engine.stats().reclaimable.preempt > 0
    driver.run()
