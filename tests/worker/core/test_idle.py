"""An idle engine: what it keeps for the next request, and what it has returned."""

from __future__ import annotations

from typing import Any

import pytest

from kvd.worker.cache import page_store, usage
from kvd.worker.cache.packed import Packed
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.tails import TailSlots
from kvd.worker.core import builder, freeing, idle_work
from kvd.worker.core.idle_work import IdleWork
from kvd.worker.core.interleaving import Interleaving
from protocol.kv import KVSpec
from protocol.pages import FIRST_ROWS, SLAB_PAGES
from protocol.worker import MemoryRequested, Report
from tests.breadth import ALL, part_of
from tests.worker import shallow
from tests.worker.core.driver import Driver
from tests.worker.core.prompts import prompt_of

pytestmark = pytest.mark.mlx


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the pages of pools that are copied because a pool changes its size."""
    found: list[int] = []
    resized = PagePool._resized

    def noted(pool: PagePool, side: int, capacity: int) -> Packed:
        found.append(min(capacity, pool.capacities[side]))
        return resized(pool, side, capacity)

    monkeypatch.setattr(PagePool, "_resized", noted)
    return found


def serve(driver: Driver, prompts: list[list[int]], max_tokens: int = 4) -> None:
    for index, prompt in enumerate(prompts):
        driver.submit(f"r{index}", prompt, max_tokens=max_tokens, ignore_eos=True)
    driver.run()
    driver.outcomes.clear()


def test_rows_of_a_pass_that_continue_a_prefix_get_their_tails_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(shallow.path(), kv=KVSpec(8, 8))
    shared = prompt_of(300, 1)
    serve(driver, [shared])
    driver.engine._runner.cache.shrink()
    grown: list[int] = []
    resize = TailSlots._resize

    def noted(tails: TailSlots, count: int) -> None:
        if count > tails.count:
            grown.append(count)
        resize(tails, count)

    monkeypatch.setattr(TailSlots, "_resize", noted)
    prompts = [[*shared, 7, seed] for seed in range(3)]
    for index, prompt in enumerate(prompts):
        driver.submit(f"r{index}", prompt, max_tokens=4, ignore_eos=True)
    driver.run()
    assert [one.cached for one in driver.outcomes.values()] == [256] * 3
    assert grown == [3], "each growth copies all tails"


def test_short_prompts_copy_no_pools_however_much_is_cached(
    copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Stages depend on measured times, and with them the number of rows in each step.
    monkeypatch.setattr(Interleaving, "stage_share", lambda *_: 1.0)
    driver = Driver(shallow.path(), kv=KVSpec(16, 16))
    serve(driver, [prompt_of(6500, 1)])
    cache, cached = driver.engine._runner.cache, driver.engine._memory.cached_pages
    assert cached > 90
    short = [prompt_of(200, seed) for seed in range(8)]
    # After the first prompts, the grant has room for free pages besides the cached ones.
    serve(driver, short, max_tokens=30)
    serve(driver, short, max_tokens=30)
    copied.clear()
    known = set(driver.engine._runner._compiled._traces)
    serve(driver, short, max_tokens=30)

    assert copied == []
    assert set(driver.engine._runner._compiled._traces) - known == set()
    assert cache.usage.pages_total <= cached + SLAB_PAGES


def test_prompts_that_leave_checkpoints_seldom_copy_pools(copied: list[int]) -> None:
    """Each request of a conversation leaves some pages; few of them change the size of pools."""
    driver = Driver(shallow.path())
    conversation = prompt_of(7000, 2)
    serve(driver, [conversation[:5000]])
    copied.clear()
    pools = 2 * len(driver.engine._runner.cache.stores[0].layers)
    lengths = range(5200, 7000, 200)
    for tokens in lengths:
        serve(driver, [conversation[:tokens]])

    assert 0 < len(copied) / pools < len(lengths) / 2


@pytest.fixture
def small_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make pools of about a hundred pages count as large."""
    for module in (builder, freeing, idle_work, page_store, usage):
        monkeypatch.setattr(module, "SLAB_PAGES", 8)


