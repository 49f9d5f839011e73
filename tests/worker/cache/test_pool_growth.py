"""Pools grow between steps, one side of one layer at a time, before a flush lacks room."""

from __future__ import annotations

import itertools
import math

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.cache.pages import PageId
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.pool_growth import GrowthBehindSteps, lacks_room, make_room
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.store import KVStore
from tests.worker.cache.helpers import Bench
from tests.worker.cache.invariants import check_store

pytestmark = pytest.mark.mlx


def full(bench: Bench) -> list[PageId]:
    """Take and return all free pages, so that the next flush lacks room."""
    return bench.store.pages.take(0, bench.store.pages.allocators[0].free)


def test_pools_grow_one_piece_per_step_and_no_flush_has_to_grow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    rows = [bench.new(300), bench.new(70)]
    taken = full(bench)
    assert lacks_room(bench.store)
    copies: list[int] = []
    resize = PagePool.resize

    def counted(pool: PagePool, side: int, capacity: int) -> None:
        copies[-1] += 1
        resize(pool, side, capacity)

    monkeypatch.setattr(PagePool, "resize", counted)
    before, flushes = bench.store.pages.allocators[0].capacity, bench.store.flushes
    while bench.store.flushes == flushes:
        copies.append(0)
        bench.decode(rows)
        mx.eval(bench.store.arrays())
        make_room(bench.store, 0.0, itertools.count().__next__)
    for page in taken:
        bench.store.pages.allocators[0].release(page)

    check_store(bench.store)
    assert bench.store.pages.allocators[0].capacity > before
    assert sum(copies) == 2 * len(bench.store.layers)
    assert max(copies) == 1


def addresses(store: KVStore) -> list[int]:
    """Return where the arrays of all pools begin."""
    arrays = [array for layer in store.layers for pool in layer.pools for array in pool.arrays()]
    return [np.array(array, copy=False).__array_interface__["data"][0] for array in arrays]


@pytest.mark.parametrize("scratch", [0, 1 << 30])
def test_pools_grow_behind_steps_in_flight(scratch: int) -> None:
    """A row decodes between all pieces; its content and the next flush are as usual."""
    bench = Bench()
    row = bench.new(300)
    store = bench.store
    pages = store.pages
    free = pages.allocators[0].free
    pieces = 2 * len(store.layers)
    seconds: list[float] = []
    for work_s in GrowthBehindSteps(scratch).make_room_for(store, 0, free + 50):
        seconds.append(work_s)
        bench.decode([row])
    check_store(store)

    assert pages.allocators[0].free >= free + 50
    finite = [one for one in seconds if math.isfinite(one)]
    # Two pieces are waited for, and the last yield follows the allocator's growth.
    assert len(finite) == pieces + 1
    assert finite[0] == finite[1] == finite[-1] == 0.0
    assert all(one > 0 for one in finite[2:-1])
    assert len(seconds) - len(finite) == (pieces - 2 if scratch == 0 else 0)
    flushes, places = store.flushes, addresses(store)
    while store.flushes == flushes:
        bench.decode([row])
    assert addresses(store) == places, "the flush has copied a pool"
    check_store(store)


def test_growth_for_many_pages_leaves_room_for_the_next_flush() -> None:
    bench = Bench()
    rows = [bench.new(300), bench.new(70)]
    store = bench.store
    for _ in GrowthBehindSteps(0).make_room_for(store, 0, 200):
        bench.decode(rows)
    store.pages.take(0, 200)

    assert not lacks_room(store)
    places, flushes = addresses(store), store.flushes
    while store.flushes == flushes:
        bench.decode(rows)
    assert addresses(store) == places, "the flush has copied a pool"


def test_growth_keeps_no_memory_of_pools_that_are_cut() -> None:
    bench = Bench()
    row = bench.new(300)
    store = bench.store
    store.pages.compact()
    mx.synchronize()
    before = mx.get_active_memory()
    growth = GrowthBehindSteps(1 << 30)
    for _ in growth.make_room_for(store, 0, 5000):
        pass
    mx.synchronize()
    assert mx.get_active_memory() > before + 4000 * store.pages.page_bytes()
    store.pages.compact()
    mx.synchronize()

    # `growth` is alive, as an engine's is.
    assert mx.get_active_memory() - before < 4096 * len(growth._last)
    bench.free(row)


