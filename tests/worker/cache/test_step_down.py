"""Stepping rows down while they run, and freeing the memory."""

from __future__ import annotations

import gc
import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.worker.attention.decode import decode_attention
from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.page_store import SLICE_PAGES, PageStore
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.step_down import StepDown
from tests.worker.attention.dense import dense_attention
from tests.worker.cache.helpers import Bench, DenseRow
from tests.worker.cache.invariants import check_store

pytestmark = pytest.mark.mlx

SCHEMES = [Scheme(8, 8), Scheme(8, 4), Scheme(4, 4)]


def no_clock() -> float:
    return 0.0


def piece(down: StepDown) -> int:
    """Do one piece of work: with no time left, `advance` stops after the first."""
    return down.advance(0.0, lambda: 1.0)


def note(row: DenseRow) -> None:
    """Record the new levels of pages in the dense row."""
    for page, path in zip(row.row.pages, row.paths, strict=False):
        if page.level != path[-1]:
            path.append(page.level)


def step_down(bench: Bench, rows: list[DenseRow], level: int) -> None:
    bench.drain()
    bench.check()  # records the pages of each dense row
    down = StepDown(bench.store, [row.row for row in rows], level)
    down.advance(1.0, no_clock)
    assert down.over
    for row in rows:
        row.step_down(level)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("dim", [64, 80])
def test_pages_have_the_precision_of_the_lower_level(level: int, dim: int) -> None:
    bench = Bench(LayerGeometry(2, dim, dim), SCHEMES)
    lowered, other = bench.new(700), bench.new(300)
    step_down(bench, [lowered], level)

    bench.check()
    assert {page.level for page in lowered.row.pages} == {level}
    assert {page.level for page in other.row.pages} == {0}


def test_attention_over_pages_of_several_levels() -> None:
    bench = Bench(scheme=SCHEMES, layers=1)
    rows = [bench.new(length) for length in (500, 700, 65, 900)]
    bench.drain()
    bench.check()
    down = StepDown(bench.store, [rows[3].row], 2)
    while not piece(down):
        pass
    note(rows[3])
    step_down(bench, [rows[1]], 1)
    for _ in range(150):
        handles = bench.decode(rows)
    queries = mx.array(bench.rng.normal(size=(4, 4, 1, 64)).astype(np.float32))
    output = decode_attention(queries, handles[0], 0.125)
    for index, row in enumerate(rows):
        keys, values = (mx.array(side) for side in row.shown(0, bench.store))
        want = np.array(dense_attention(queries[index], keys, values, 0.125))
        assert np.isfinite(np.array(output[index])).all()
        assert np.abs(np.array(output[index]) - want).max() < 1e-5
    assert {page.level for page in rows[1].row.pages} == {1}
    assert {page.level for page in rows[3].row.pages} == {0, 2}
    bench.drain()
    bench.check()


def test_a_layer_does_not_go_below_its_floor() -> None:
    bench = Bench(scheme=SCHEMES, layers=2, layer_schemes=[[SCHEMES[0]] * len(SCHEMES), SCHEMES])
    row = bench.new(400)
    step_down(bench, [row], 2)

    bench.check()
    schemes = [layer.pools[2].scheme for layer in bench.store.layers]
    assert schemes == [SCHEMES[0], SCHEMES[2]]
    assert bench.store.pages.page_bytes(2) == sum(
        bench.geometry.page_bytes(scheme) for scheme in schemes
    )


def test_a_slice_ends_with_the_first_piece_that_passes_its_time() -> None:
    bench = Bench(scheme=SCHEMES, layers=1)
    row = bench.new(64 * 50)
    now = 0.0

    def page_takes_a_second(store: PageStore, *arguments: object) -> None:
        nonlocal now
        now += len(arguments[-1])
        convert(store, *arguments)

    convert = PageStore.convert
    down = StepDown(bench.store, [row.row], 1)
    counts = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PageStore, "convert", page_takes_a_second)
        while not down.over:
            counts.append(down.advance(10.0, lambda: now))
            check_store(bench.store)

    # One page to measure the speed, then as many as the time allows.
    assert counts == [10, 10, 10, 10, 9]
    assert now == sum(counts)


def test_a_page_written_ahead_is_written_again_on_the_new_level() -> None:
    bench = Bench(scheme=SCHEMES, layers=1)
    row = bench.new(100)
    bench.drain()
    assert [page.level for page in row.row.written_ahead] == [0]
    down = StepDown(bench.store, [row.row], 2)
    assert down.advance(1.0, no_clock) == 0
    assert down.over
    assert bench.store.pages.used_bytes == 0
    while not row.row.pages:
        bench.decode([row])

    assert [page.level for page in row.row.pages] == [2]
    bench.check()  # quantized once, from the dense tokens


