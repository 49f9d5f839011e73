"""Running requests step down to a lower precision level, and the memory is returned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from kvd.worker.core import reclaiming
from kvd.worker.serving import calibration, model_files
from protocol.errors import InsufficientMemory
from protocol.kv import KVSpec
from protocol.worker import Reclaim, StartLevel
from tests.worker import shallow
from tests.worker.core.driver import Driver, Outcome
from tests.worker.core.prompts import periodic_prompt

pytestmark = pytest.mark.mlx


MIX = ["k4v3", "k8v4", "k5v3"]


@pytest.fixture(scope="module", params=["one scheme in all layers", "bits by layer"])
def stepping(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driver]:
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "bits by layer":
            folder = tmp_path_factory.mktemp("calibration")
            patch.setenv(calibration.FOLDER_VARIABLE, str(folder))
            calibration.store(folder, mixed_result())
        driver = Driver(shallow.path(), kv=KVSpec())
        assert driver.info is not None
        assert bool(driver.info.kv_mixes) == (request.param == "bits by layer")
        yield driver


def mixed_result() -> calibration.CalibrationResult:
    level = calibration.MeasuredLevel(
        scheme="k4v4", mix=MIX, allowed=True, kl=0.0, top1=1.0, perplexity_change=0.0, positions=1
    )
    return calibration.CalibrationResult(
        key=calibration.content_key(model_files.inspect(Path(shallow.path()))), model="shallow",
        lowest="k4v4", max_kl=0.02, min_top1=0.95, levels=[level], prompts=1, tokens=400,
        date="2025-01-01T00:00:00+00:00", device="cpu", versions=calibration.versions(),
    )  # fmt: skip


def reclaim(driver: Driver, method: str, wanted: int, level: int = 0) -> None:
    driver.engine.reclaim(Reclaim(seq=1, method=method, wanted_bytes=wanted, level=level))


def run_two(driver: Driver, *, lower: bool) -> dict[str, list[int]]:
    for rid, seed in (("kept", 1), ("lowered", 2)):
        driver.submit(rid, periodic_prompt(900, seed), max_tokens=60)
    driver.run(until=lambda: all(len(driver.outcomes[rid].tokens) > 5 for rid in driver.outcomes))
    store = driver.engine._runner.cache.stores[0]
    before = store.pages.nbytes
    if lower:
        reclaim(driver, "precision", 1, level=2)
        driver.run(until=lambda: not driver.engine._reclaiming.active)
        held = driver.engine._batch.requests["lowered"].completions[0].row.rows[0]
        assert {page.level for page in held.pages} == {2}
        other = driver.engine._batch.requests["kept"].completions[0].row.rows[0]
        assert {page.level for page in other.pages} == {0}
        assert store.pages.nbytes < before
        assert store.pages.used_bytes == len(other.pages) * store.pages.page_bytes(0) + len(
            held.pages
        ) * store.pages.page_bytes(2)
        memory = driver.engine.stats().memory
        assert memory.kv_levels == (
            len(other.pages) * store.pages.page_bytes(0),
            0,
            len(held.pages) * store.pages.page_bytes(2),
        )
        assert sum(memory.kv_levels) == memory.kv_pages_used
    driver.run()
    levels = {rid: outcome.usage.levels for rid, outcome in driver.outcomes.items()}
    assert levels == {"kept": [0], "lowered": [0, 2] if lower else [0]}
    found = {rid: outcome.tokens for rid, outcome in driver.outcomes.items()}
    driver.outcomes.clear()
    return found


def test_a_lowered_request_continues_and_others_are_not_affected(stepping: Driver) -> None:
    whole = run_two(stepping, lower=False)
    stepped = run_two(stepping, lower=True)

    assert stepped["kept"] == whole["kept"]
    assert len(stepped["lowered"]) == len(whole["lowered"]) == 60
    assert stepped["lowered"][:6] == whole["lowered"][:6]


def test_requests_that_share_pages_step_down_together(stepping: Driver) -> None:
    """Their shared pages are converted once, so the tokens of both change."""
    stepping.outcomes.clear()
    stepping.engine.start_level(StartLevel(level=0))
    shared = periodic_prompt(512, 11)
    stepping.submit("alone", periodic_prompt(600, 12), max_tokens=60)
    for rid, own in (("first", 13), ("second", 14)):
        stepping.submit(rid, [*shared, *periodic_prompt(90, own)], max_tokens=60, ignore_eos=True)
        stepping.run(until=lambda rid=rid: len(stepping.outcomes[rid].tokens) > 2)
    rows = [stepping.engine._batch.requests[rid].completions[0].row for rid in ("first", "second")]
    assert set(rows[0].rows[0].pages) & set(rows[1].rows[0].pages), "they share pages"
    reclaim(stepping, "precision", 1, level=2)
    stepping.run(until=lambda: not stepping.engine._reclaiming.active)
    scheduler = stepping.engine._batch.scheduler
    assert [scheduler.find(rid).level for rid in ("alone", "first", "second")] == [0, 2, 2]
    stepping.run()
    levels = {rid: outcome.usage.levels for rid, outcome in stepping.outcomes.items()}
    assert levels == {"alone": [0], "first": [0, 2], "second": [0, 2]}
    stepping.outcomes.clear()


@pytest.mark.parametrize("begun", [True, False], ids=["it decodes", "its prompt is prefilled"])
def test_a_preempted_request_that_shares_pages_steps_down_too(
    stepping: Driver, begun: bool
) -> None:
    """Its later pages are at the level at which they are reserved."""
    stepping.outcomes.clear()
    stepping.engine.start_level(StartLevel(level=0))
    batch = stepping.engine._batch
    shared = periodic_prompt(512, 21)
    stepping.submit("first", [*shared, *periodic_prompt(90, 22)], max_tokens=90, ignore_eos=True)
    stepping.run(until=lambda: len(stepping.outcomes["first"].tokens) > 2)
    stepping.submit("kept", [*shared, *periodic_prompt(900, 23)], max_tokens=90, ignore_eos=True)
    stepping.run(until=lambda: batch.requests["kept"].row is not None)
    request = batch.requests["kept"]
    if begun:
        stepping.run(until=lambda: len(stepping.outcomes["kept"].tokens) > 2)
    stepping.preempt("kept")
    before = request.kept_pages
    reclaim(stepping, "precision", 1, level=2)
    stepping.run(until=lambda: not stepping.engine._reclaiming.active)
    scheduled = batch.scheduler.find("kept")
    assert scheduled.kept_pages == request.kept_pages < before
    stepping.requeue("kept")
    stepping.run(until=lambda: len(stepping.outcomes["kept"].tokens) > 80)

    (row,) = request.completions[0].row.rows
    assert {row.level, *(page.level for page in row.pages)} == {scheduled.level} == {2}
    stepping.run()
    levels = {rid: outcome.usage.levels for rid, outcome in stepping.outcomes.items()}
    assert levels == {"first": [0, 2], "kept": [0, 2]}
    stepping.outcomes.clear()


def test_a_request_that_ends_during_a_step_down_leaves_nothing(stepping: Driver) -> None:
    stepping.submit("short", periodic_prompt(700, 3), max_tokens=3)
    stepping.run(until=lambda: bool(stepping.outcomes["short"].tokens))
    reclaim(stepping, "precision", 1 << 40, level=1)
    stepping.run()

    assert stepping.outcomes["short"].reason == "length"
    stepping.engine._prefix_cache.evict(1 << 40)
    assert not stepping.engine._runner.cache.sequences
    assert stepping.engine._runner.cache.usage.pages_used == 0


def test_usage_has_no_level_at_which_no_token_was_generated(stepping: Driver) -> None:
    stepping.engine.start_level(StartLevel(level=0))
    stepping.submit("cancelled", periodic_prompt(200, 4), max_tokens=20)
    stepping.run(until=lambda: bool(stepping.outcomes["cancelled"].tokens))
    batch = stepping.engine._batch
    batch.step_down(batch.requests["cancelled"], 2)
    stepping.engine.cancel("cancelled")
    stepping.run()

    assert stepping.outcomes["cancelled"].reason == "cancelled"
    assert stepping.outcomes["cancelled"].usage.levels == [0]


def test_usage_has_the_level_of_a_prompt_that_was_stepped_down(stepping: Driver) -> None:
    """Its tokens differ from those of a request that ran at the lower level from the start."""
    stepping.engine.start_level(StartLevel(level=0))
    stepping.submit("r", periodic_prompt(900, 5), max_tokens=5)
    batch = stepping.engine._batch
    stepping.run(until=lambda: batch.requests["r"].row is not None)
    reclaim(stepping, "precision", 1, level=2)
    stepping.run()

    assert stepping.outcomes["r"].usage.levels == [0, 2]
    stepping.outcomes.clear()
    stepping.engine.start_level(StartLevel(level=2))
    stepping.submit("r", periodic_prompt(900, 5), max_tokens=5)
    stepping.run()
    assert stepping.outcomes["r"].usage.levels == [2]


def test_a_token_in_flight_has_the_level_at_which_it_was_computed(
    stepping: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaiming, "MIN_WORK_SECONDS", 60.0)  # all pieces in one step
    stepping.outcomes.clear()
    stepping.engine.start_level(StartLevel(level=0))
    request = {"max_tokens": 60, "ignore_eos": True, "logprobs": 1}
    whole = stepping.alone(periodic_prompt(900, 8), **request)

    def run_lowered(max_tokens: int) -> tuple[Outcome, int]:
        """Return the outcome, and the number of tokens that were launched before the step down."""
        stepping.engine.start_level(StartLevel(level=0))
        stepping.submit("r", periodic_prompt(900, 8), **request | {"max_tokens": max_tokens})
        stepping.run(until=lambda: len(stepping.outcomes["r"].tokens) > 5)
        (completion,) = stepping.engine._batch.requests["r"].completions
        reclaim(stepping, "precision", 1, level=2)
        stepping.step()
        launched = completion.launched
        assert launched == len(completion.tokens) + 1, "a token is in flight"
        stepping.run()
        return stepping.outcomes.pop("r"), launched

    lowered, launched = run_lowered(60)
    assert lowered.logprobs[:launched] == whole.logprobs[:launched]
    assert lowered.logprobs[launched] != whole.logprobs[launched]
    assert lowered.levels == [0] * launched + [2] * (60 - launched)
    assert lowered.usage is not None
    assert lowered.usage.levels == [0, 2]

    ended, count = run_lowered(launched)
    assert (count, ended.reason) == (launched, "length")
    assert ended.usage is not None
    assert ended.usage.levels == [0]


def test_a_queued_request_does_not_take_the_freed_memory(
    stepping: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reclaiming, "MIN_WORK_SECONDS", 0.0)  # one piece a step
    monkeypatch.setattr(reclaiming, "STEP_SHARE", 0.0)
    stepping.outcomes.clear()
    budget = stepping.budget
    for rid, seed in (("a", 1), ("b", 2)):
        stepping.submit(rid, periodic_prompt(900, seed), max_tokens=400)
    stepping.run(until=lambda: all(len(one.tokens) > 3 for one in stepping.outcomes.values()))
    try:
        stepping.budget = stepping.total
        stepping.submit("waits", periodic_prompt(9000, 6), max_tokens=100)
        reclaim(stepping, "precision", 1 << 40, level=2)
        stepping.run(until=lambda: not stepping.engine._reclaiming.active)
        requests = stepping.engine._batch.requests
        held = [requests[rid].completions[0].row.rows[0] for rid in ("a", "b")]
        assert {page.level for row in held for page in row.pages} == {2}
        assert stepping.engine._batch.requests["waits"].row is None
    finally:
        stepping.budget = budget
    stepping.engine.cancel("waits")
    stepping.run()
    stepping.outcomes.clear()


@pytest.fixture
def pressed() -> Iterator[Driver]:
    driver = Driver(shallow.path(), kv=KVSpec(prefix_every=256))
    for rid, seed in (("a", 1), ("b", 2), ("c", 3)):
        driver.submit(rid, periodic_prompt(1500, seed), max_tokens=300, ignore_eos=True)
    driver.run(until=lambda: all(len(one.tokens) > 9 for one in driver.outcomes.values()))
    yield driver
    driver.run()
    assert all(len(one.tokens) == 300 for one in driver.outcomes.values())
    driver.engine._prefix_cache.tree.clear()
    assert driver.engine._runner.cache.usage.pages_used == 0
    assert driver.engine._scheduler.reserved_pages == 0


def test_each_reclaim_method_frees_what_it_promised(pressed: Driver) -> None:
    unit = pressed.engine._admission.budget.page_bytes
    for method, level in (
        ("spare", 0),
        ("prefixes", 0),
        ("precision", 1),
        ("precision", 2),
        ("preempt", 0),
    ):
        reclaimable = pressed.engine.stats().reclaimable
        promised = (
            reclaimable.levels[level - 1] if method == "precision" else getattr(reclaimable, method)
        )
        assert promised > 0, method
        total, active = pressed.total, pressed.engine._runner.cache.nbytes
        real = mx.get_active_memory()
        answer = pressed.reclaim(method, promised, level)
        assert abs(answer.freed_bytes - promised) <= unit, method
        assert (pressed.asked[-1][0], answer.exhausted) == (total - answer.freed_bytes, True), (
            method
        )
        if method in ("precision", "preempt"):
            freed = active - pressed.engine._runner.cache.nbytes
            assert freed > promised / 3, method  # the rest was reserved, and not yet filled
            # Rows grow during the reclaim, which takes more steps on a slow machine.
            assert real - mx.get_active_memory() > 0.8 * freed, method
        after = pressed.engine.stats().reclaimable
        left = after.levels[level - 1] if method == "precision" else getattr(after, method)
        assert left <= unit
    assert reclaimable.base + sum(
        (reclaimable.spare, reclaimable.prefixes, *reclaimable.levels, reclaimable.preempt)
    ) == pytest.approx(total, abs=2 * unit)


def test_only_as_many_rows_step_down_as_needed_and_new_rows_start_at_that_level(
    pressed: Driver,
) -> None:
    scheduler = pressed.engine._scheduler
    answer = pressed.reclaim("precision", 1, level=1)
    assert [scheduler.find(rid).level for rid in "abc"] == [0, 0, 1]
    assert not answer.exhausted
    pressed.submit("d", periodic_prompt(300, 4), max_tokens=300, ignore_eos=True)
    pressed.step()
    assert scheduler.find("d").level == 1
    pressed.run(until=lambda: len(pressed.outcomes["d"].tokens) > 3)
    held = pressed.engine._batch.requests["d"].completions[0].row.rows[0]
    assert {page.level for page in held.pages} == {1}
    assert pressed.engine.stats().reclaimable.level == 1
    pressed.engine.start_level(StartLevel(level=0))
    pressed.submit("e", periodic_prompt(300, 5), max_tokens=300, ignore_eos=True)
    pressed.step()
    assert scheduler.find("e").level == 0


@pytest.mark.slow
def test_a_request_that_fits_only_at_a_lower_level_runs_there(stepping: Driver) -> None:
    stepping.outcomes.clear()
    prompt = periodic_prompt(9000, 7)
    base, unit = (
        getattr(stepping.engine._admission.budget, one) for one in ("base_bytes", "page_bytes")
    )
    sizes, row_pages = stepping.engine._scheduler.sizes, stepping.engine._admission.row_pages
    top, lowest = (sizes.of(9000, 20, level)[0] + row_pages for level in (0, 2))
    budget, stepping.budget = stepping.budget, base + (lowest + 1) * unit
    try:
        assert lowest + 1 < top
        stepping.reclaim("spare", 1)  # the daemon's answer has the smaller budget
        stepping.submit("large", prompt, max_tokens=20, ignore_eos=True)
        stepping.run()
        assert len(stepping.outcomes.pop("large").tokens) == 20
        with pytest.raises(InsufficientMemory):
            stepping.submit("larger", periodic_prompt(12000, 7), max_tokens=20)
    finally:
        stepping.budget = budget
        stepping.outcomes.clear()
