"""Requests go down the ladder while they run, and give the memory back."""

from __future__ import annotations

import pytest

from kvd.worker import reclaiming
from protocol.types import KVSpec
from protocol.worker import Reclaim
from tests.engine.driver import Driver

pytestmark = pytest.mark.mlx


def prompt_of(length: int, start: int) -> list[int]:
    return [(start * 31 + 7 * position) % 4000 + 10 for position in range(length)]


@pytest.fixture(scope="module")
def laddered() -> Driver:
    return Driver("demo", kv=KVSpec())


def reclaim(driver: Driver, rung: str, wanted: int, level: int = 0) -> None:
    driver.engine.reclaim(Reclaim(seq=1, rung=rung, wanted_bytes=wanted, level=level))


def run_two(driver: Driver, *, lower: bool) -> dict[str, list[int]]:
    for rid, seed in (("kept", 1), ("lowered", 2)):
        driver.submit(rid, prompt_of(900, seed), max_tokens=60)
    driver.run(until=lambda: all(len(driver.outcomes[rid].tokens) > 5 for rid in driver.outcomes))
    store = driver.engine._runner.cache.stores[0]
    before = store.pages_bytes
    if lower:
        reclaim(driver, "level", 1, level=2)
        driver.run(until=lambda: not driver.engine._reclaiming.active)
        held = driver.engine._requests["lowered"].completions[0].row.rows[0]
        assert {page.level for page in held.pages} == {2}
        other = driver.engine._requests["kept"].completions[0].row.rows[0]
        assert {page.level for page in other.pages} == {0}
        assert store.pages_bytes < before
        assert store.used_bytes == len(other.pages) * store.page_bytes(0) + len(
            held.pages
        ) * store.page_bytes(2)
        told = driver.engine.stats().memory
        assert told.kv_levels == (
            len(other.pages) * store.page_bytes(0),
            0,
            len(held.pages) * store.page_bytes(2),
        )
        assert sum(told.kv_levels) == told.kv_pages_used
    driver.run()
    levels = {rid: outcome.usage.levels for rid, outcome in driver.outcomes.items()}
    assert levels == {"kept": [0], "lowered": [0, 2] if lower else [0]}
    found = {rid: outcome.tokens for rid, outcome in driver.outcomes.items()}
    driver.outcomes.clear()
    return found


def test_a_lowered_request_goes_on_and_the_others_do_not_notice(laddered: Driver) -> None:
    whole = run_two(laddered, lower=False)
    stepped = run_two(laddered, lower=True)

    assert stepped["kept"] == whole["kept"]
    assert len(stepped["lowered"]) == len(whole["lowered"]) == 60
    assert stepped["lowered"][:6] == whole["lowered"][:6]


def test_a_request_that_ends_meanwhile_leaves_nothing_behind(laddered: Driver) -> None:
    laddered.submit("short", prompt_of(700, 3), max_tokens=3)
    laddered.run(until=lambda: bool(laddered.outcomes["short"].tokens))
    reclaim(laddered, "level", 1 << 40, level=1)
    laddered.run()

    assert laddered.outcomes["short"].reason == "length"
    laddered.engine._prompts.evict(1 << 40)
    assert not laddered.engine._runner.cache.sequences
    assert laddered.engine._runner.cache.pages_used == 0


def test_a_request_that_waits_for_memory_does_not_undo_the_work(
    laddered: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaiming, "SLICE_SECONDS", 0.0)  # one piece a step
    laddered.outcomes.clear()
    budget = laddered.budget
    for rid, seed in (("a", 1), ("b", 2)):
        laddered.submit(rid, prompt_of(900, seed), max_tokens=400)
    laddered.run(until=lambda: all(len(one.tokens) > 3 for one in laddered.outcomes.values()))
    try:
        laddered.budget = laddered.total
        laddered.submit("waits", prompt_of(9000, 6), max_tokens=100)
        reclaim(laddered, "level", 1 << 40, level=2)
        laddered.run(until=lambda: not laddered.engine._reclaiming.active)
        held = [laddered.engine._requests[rid].completions[0].row.rows[0] for rid in ("a", "b")]
        assert {page.level for row in held for page in row.pages} == {2}
        assert laddered.engine._requests["waits"].row is None
    finally:
        laddered.budget = budget
    laddered.engine.cancel("waits")
    laddered.run()
    laddered.outcomes.clear()
