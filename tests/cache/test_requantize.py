"""Stepping rows down while they run, and giving the memory back."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvd.worker.attention.decode import decode_attention
from kvd.worker.attention.dense import dense_attention
from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.requantize import SLICE_PAGES, StepDown
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from tests.cache.helpers import Bench, DenseRow

pytestmark = pytest.mark.mlx

LADDER = [Scheme(8, 8), Scheme(8, 4), Scheme(4, 4)]


def no_clock() -> float:
    return 0.0


def step_down(bench: Bench, rows: list[DenseRow], level: int) -> None:
    bench.drain()
    bench.check()  # and so the twins know which pages there are
    down = StepDown(bench.store, [row.row for row in rows], level)
    down.advance(1.0, no_clock)
    assert down.over
    for row in rows:
        row.lowered(level)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("dim", [64, 80])
def test_pages_show_what_the_lower_level_keeps(level: int, dim: int) -> None:
    bench = Bench(LayerGeometry(2, dim, dim), LADDER)
    lowered, other = bench.new(700), bench.new(300)
    step_down(bench, [lowered], level)

    bench.check()
    assert {page.level for page in lowered.row.pages} == {level}
    assert {page.level for page in other.row.pages} == {0}


def test_attention_over_pages_of_several_levels() -> None:
    bench = Bench(scheme=LADDER, layers=1)
    rows = [bench.new(length) for length in (500, 700, 65, 900)]
    bench.drain()
    bench.check()
    down = StepDown(bench.store, [rows[3].row], 2)
    assert down.advance(0.0, lambda: 1.0) == min(SLICE_PAGES, len(rows[3].row.pages))
    rows[3].lowered(2)
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
    bench.drain()
    bench.check()


def test_delicate_layer_keeps_its_floor() -> None:
    bench = Bench(scheme=LADDER, layers=2, floors=[LADDER[0], None])
    row = bench.new(400)
    step_down(bench, [row], 2)

    bench.check()
    schemes = [layer.pools[2].scheme for layer in bench.store.layers]
    assert schemes == [LADDER[0], LADDER[2]]
    assert bench.store.page_bytes(2) == sum(bench.geometry.page_bytes(scheme) for scheme in schemes)


def test_work_is_cut_into_slices_by_the_clock() -> None:
    bench = Bench(scheme=LADDER, layers=1)
    row = bench.new(64 * 50)
    ticks = iter(range(1000))
    down = StepDown(bench.store, [row.row], 1)
    counts = []
    while not down.over:
        counts.append(down.advance(0.5, lambda: float(next(ticks))))
        bench.store.check()

    assert counts == [16, 16, 16, 1]


def test_pages_that_await_the_flush_follow() -> None:
    bench = Bench(scheme=LADDER, layers=1)
    row = bench.new(127)
    bench.decode([row])
    assert row.row.pending == 1
    row.shown(0, bench.store)
    mx.eval(bench.store.arrays())
    down = StepDown(bench.store, [row.row], 2)
    assert down.advance(1.0, no_clock) == 0
    assert not down.over
    bench.drain()
    assert down.advance(1.0, no_clock) == 1
    row.lowered(2)

    assert down.over
    bench.check()


def test_shared_pages_are_converted_once_for_all() -> None:
    bench = Bench(scheme=LADDER, layers=1)
    one = bench.new(400)
    twin = bench.store.fork(one.row)
    taken = bench.store.allocators[0].used
    down = StepDown(bench.store, [one.row], 2)

    assert down.advance(1.0, no_clock) == taken
    assert twin.pages == one.row.pages
    assert bench.store.allocators[2].used == taken
    assert bench.store.allocators[0].used == 0
    bench.store.check()


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_failure_half_way_leaves_every_page_on_one_level(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(scheme=LADDER, layers=3)
    row = bench.new(64 * 40)
    bench.drain()
    bench.check()
    down = StepDown(bench.store, [row.row], 2)
    down.advance(0.0, lambda: 1.0)
    for path in row.paths[:SLICE_PAGES]:
        path.append(2)
    calls = iter(range(100))
    move = LayerStore.move

    def failing(layer: LayerStore, *arguments: object) -> None:
        if next(calls) == fails_at:
            raise RuntimeError("[metal::malloc] out of memory")
        move(layer, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LayerStore, "move", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            down.advance(0.0, lambda: 1.0)
    bench.check()
    down.advance(1.0, no_clock)
    row.lowered(2)

    assert down.over
    bench.check()


def test_untouched_rows_are_the_same_to_the_bit() -> None:
    outputs = []
    for lower in (False, True):
        bench = Bench(scheme=LADDER, layers=1, seed=2)
        untouched, lowered = bench.new(600), bench.new(600)
        if lower:
            step_down(bench, [lowered], 2)
        handles = bench.decode([untouched, lowered])
        queries = mx.array(bench.rng.normal(size=(2, 4, 1, 64)).astype(np.float32))
        outputs.append(np.array(decode_attention(queries, handles[0], 0.125)))

    assert np.array_equal(outputs[0][0], outputs[1][0])
    assert not np.array_equal(outputs[0][1], outputs[1][1])


def test_memory_comes_back_and_peak_stays_within_the_scratch() -> None:
    geometry = LayerGeometry(kv_heads=4, k_dim=128, v_dim=128)
    bench = Bench(geometry, LADDER, layers=3)
    rows = [bench.new(64 * 60, chunk=1024) for _ in range(3)]
    bench.drain()
    bench.store.compact()
    mx.clear_cache()
    before = mx.get_active_memory()
    held = bench.store.nbytes
    mx.reset_peak_memory()
    down = StepDown(bench.store, [row.row for row in rows], 2)
    while not down.over:
        down.advance(0.0, lambda: 1.0)
        bench.store.compact()
    pages = sum(len(row.row.pages) for row in rows)

    assert bench.store.pages_bytes == pages * bench.store.page_bytes(2)
    mx.clear_cache()
    # What the store says it gave back is what the allocator has back, but for a few indices.
    assert abs((before - mx.get_active_memory()) - (held - bench.store.nbytes)) < 4096
    one_layer = geometry.page_bytes(LADDER[0]) * pages
    slab = 64 * bench.store.page_bytes(2)
    assert mx.get_peak_memory() - before < one_layer + slab


def test_compacting_moves_pages_together() -> None:
    bench = Bench(scheme=LADDER)
    rows = [bench.new(64 * 12) for _ in range(4)]
    for row in (rows[0], rows[2]):
        bench.free(row)
    freed = bench.store.compact()

    assert freed > 0
    assert [one.capacity for one in bench.store.allocators] == [22, 0, 0]
    bench.check()
    bench.rows[0].shown(0, bench.store)
    bench.decode([rows[1], rows[3]])
    bench.check()


class Ladder(RuleBasedStateMachine):
    """Rows come, go, decode, share and step down in any order; the dense twins agree."""

    @initialize(seed=st.integers(0, 1000), dim=st.sampled_from([64, 80]))
    def start(self, seed: int, dim: int) -> None:
        self.bench = Bench(
            LayerGeometry(1, dim, dim), LADDER, layers=2, floors=[None, LADDER[1]], seed=seed
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
                row.shown(0, self.bench.store) if row.row.pending else None

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
            twin.paths = row.paths  # the same pages: what happens to one happens to the other
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
        self.bench.store.compact(pages)

    @rule()
    def flush(self) -> None:
        self.bench.drain()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "bench"):
            mx.eval(self.bench.store.arrays())
            self.bench.check()


TestLadder = Ladder.TestCase
TestLadder.settings = settings(max_examples=15, stateful_step_count=25, deadline=None)