def test_shared_pages_are_converted_once_for_all_rows() -> None:
    bench = Bench(scheme=SCHEMES, layers=1)
    one = bench.new(400)
    twin = bench.store.fork(one.row)
    taken = bench.store.pages.allocators[0].used
    down = StepDown(bench.store, [one.row], 2)

    assert down.advance(1.0, no_clock) == taken
    assert twin.pages == one.row.pages
    assert bench.store.pages.allocators[2].used == taken
    assert bench.store.pages.allocators[0].used == 0
    check_store(bench.store)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_failure_leaves_every_page_on_one_level_or_the_other(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(scheme=SCHEMES, layers=3)
    row = bench.new(64 * 40)
    bench.drain()
    bench.check()
    down = StepDown(bench.store, [row.row], 2)
    while not piece(down):
        pass
    note(row)
    calls = iter(range(100))
    move = LayerStore.move

    def failing(layer: LayerStore, *arguments: object) -> None:
        if next(calls) == fails_at:
            raise RuntimeError("[metal::malloc] out of memory")
        move(layer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LayerStore, "move", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            piece(down)
    bench.check()
    down.advance(1.0, no_clock)
    row.step_down(2)

    assert down.over
    bench.check()


def test_other_rows_do_not_change() -> None:
    outputs = []
    for lower in (False, True):
        bench = Bench(scheme=SCHEMES, layers=1, seed=2)
        untouched, lowered = bench.new(600), bench.new(600)
        if lower:
            step_down(bench, [lowered], 2)
        handles = bench.decode([untouched, lowered])
        queries = mx.array(bench.rng.normal(size=(2, 4, 1, 64)).astype(np.float32))
        outputs.append(np.array(decode_attention(queries, handles[0], 0.125)))

    assert np.array_equal(outputs[0][0], outputs[1][0])
    assert not np.array_equal(outputs[0][1], outputs[1][1])


MIB = 1 << 20


def heavy() -> tuple[Bench, list[DenseRow]]:
    """Return three rows of 59 pages in 3 layers: 38 MiB on level 0, with no free page."""
    bench = Bench(LayerGeometry(kv_heads=4, k_dim=128, v_dim=128), SCHEMES, layers=3)
    rows = [bench.new(64 * 60, chunk=1024) for _ in range(3)]
    bench.drain()
    bench.store.pages.compact()
    mx.clear_cache()
    return bench, rows


@pytest.mark.slow
@pytest.mark.parametrize("scratch", [12 * MIB, 64 * MIB])
@pytest.mark.parametrize("lowered", [[0, 1, 2], [0, 1], [1]])
def test_memory_is_freed_and_the_peak_stays_within_the_scratch(
    scratch: int, lowered: list[int]
) -> None:
    gc.collect()  # arrays of earlier tests
    bench, rows = heavy()
    before = mx.get_active_memory()
    held = bench.store.nbytes
    mx.reset_peak_memory()
    most = 0
    down = StepDown(bench.store, [rows[index].row for index in lowered], 2, scratch=scratch)
    while not down.over:
        piece(down)
        check_store(bench.store)
        most = max(most, bench.store.nbytes)
    pages = sum(len(rows[index].row.pages) for index in lowered)
    kept = 59 * 3 - pages

    store = bench.store
    assert store.pages.nbytes == pages * store.pages.page_bytes(2) + kept * store.pages.page_bytes()
    # The store reports as many bytes as the allocator got back. The allocator returns buffers that
    # are up to 32 KiB larger than asked for.
    assert abs((before - mx.get_active_memory()) - (held - store.nbytes)) < MIB // 4
    assert mx.get_cache_memory() < MIB
    assert most <= held + scratch
    assert mx.get_peak_memory() - before <= scratch


@pytest.mark.slow
def test_a_small_scratch_makes_small_rounds() -> None:
    bench, rows = heavy()
    down = StepDown(bench.store, [row.row for row in rows], 2, scratch=0)
    capacities = [0]
    while not down.over:
        piece(down)
        capacities.append(bench.store.pages.allocators[2].capacity)

    steps = [after - before for before, after in itertools.pairwise(capacities) if after > before]
    assert steps[0] == SLICE_PAGES
    assert sum(steps) == 59 * 3


@pytest.mark.slow
def test_every_piece_copies_one_side_of_one_layer_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, rows = heavy()
    sizes: list[list[int]] = []
    resize = PagePool.resize

    def seen(pool: PagePool, side: int, capacity: int) -> None:
        sizes[-1].append(side)
        resize(pool, side, capacity)

    monkeypatch.setattr(PagePool, "resize", seen)
    down = StepDown(bench.store, [row.row for row in rows], 2, scratch=12 * MIB)
    while not down.over:
        sizes.append([])
        converted = piece(down)
        assert len(sizes[-1]) + (converted > 0) <= 1
        assert converted <= SLICE_PAGES
    assert sum(map(len, sizes)) > 2 * 2 * 3  # both sides of three layers, in rounds


def test_a_failed_resize_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(LayerGeometry(1, 64, 64), SCHEMES, layers=2)
    rows = [bench.new(64 * 30) for _ in range(2)]
    resize = PagePool.resize
    tries = itertools.count()

    def failing(pool: PagePool, side: int, capacity: int) -> None:
        if next(tries) % 2:
            raise RuntimeError("[metal::malloc] out of memory")
        resize(pool, side, capacity)

    monkeypatch.setattr(PagePool, "resize", failing)
    for row in rows:
        row.shown(0, bench.store)
    down = StepDown(bench.store, [row.row for row in rows], 2, scratch=0)
    failures = 0
    while not down.over:
        try:
            piece(down)
        except RuntimeError:
            failures += 1
        check_store(bench.store)
    assert failures > 10
    for row in rows:
        note(row)
    bench.check()


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 3, 8, 20])
def test_rows_that_end_during_a_step_down_free_their_memory(pieces: int) -> None:
    bench, rows = heavy()
    down = StepDown(bench.store, [row.row for row in rows], 2, scratch=12 * MIB)
    for _ in range(pieces):
        piece(down)
    for row in list(rows):
        bench.free(row)
    while not down.over:
        piece(down)
        check_store(bench.store)
    bench.store.pages.compact()

    assert bench.store.pages.nbytes == 0