@pytest.mark.usefixtures("small_slab")
def test_waves_of_prompts_behind_many_cached_pages_seldom_copy_them(copied: list[int]) -> None:
    """Pools that are about to grow get memory for a quarter more, and keep it between waves.

    Each copy writes all cached pages to new memory.
    """
    driver = Driver(shallow.path(), kv=KVSpec(16, 16))
    serve(driver, [prompt_of(6500, 1)])
    cache = driver.engine._runner.cache
    copied.clear()
    for wave in range(10):  # each leaves 12 pages or more
        prompts = [prompt_of(300, 10 + 4 * wave + seed) for seed in range(4)]
        serve(driver, prompts, max_tokens=70)

        assert cache.usage.pages_total <= 1.625 * cache.usage.pages_used

    pools = 2 * len(cache.stores[0].layers)
    assert cache.usage.pages_used > 200
    assert len(copied) <= 5 * pools

    page = driver.engine._admission.budget.page_bytes
    held, free = driver.total, cache.usage.pages_total - cache.usage.pages_used
    assert driver.engine._memory.reclaimable().spare >= free * page > 0
    driver.reclaim("spare", held)  # another model needs the memory
    driver.run()

    assert cache.usage.pages_total == cache.usage.pages_used
    assert driver.total <= held - free * page


@pytest.mark.usefixtures("small_slab")
@pytest.mark.parametrize("tokens", part_of([230, 330, 500], 2))
def test_waves_that_leave_no_pages_copy_pools_in_the_first_ones_only(
    copied: list[int], tokens: int
) -> None:
    """Together, the eight rows of a wave need a third to a half of the pages that are cached."""
    driver = Driver(shallow.path(), kv=KVSpec(16, 16))
    serve(driver, [prompt_of(9700, 1)])
    for wave in range(5 if ALL else 4):
        if wave == 3:
            copied.clear()
        prompts = [prompt_of(120, 10 + 8 * wave + seed) for seed in range(8)]
        serve(driver, prompts, max_tokens=tokens)

    assert driver.engine._runner.cache.usage.pages_used < 160
    assert copied == []


@pytest.mark.usefixtures("small_slab")
def test_requests_that_fit_ask_for_no_memory_ahead() -> None:
    driver = Driver(shallow.path(), kv=KVSpec(16, 16))
    serve(driver, [prompt_of(6000, 1)])
    counts = driver.engine._runner.cache.usage
    serve(driver, [prompt_of(130, 2)], max_tokens=8)
    assert counts.pages_total - counts.pages_used < 8
    driver.asked.clear()
    serve(driver, [prompt_of(130, 3)], max_tokens=8)

    assert driver.asked == []


@pytest.mark.usefixtures("small_slab")
def test_an_engine_that_gave_memory_back_asks_for_none_ahead_until_it_was_idle() -> None:
    """The governor also reclaims under the system's pressure, while the budget has free bytes."""
    driver = Driver(shallow.path(), kv=KVSpec(16, 16))
    serve(driver, [prompt_of(9700, 1)])
    for row in range(4):
        driver.submit(f"r{row}", prompt_of(120, 2 + row), max_tokens=400, ignore_eos=True)
    driver.run(until=lambda: all(len(one.tokens) > 60 for one in driver.outcomes.values()))
    memory, page = driver.engine._memory, driver.engine._admission.budget.page_bytes
    driver.reclaim("spare", max(page, memory.reclaimable().spare))
    held = driver.total
    driver.run(until=lambda: all(len(one.tokens) > 200 for one in driver.outcomes.values()))

    assert not memory.grows_ahead
    assert driver.total <= held + 20 * page, "more than the rows need"
    driver.run()
    assert memory.grows_ahead


