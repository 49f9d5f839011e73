"""Decode and prefill attention over pages, compared with dense attention in float32."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention.decode import decode_attention
from kvd.worker.attention.prefill import prefill_attention
from kvd.worker.cache.batch import DecodeHandle, PrefillHandle, make_caches
from kvd.worker.cache.packed import page_product, page_product_by_copy
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.store import KVStore
from tests.worker.attention.dense import dense_attention
from tests.worker.cache.helpers import Bench, DenseRow

pytestmark = pytest.mark.mlx

BITS = (2, 3, 4, 5, 6, 8)
UNEQUAL = (0, 1, 63, 64, 65, 1000)


def queries_for(bench: Bench, batch: int, repeats: int, tokens: int = 1) -> mx.array:
    g = bench.geometry
    shape = (batch, g.kv_heads * repeats, tokens, g.k_dim)
    return mx.array(bench.rng.normal(size=shape).astype(np.float32))


def assert_close(got: mx.array, want: mx.array, bound: float = 1e-5) -> None:
    got, want = np.array(got), np.array(want)
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= bound * max(1.0, np.abs(want).max())


def assert_decodes(
    bench: Bench, rows: list[DenseRow], repeats: int, sinks: mx.array | None = None
) -> None:
    handles = bench.decode(rows, batch=len(rows) + 2)
    queries = queries_for(bench, len(rows) + 2, repeats)
    scale = bench.geometry.k_dim**-0.5
    for layer, handle in enumerate(handles):
        assert isinstance(handle, DecodeHandle)
        output = decode_attention(queries, handle, scale, sinks)
        assert output.shape == (len(rows) + 2, queries.shape[1], 1, bench.geometry.v_dim)
        assert_close(output[len(rows) :], mx.zeros_like(output[len(rows) :]))
        for index, row in enumerate(rows):
            keys, values = (mx.array(side) for side in row.shown(layer, bench.store))
            want = dense_attention(queries[index], keys, values, scale, sinks)
            assert_close(output[index], want)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("repeats", [1, 2, 4, 8, 16])
def test_unequal_rows(dim: int, repeats: int) -> None:
    bench = Bench(LayerGeometry(2, dim, dim), Scheme(8, 8), layers=1)
    rows = [bench.new(length) for length in UNEQUAL]

    assert_decodes(bench, rows, repeats)


@pytest.mark.parametrize(("k_bits", "v_bits"), [(k, v) for k in BITS for v in BITS] + [(16, 16)])
@pytest.mark.parametrize("dim", [64, 80])
def test_bits_on_each_side(k_bits: int, v_bits: int, dim: int) -> None:
    bench = Bench(LayerGeometry(1, dim, dim), Scheme(k_bits, v_bits), layers=1)
    rows = [bench.new(length) for length in (65, 200)]

    assert_decodes(bench, rows, repeats=2)


def test_keys_and_values_of_different_size() -> None:
    bench = Bench(LayerGeometry(kv_heads=2, k_dim=192, v_dim=128), Scheme(8, 4), layers=1)

    assert_decodes(bench, [bench.new(300), bench.new(5)], repeats=4)


def test_rows_join_leave_flush_and_commit_pages_between_steps() -> None:
    bench = Bench(layers=2)
    rows = [bench.new(length) for length in UNEQUAL]
    for step in range(260):
        if step % 13 == 0:
            assert_decodes(bench, rows, repeats=2)
        else:
            bench.decode(rows)
        if step == 70:
            bench.free(rows.pop(2))
        if step == 75:
            rows.append(bench.new(321))
        if step == 150:
            bench.free(rows.pop(0))
            rows.insert(0, bench.new(90))

    bench.check()


def test_sinks() -> None:
    bench = Bench(LayerGeometry(2, 64, 64), Scheme(4, 4), layers=1)
    sinks = mx.array(bench.rng.normal(size=8).astype(np.float32))

    assert_decodes(bench, [bench.new(400), bench.new(3)], repeats=4, sinks=sinks)


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("scheme", [Scheme(8, 8), Scheme(16, 16)])
def test_sharp_attention_in_half_precision(dtype: mx.Dtype, scheme: Scheme) -> None:
    """Keys with a bias per channel, as in Qwen2, give scores of about 50."""
    store = KVStore([LayerGeometry(2, 64, 64, itemsize=2)], scheme, dtype)
    (cache,) = make_caches(store)
    rng = np.random.default_rng(3)
    keys = rng.normal(size=(1, 2, 500, 64)) + 6 * rng.normal(size=(1, 1, 1, 64))
    values = rng.normal(size=(1, 2, 500, 64))
    row = store.new_row()
    store.begin_prefill(row, 499)
    cache.update_and_fetch(*(mx.array(side[:, :, :499]).astype(dtype) for side in (keys, values)))
    store.finish_prefill()
    store.begin_decode([row])
    handle, _ = cache.update_and_fetch(
        *(mx.array(side[:, :, 499:]).astype(dtype) for side in (keys, values))
    )
    queries = mx.array(3 * rng.normal(size=(1, 8, 1, 64))).astype(dtype)
    got = decode_attention(queries, handle, 0.125)
    pool = store.layers[0].pools[0]
    if scheme.k_bits < 16:  # with float32 scales, `read` does not round to half precision
        words = [
            tuple(array.astype(mx.float32) if index else array for index, array in enumerate(side))
            for side in (pool.keys, pool.values)
        ]
        pool.keys, pool.values = words
    want = dense_attention(queries[0], *store.read(row, 0), 0.125)

    assert got.dtype == dtype
    assert_close(got[0].astype(mx.float32), want, bound=6e-3)  # the output's own rounding


@pytest.mark.parametrize("scheme", [Scheme(8, 4), Scheme(16, 16)])
@pytest.mark.parametrize("dim", [64, 80])
def test_both_page_products_agree(scheme: Scheme, dim: int) -> None:
    outputs = []
    for product in (page_product, page_product_by_copy):
        bench = Bench(LayerGeometry(2, dim, dim), scheme, layers=1, seed=4)
        bench.store.page_product = product
        rows = [bench.new(length) for length in (700, 70, 130)]
        (handle,) = bench.decode(rows)
        outputs.append(decode_attention(queries_for(bench, 3, 2), handle, 0.1))

    assert_close(*outputs, bound=1e-6)


def test_a_row_has_the_same_bits_alone_and_in_a_batch() -> None:
    """On the CPU, each operation of decode attention computes pages or rows one by one."""
    outputs = []
    for others in ((), (1, 640, 65, 1000)):
        bench = Bench(layers=1)
        row = bench.new(500)
        queries = queries_for(bench, 1, 2)
        rest = [bench.new(length) for length in others]
        bench.rng = np.random.default_rng(11)
        handles = bench.decode([row, *rest])
        padded = mx.concatenate([queries, queries_for(bench, len(rest), 2)]) if rest else queries
        outputs.append(np.array(decode_attention(padded, handles[0], 0.125))[0])

    assert np.array_equal(*outputs)


@pytest.mark.parametrize("dim", [64, 80, 128])
@pytest.mark.parametrize("chunks", [(1,), (64, 1), (63, 2), (256, 256, 5), (256, 1, 300)])
def test_a_chunk_sees_earlier_pages_and_its_exact_tokens(dim: int, chunks: tuple[int, ...]) -> None:
    bench = Bench(LayerGeometry(2, dim, dim), Scheme(4, 4), layers=1)
    row = bench.new()
    scale = dim**-0.5
    for count in chunks:
        before_keys, before_values = (mx.array(side) for side in row.shown(0, bench.store))
        bench.store.begin_prefill(row.row, count)
        keys, values = bench._add(row, 0, count)
        handle, same = bench.caches[0].update_and_fetch(keys, values)
        assert handle is same
        assert isinstance(handle, PrefillHandle)
        queries = queries_for(bench, 1, 4, tokens=count)
        output = prefill_attention(queries, handle, scale)
        mx.eval(output)
        bench.store.finish_prefill()
        all_keys = mx.concatenate([before_keys, keys[0]], axis=1)
        all_values = mx.concatenate([before_values, values[0]], axis=1)
        assert_close(output[0], dense_attention(queries[0], all_keys, all_values, scale))
    bench.check()


def test_the_scratch_is_full_once_dense_copies_reach_its_limit() -> None:
    bench = Bench(layers=3)
    row = bench.new(64 * 20)
    one = bench.geometry.dense_bytes(64 * 20 + 64)
    bench.store.scratch.limit = 2 * one
    bench.store.begin_prefill(row.row, 64)

    assert [bench.store.scratch.add(one) for _ in range(4)] == [False, True, False, True]


def test_infinite_queries_of_one_row_do_not_affect_other_rows() -> None:
    bench = Bench(LayerGeometry(1, 64, 64), Scheme(16, 16), layers=1)
    rows = [bench.new(200), bench.new(200)]
    (handle,) = bench.decode(rows)
    queries = queries_for(bench, 2, 2)
    want = np.array(decode_attention(queries, handle, 0.125))[1]
    huge = mx.concatenate([mx.full(queries[:1].shape, float("inf")), queries[1:]])

    got = np.array(decode_attention(huge, handle, 0.125))
    assert not np.isfinite(got[0]).all()
    assert np.array_equal(got[1], want)