def test_copies_behind_steps_replace_no_more_than_the_scratch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench = Bench()
    bench.new(300)
    store = bench.store
    waited: list[int] = []
    settle = GrowthBehindSteps._settle
    monkeypatch.setattr(
        GrowthBehindSteps,
        "_settle",
        lambda growth: (waited.append(growth._replaced_bytes), settle(growth)),
    )
    piece = store.pages.capacity_ahead(store.pages.allocators[0])
    largest = max(store.layers[0].pools[0]._page_bytes) * piece
    scratch = largest
    taken = full(bench)
    for _ in GrowthBehindSteps(scratch).make_room_for(store, 0, 1):
        pass
    for page in taken:
        store.pages.allocators[0].release(page)

    assert waited
    assert all(scratch < nbytes <= scratch + largest for nbytes in waited)


def test_the_goal_of_growth_is_charged_at_once_and_stays_within_the_spare_bytes() -> None:
    bench = Bench()
    bench.new(300)
    full(bench)
    store = bench.store
    before = store.pages.charged_bytes
    room = before + 10 * store.pages.charge()
    store.pages.spare = lambda: room - store.pages.charged_bytes
    make_room(store, 0.0, itertools.count().__next__)

    assert store.pages.charged_bytes == room
    make_room(store, 1e9, itertools.count().__next__)
    assert store.pages.allocators[0].free == 10
    assert store.pages.charged_bytes == room
    full(bench)
    assert not lacks_room(store)


def test_compacting_during_growth_leaves_nothing_behind() -> None:
    bench = Bench(scheme=[Scheme(8, 8), Scheme(4, 4)])
    row = bench.new(300)
    held = full(bench)
    make_room(bench.store, 0.0, itertools.count().__next__)
    for page in held:
        bench.store.pages.allocators[0].release(page)
    bench.store.pages.compact()

    assert bench.store.pages.nbytes == len(row.row.pages) * bench.store.pages.page_bytes()
    check_store(bench.store)


def make_idle_room(store: KVStore, pages: int) -> int:
    """Grow pools as an idle engine does; return the number of pieces."""
    pieces = 0
    while store.pages.lacks_room(pages):
        store.pages.grow_towards(pages)
        pieces += 1
        assert pieces < 100
    return pieces


@pytest.mark.parametrize(("before", "after"), [(0, 20), (9, 20), (10, 10), (20, 20), (21, 20)])
def test_an_idle_store_has_free_pages_besides_those_of_snapshots(before: int, after: int) -> None:
    bench = Bench(scheme=[Scheme(8, 8), Scheme(4, 4)])
    store, rows = bench.store, [bench.new(700), bench.new(300)]
    store.pages.convert(0, 1, list(rows[1].row.pages))
    for row in rows:
        store.snapshots.take(row.row)
        bench.free(row)
    top, lower = store.pages.allocators
    store.shrink()
    make_idle_room(store, 2 * before)
    store.shrink(before)
    assert top.free == before
    store.shrink(20)
    pieces = make_idle_room(store, 20)

    assert pieces == (0 if after <= before else 1 + 2 * len(store.layers))
    assert (top.free, lower.free) == (after, 0)
    assert top.used > 0 < lower.used
    check_store(store)


@pytest.mark.parametrize("pieces", range(1, 6))
@pytest.mark.parametrize("tokens", [100, 700, 3000])
def test_a_row_may_come_while_an_idle_store_grows(pieces: int, tokens: int) -> None:
    bench = Bench()
    store, kept = bench.store, bench.new(700)
    store.snapshots.take(kept.row)
    bench.free(kept)
    store.shrink()
    for _ in range(pieces):
        if store.pages.lacks_room(20):
            store.pages.grow_towards(20)
    row = bench.new(tokens)
    check_store(store)
    bench.free(row)
    make_idle_room(store, 20)
    assert store.pages.allocators[0].free >= 10
    assert not store.pages.goals
    check_store(store)
    store.shrink(20)
    assert store.pages.allocators[0].free <= 20
    check_store(store)


def test_lower_levels_reduce_the_room_that_the_top_level_keeps() -> None:
    bench = Bench(scheme=[Scheme(8, 8), Scheme(4, 4)])
    row = bench.new(1000)
    store = bench.store
    store.pages.convert(0, 1, list(row.row.pages))
    reserved = store.pages.allocators[1].used + 20
    store.pages.compact(reserved)

    assert store.pages.charged_bytes <= reserved * store.pages.charge()
    assert store.pages.allocators[0].capacity >= 20