@pytest.mark.usefixtures("small_slab")
def test_free_pages_are_counted_by_those_of_their_level() -> None:
    """Dense pages of a row's beginning are larger than the quantized ones of its rest."""
    driver = Driver(shallow.path(), kv=KVSpec(4, 4, quantized_kv_start=512))
    serve(driver, [prompt_of(9000, 1)])
    serve(driver, [prompt_of(300, 2 + seed) for seed in range(4)], max_tokens=70)
    dense, quantized = driver.engine._runner.cache.stores[0].pages.allocators

    assert quantized.used > 100
    assert dense.free <= max(8, dense.used * 5 // 8)


@pytest.mark.usefixtures("small_slab")
def test_a_prompt_leaves_its_checkpoint_if_there_is_no_memory_for_pools_to_grow_ahead() -> None:
    driver = Driver(shallow.path(), kv=KVSpec(16, 16))
    serve(driver, [prompt_of(6500, 1)])
    driver.budget = driver.total + 30 * driver.engine._admission.budget.page_bytes
    driver.asked.clear()
    prompts = [prompt_of(1500, 2), prompt_of(1500, 3)]
    serve(driver, prompts)

    assert max(total for total, _ in driver.asked) > driver.budget, "no growth was asked for"
    for index, prompt in enumerate(prompts):
        driver.submit(f"again{index}", prompt, max_tokens=4)
    driver.run()
    assert [one.cached for one in driver.outcomes.values()] == [1280, 1280]


def test_prompts_that_begin_together_get_their_tails_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each growth copies the tails of all rows."""
    counts: list[int] = []
    resize = TailSlots._resize

    def noted(slots: TailSlots, count: int) -> None:
        counts.append(count)
        resize(slots, count)

    driver = Driver(shallow.path())
    monkeypatch.setattr(TailSlots, "_resize", noted)
    serve(driver, [prompt_of(20, seed) for seed in range(8)])
    assert counts == [8]


def test_a_prompt_has_one_tail_until_its_answers_begin() -> None:
    """More would be charged for, and plain steps read the tails that no row uses, too."""
    driver = Driver(shallow.path())
    driver.submit("r", prompt_of(700, 1), n=8, max_tokens=4)
    driver.step()
    assert driver.engine._prompts.computed_tokens > 0
    assert driver.engine._runner.cache.tail_slots == 1
    driver.run()


def test_the_last_tokens_are_sent_before_memory_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """If pools must be cut, the next step cuts them, so that the loop can pause before it."""
    driver = Driver(shallow.path())
    batch = driver.engine._batch
    unsent: list[list[Report]] = []
    run, step = IdleWork.run, driver.engine.step
    began_idle, cut_idle = list[bool](), list[bool]()
    cache = driver.engine._runner.cache

    def stepped() -> list[Report]:
        began_idle.append(driver.engine.is_idle)
        return step()

    def noted(work: IdleWork, *, was_idle: bool) -> MemoryRequested | None:
        unsent.append(list(batch.reports))
        assert was_idle == began_idle[-1]
        slots = cache.tail_slots
        report = run(work, was_idle=was_idle)
        if cache.tail_slots < slots:
            cut_idle.append(was_idle)
        return report

    monkeypatch.setattr(driver.engine, "step", stepped)
    monkeypatch.setattr(IdleWork, "run", noted)
    driver.engine.watch(lambda _: None, driver.take)
    serve(driver, [prompt_of(40, 1)])
    assert unsent
    assert not any(began_idle), "nothing has to be cut"
    serve(driver, [prompt_of(40, seed) for seed in range(FIRST_ROWS + 2)])
    assert not any(unsent)
    assert cut_idle == [True]
    assert cache.tail_slots <= FIRST_ROWS
    assert not driver.engine.has_work


class BusyStore:
    """A prefix store that always has something to write."""

    has_work = True
    writes = 0

    def work(self, _: float) -> None:
        self.writes += 1

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


def test_idle_work_does_not_wait_for_prefixes_to_be_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(shallow.path())
    engine, store = driver.engine, BusyStore()
    for seed in range(FIRST_ROWS + 2):
        driver.submit(f"r{seed}", prompt_of(40, seed), max_tokens=4)
    driver.run(until=lambda: not engine._batch.requests)
    assert engine._runner.cache.tail_slots > FIRST_ROWS
    monkeypatch.setattr(engine, "_segments", store)
    assert engine.is_idle
    driver.step()
    assert engine._runner.cache.tail_slots <= FIRST_ROWS
    assert store.writes


def test_idle_pools_grow_piece_by_piece_so_that_no_request_waits_for_all(
    copied: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = Driver(shallow.path()).alone(prompt_of(300, 9), max_tokens=8)
    driver = Driver(shallow.path())
    cache, run = driver.engine._runner.cache, IdleWork.run
    grown: list[int] = []

    def noted(work: IdleWork, *, was_idle: bool) -> MemoryRequested | None:
        before, capacity = len(copied), cache.usage.pages_total
        report = run(work, was_idle=was_idle)
        if cache.usage.pages_total >= capacity:  # pools were not cut
            grown.append(len(copied) - before)
        return report

    monkeypatch.setattr(IdleWork, "run", noted)
    conversation = prompt_of(9000, 2)
    for tokens in range(3000, 9000, 500):
        serve(driver, [conversation[:tokens]])
    assert 1 in grown
    assert max(grown) == 1

    for tokens in range(9000, 30_000, 500):  # a request comes after the first piece
        driver.submit("long", prompt_of(tokens, 3), max_tokens=1)
        grown.clear()
        driver.run(until=lambda: 1 in grown or not driver.engine.has_work)
        driver.outcomes.clear()
        if 1 in grown:
            break
    assert driver.engine.has_work, "pieces are left"
    assert driver.alone(prompt_of(300, 9), max_tokens=8) == expected
    driver.run()
    assert not driver.engine.has_work