def test_flushes_during_a_step_down_find_room() -> None:
    bench = Bench(LayerGeometry(1, 64, 64), SCHEMES, layers=1)
    rows = [bench.new(64 * 40) for _ in range(3)]
    for row in rows:
        row.shown(0, bench.store)
    bench.store.pages.compact()
    down = StepDown(bench.store, [row.row for row in rows[:2]], 2, scratch=0)
    while not down.over:
        for _ in range(20):
            bench.decode(rows)
        for row in rows:
            row.shown(0, bench.store)
        bench.drain()
        piece(down)
        for row in rows:
            note(row)
        check_store(bench.store)
    bench.check()

    assert rows[0].row.length > 64 * 44
    assert {page.level for row in rows[:2] for page in row.row.pages} == {2}
    assert {page.level for page in rows[2].row.pages} == {0}


def test_compacting_moves_pages_together() -> None:
    bench = Bench(scheme=SCHEMES)
    rows = [bench.new(64 * 12) for _ in range(4)]
    for row in (rows[0], rows[2]):
        bench.free(row)
    freed = bench.store.pages.compact()

    assert freed > 0
    assert [one.capacity for one in bench.store.pages.allocators] == [22, 0, 0]
    bench.check()
    bench.rows[0].shown(0, bench.store)
    bench.decode([rows[1], rows[3]])
    bench.check()


class StepDowns(RuleBasedStateMachine):
    """Rows start, end, decode, share and step down in any order, and agree with the model."""

    @initialize(seed=st.integers(0, 1000), dim=st.sampled_from([64, 80]))
    def start(self, seed: int, dim: int) -> None:
        self.bench = Bench(
            LayerGeometry(1, dim, dim),
            SCHEMES,
            layers=2,
            layer_schemes=[SCHEMES, [SCHEMES[0], *[SCHEMES[1]] * (len(SCHEMES) - 1)]],
            seed=seed,
        )
        self.forks = []

    @rule(length=st.sampled_from([0, 1, 64, 128, 200, 449]), chunk=st.sampled_from([64, 128, 256]))
    def join(self, length: int, chunk: int) -> None:
        if len(self.bench.rows) < 4:
            self.bench.drain()
            self.bench.new(length, chunk)

    @precondition(lambda self: self.bench.rows)
    @rule(data=st.data(), count=st.integers(1, 70))
    def decode(self, data: st.DataObject, count: int) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.bench.rows), min_size=1, unique_by=id))
        for _ in range(count):
            self.bench.decode(rows, batch=len(rows) + 1)
            for row in rows:
                row.shown(0, self.bench.store)

    @precondition(lambda self: self.bench.rows)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.bench.free(data.draw(st.sampled_from(self.bench.rows)))

    @precondition(lambda self: self.bench.rows)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        self.bench.drain()
        row = data.draw(st.sampled_from(self.bench.rows))
        if len(self.bench.rows) < 4:
            twin = DenseRow(self.bench.store.fork(row.row), list(row.keys), list(row.values))
            twin.paths = row.paths  # the same pages, which are converted for both
            self.forks.append(twin)
            self.bench.store.free(twin.row)

    @precondition(lambda self: self.bench.rows)
    @rule(data=st.data(), level=st.integers(0, 2))
    def lower(self, data: st.DataObject, level: int) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.bench.rows), min_size=1, unique_by=id))
        step_down(self.bench, rows, level)

    @rule(pages=st.integers(0, 9))
    def compact(self, pages: int) -> None:
        self.bench.drain()
        self.bench.store.pages.compact(pages)

    @rule()
    def flush(self) -> None:
        self.bench.drain()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "bench"):
            mx.eval(self.bench.store.arrays())
            self.bench.check()


TestSchemes = StepDowns.TestCase
TestSchemes.pytestmark = [pytest.mark.slow]
TestSchemes.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
