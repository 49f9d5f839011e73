"""The store compared with dense rows: contents, lengths, references, bytes."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.worker.attention.decode import decode_attention
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.layout import AttentionPart, Entry, Layout
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.settings import CacheSettings
from tests.worker.cache.helpers import Bench, DenseRow
from tests.worker.cache.invariants import check_cache, check_store

pytestmark = pytest.mark.mlx

LENGTHS = (0, 1, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1000)
BITS = (2, 3, 4, 5, 6, 8, 16)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefilled_row_reads_back(length: int) -> None:
    bench = Bench()
    bench.new(length)

    bench.check()


@pytest.mark.parametrize(("k_bits", "v_bits"), [(k, 8) for k in BITS] + [(8, v) for v in BITS])
@pytest.mark.parametrize("dim", [64, 80])
def test_every_bit_width_and_orientation(k_bits: int, v_bits: int, dim: int) -> None:
    geometry = LayerGeometry(kv_heads=2, k_dim=dim, v_dim=dim)
    bench = Bench(geometry, Scheme(k_bits, v_bits), layers=1)
    row = bench.new(200)
    for _ in range(70):
        bench.decode([row])

    bench.check()
    bench.drain()
    bench.check()


@pytest.mark.parametrize("scheme", [Scheme(16, 16), Scheme(8, 4)])
def test_values_of_another_dtype_than_keys_read_back(scheme: Scheme) -> None:
    """RoPE or norms of heads can widen the keys of a model in half precision."""
    found = []
    for dtype in (mx.float32, mx.bfloat16):
        bench = Bench(scheme=scheme, layers=1)
        row = bench.store.new_row()
        bench.store.begin_prefill(row, 200)
        keys, values = mx.random.normal((2, 1, 2, 200, 64), key=mx.random.key(0))
        values = mx.round(4 * values).astype(dtype)  # exact in bfloat16
        bench.caches[0].update_and_fetch(keys, values)
        bench.store.finish_prefill()
        found += [np.array(side.astype(mx.float32)) for side in bench.store.read(row, 0)]

    np.testing.assert_array_equal(found[2], found[0])
    # Half precision rounds the scales of quantized values.
    np.testing.assert_allclose(found[3], found[1], rtol=0, atol=0 if scheme.v_bits == 16 else 0.1)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_nbytes_is_what_the_arrays_hold(dim: int) -> None:
    bench = Bench(LayerGeometry(kv_heads=2, k_dim=dim, v_dim=dim), Scheme(8, 4))
    bench.new(700)
    bench.new(130)
    held = sum(array.nbytes for layer in bench.store.layers for array in layer.arrays())

    assert bench.store.nbytes == held
    assert (
        bench.store.pages.nbytes
        == bench.store.pages.allocators[0].capacity * bench.store.pages.page_bytes()
    )


def test_the_content_of_a_row_does_not_depend_on_flushes() -> None:
    """Flushing after every step, or only when a tail is full, gives the same bits."""
    read = []
    for every in (1, 1000):
        bench = Bench(layers=1, seed=5)
        row = bench.new(100)
        shown = []
        for step in range(300):
            bench.decode([row])
            if step % 7 == 0:
                shown += [np.array(side) for side in bench.store.read(row.row, 0)]
            if step % every == 0:
                bench.drain()
        read.append(shown)

    assert all(np.array_equal(one, other) for one, other in zip(*read, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[1], [1, 12, 40, 65, 66, 100, 127, 191, 300]])
def test_rows_of_any_length_flush_once_in_64_tokens(lengths: list[int]) -> None:
    bench = Bench(layers=1)
    rows = [bench.new(length) for length in lengths]
    before = bench.store.flushes
    for _ in range(1280):
        bench.decode(rows)

    assert bench.store.flushes - before <= 20
    bench.check()


def test_a_full_tail_refuses_a_step_without_a_flush() -> None:
    bench = Bench(layers=1)
    other, row = bench.new(100), bench.new(127)
    assert bench.store.needs_flush([row.row])
    with pytest.raises(ValueError, match="flush"):
        bench.store.begin_decode([other.row, row.row])
    bench.check()  # no row got a new token
    bench.drain()
    bench.decode([row])
    bench.check()


def test_a_page_is_written_with_those_of_other_rows_and_committed_at_the_rows_own_length() -> None:
    bench = Bench(layers=1)
    second, first = bench.new(100), bench.new(125)
    for _ in range(3):
        bench.decode([first, second])
    assert second.row.written_ahead
    assert (first.row.length, second.row.length) == (128, 103)
    flushes = bench.store.flushes
    assert first.row.pages
    while second.row.length < 127:
        bench.decode([first, second])
        assert not second.row.pages
    bench.decode([second])

    assert second.row.pages
    assert bench.store.flushes == flushes
    bench.check()


def test_pages_that_leave_a_window_leave_the_tables_without_new_pages() -> None:
    bench = Bench(layers=1, kind=Kind(window=100))
    row = bench.new(320)
    while row.row.length < 340:
        bench.decode([row])
    bench.prefill(row, 30)

    assert row.row.pages == []
    bench.check()


def test_a_freed_row_with_a_page_written_ahead_leaves_nothing() -> None:
    bench = Bench(layers=1)
    leaving, staying = bench.new(100), bench.new(120)
    for _ in range(20):
        bench.decode([leaving, staying])
    assert leaving.row.written_ahead
    bench.free(leaving)
    bench.drain()

    bench.check()
    assert bench.store.pages.allocators[0].used == len(staying.row.held)


def test_shrink_frees_everything() -> None:
    bench = Bench()
    rows = [bench.new(500) for _ in range(3)]
    for row in rows:
        bench.free(row)
    bench.store.shrink()

    assert bench.store.nbytes == 0
    bench.new(300)
    bench.check()


def test_page_limit_caps_growth() -> None:
    bench = Bench(layers=1)
    limit = 10 * bench.store.pages.charge()
    bench.store.pages.spare = lambda: limit - bench.store.pages.charged_bytes
    bench.new(64 * 11)

    assert bench.store.pages.allocators[0].capacity == 10


def test_rows_with_a_dense_start_stay_within_their_reservation() -> None:
    """A flush that needs room on one level first cuts the unused room of all pools."""
    schemes = [Scheme(16, 16), Scheme(4, 4)]
    bench = Bench(LayerGeometry(1, 64, 64), schemes, layers=2, quantized_start=512)
    store, chunk = bench.store, 128
    lengths = [3000, 600, 2500, 500]
    limit = sum(store.most_bytes(length, chunk) for length in lengths)
    store.pages.spare = lambda: limit - store.pages.charged_bytes
    rows = [bench.new() for _ in lengths]
    rng = np.random.default_rng(2)
    while left := [
        (row, length)
        for row, length in zip(rows, lengths, strict=True)
        if row.row.length <= length - chunk
    ]:
        row, _ = left[rng.integers(len(left))]
        bench.prefill(row, chunk)
        assert store.pages.charged_bytes <= limit
        check_store(store)

    assert [{page.level for page in row.row.pages} for row in rows] == [{1}, {1}, {1}, {0}]


def test_pools_do_not_grow_ahead_into_what_other_kinds_reserved() -> None:
    part = LayerGeometry(1, 64, 64)
    kinds = (FULL, Kind(window=400), FULL, Kind(window=1000))
    layout = Layout(tuple(Entry((AttentionPart(kind, part),)) for kind in kinds), mx.float32)
    cache = ModelCache(layout, CacheSettings(schemes=(Scheme(8, 8),)))
    lengths, chunk = [2000, 700], 128
    cache.limit_bytes = sum(
        cache.costs.pages_bytes(one, chunk) + cache.row_bytes for one in lengths
    )
    tokens = mx.random.normal((1, 1, chunk, 64))
    for length in lengths:
        sequence = cache.new_row()
        while sequence.length <= length - chunk:
            cache.begin_prefill(sequence, chunk)
            for view in cache.views([sequence]):
                view.update_and_fetch(tokens, tokens)
            cache.end_pass()
            cache.finish_prefill()
            held = cache.charged_bytes + cache.tail_slots * cache.row_bytes
            assert held <= cache.limit_bytes
            check_cache(cache)


def test_rows_that_share_pages_with_a_row_leaving_the_dense_start_keep_them_dense() -> None:
    bench = Bench(scheme=[Scheme(16, 16), Scheme(2, 2)], layers=1, quantized_start=512)
    row = bench.new(400)
    store = bench.store
    before = [np.array(side) for side in store.read(row.row, 0)]
    copies = [store.fork(row.row) for _ in range(3)]
    snapshot = store.snapshots.take(copies.pop())
    for copy in copies:  # each leaves the dense start at its own flush
        store.begin_prefill(copy, 200)
        tokens = mx.random.normal((1, 2, 200, 64))
        bench.caches[0].update_and_fetch(tokens, tokens)
        store.finish_prefill()

    assert all({page.level for page in copy.pages} == {1} for copy in copies)
    for holder in (row.row, store.restore(snapshot)):
        after = [np.array(side) for side in store.read(holder, 0)]
        assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    check_store(store)


def test_free_slots_are_reused() -> None:
    bench = Bench(layers=1)
    rows = [bench.new(10) for _ in range(4)]
    bench.free(rows[1])
    again = bench.new(70)

    assert again.row.slot == rows[1].row.slot
    bench.check()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_rows_join_and_leave_between_steps(data: st.DataObject) -> None:
    scheme = data.draw(st.sampled_from([Scheme(8, 8), Scheme(4, 4), Scheme(16, 16)]))
    bench = Bench(scheme=scheme, layers=1, seed=data.draw(st.integers(0, 99)))
    rows: list[DenseRow] = []
    for _ in range(data.draw(st.integers(3, 12))):
        action = data.draw(st.sampled_from(["join", "leave", "decode", "decode", "flush"]))
        if action == "join":
            rows.append(bench.new(data.draw(st.sampled_from(LENGTHS[:-1])), chunk=128))
        elif action == "leave" and rows:
            bench.free(rows.pop(data.draw(st.integers(0, len(rows) - 1))))
        elif action == "flush":
            bench.drain()
        elif rows:
            chosen = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique_by=id))
            for _ in range(data.draw(st.integers(1, 140))):
                bench.decode(chosen, batch=len(chosen) + 1)
        bench.check()
    bench.drain()
    bench.check()


def test_pages_do_not_depend_on_chunks() -> None:
    """Every division into chunks stores the same pages."""
    for length, chunk in itertools.product((65, 300, 513), (64, 128, 256)):
        bench = Bench(layers=1, seed=3)
        bench.new(length, chunk=chunk)
        bench.check()


@pytest.mark.slow
def test_pages_are_written_in_place_and_only_at_flushes() -> None:
    """Peak memory shows no second pool, so the arrays' buffers are written in place."""
    geometry = LayerGeometry(kv_heads=4, k_dim=128, v_dim=128)
    bench = Bench(geometry, layers=2)
    limit = 400 * bench.store.pages.charge()
    bench.store.pages.spare = lambda: limit - bench.store.pages.charged_bytes
    big = bench.new(64 * 300, chunk=2048)
    small = bench.new(100)
    for row in (big, small):  # dense copies are not compared here, and each step would copy them
        row.keys, row.values = ([side[:, :0] for side in held] for held in (row.keys, row.values))
    one_layer = bench.store.pages.nbytes // 2
    assert one_layer > 20_000_000
    bench.drain()
    mx.clear_cache()
    mx.reset_peak_memory()
    steady = mx.get_active_memory()
    queries = mx.random.normal((2, 8, 1, 128))
    outputs: list[mx.array] = []
    for _ in range(160):
        outputs = _pipelined_step(bench, [big, small], queries, outputs)
    mx.eval(outputs)
    bench.drain()

    # The smallest array that could be copied, the words of one side, is 0.44 of a layer's pool.
    assert mx.get_peak_memory() - steady < one_layer // 3


def _pipelined_step(
    bench: Bench, rows: list[DenseRow], queries: mx.array, before: list[mx.array]
) -> list[mx.array]:
    if bench.store.needs_flush([row.row for row in rows]):
        mx.eval(before)  # as the engine does: no step in flight reads the pools
    handles = bench.decode(rows)
    outputs = [decode_attention(queries, handle, 0.1) for handle in handles]
    # Launched and not awaited: the next step is built while this one runs.
    mx.async_eval(outputs, bench.store.arrays())
    return outputs


def test_nan_in_a_tail_does_not_reach_the_next_row_in_its_slot() -> None:
    bench = Bench(layers=1)
    bad, good = bench.new(100), bench.new(30)
    bench.store.layers[0].tail_values[bad.row.slot, :, 50] = mx.nan
    bench.rows.remove(bad)
    bench.store.free(bad.row, clean=False)
    after = bench.new(20)
    assert after.row.slot == bad.row.slot
    (handle,) = bench.decode([good, after])
    output = decode_attention(mx.ones((2, 4, 1, 64)), handle, 0.125)

    assert np.isfinite(np.array(output)).all()
    bench.check()
