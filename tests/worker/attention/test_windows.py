"""Attention kinds: sliding windows, windows that keep the first tokens, and chunks.

Queries attend to exactly the visible tokens, and pages that no query sees any more are dropped.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.worker.attention.decode import decode_attention
from kvd.worker.attention.prefill import prefill_attention
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.batch import DecodeHandle, PrefillHandle
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.step_down import StepDown
from tests.worker.attention.dense import dense_attention
from tests.worker.cache.helpers import Bench, DenseRow
from tests.worker.cache.invariants import check_store

pytestmark = pytest.mark.mlx

KINDS = [
    Kind(window=1),
    Kind(window=40),
    Kind(window=64),
    Kind(window=128),
    Kind(window=200),
    Kind(window=200, keep=4),
    Kind(window=300, keep=70),
    Kind(window=150, keep=70),
    Kind(window=130, keep=129),
    Kind(chunk=96),
    Kind(chunk=256),
]


def assert_seen(bench: Bench, rows: list[DenseRow], queries: mx.array, output: mx.array) -> None:
    scale = bench.geometry.k_dim**-0.5
    for index, row in enumerate(rows):
        keys, values = (mx.array(side) for side in row.shown(0, bench.store))
        want = dense_attention(queries[index], keys, values, scale, kind=bench.store.kind)
        assert np.isfinite(np.array(output[index])).all()
        assert np.abs(np.array(output[index] - want)).max() < 1e-5


def decode_and_compare(bench: Bench, rows: list[DenseRow]) -> None:
    (handle,) = bench.decode(rows)
    assert isinstance(handle, DecodeHandle)
    g = bench.geometry
    queries = mx.array(bench.rng.normal(size=(len(rows), 4, 1, g.k_dim)).astype(np.float32))
    assert_seen(bench, rows, queries, decode_attention(queries, handle, g.k_dim**-0.5))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_decode_over_unequal_rows(kind: Kind) -> None:
    bench = Bench(LayerGeometry(2, 64, 64), Scheme(8, 8), layers=1, kind=kind)
    rows = [bench.new(length, chunk=64) for length in (0, 1, 63, 64, 65, 700)]
    # Enough steps that even the row that begins empty drops pages, and all rows commit some.
    span = kind.window or kind.chunk or 0
    for step in range(max(200, span + 130)):
        if step % 7 == 0:
            decode_and_compare(bench, rows)
        else:
            bench.decode(rows)
    bench.drain()
    bench.check()


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("chunk", [48, 256])
def test_prefill_in_chunks(kind: Kind, chunk: int) -> None:
    bench = Bench(LayerGeometry(2, 80, 80), Scheme(4, 4), layers=1, kind=kind)
    row = bench.new()
    for _ in range(700 // chunk):
        shown = [side.copy() for side in row.shown(0, bench.store)]
        bench.store.begin_prefill(row.row, chunk)
        handle, _ = bench.caches[0].update_and_fetch(*bench._add(row, 0, chunk))
        assert isinstance(handle, PrefillHandle)
        queries = mx.array(bench.rng.normal(size=(1, 4, chunk, 80)).astype(np.float32))
        output = prefill_attention(queries, handle, 80**-0.5)
        keys, values = (
            mx.array(np.concatenate([old, new[0][:, -chunk:]], axis=1))
            for old, new in zip(shown, (row.keys, row.values), strict=True)
        )
        want = dense_attention(queries[0], keys, values, 80**-0.5, kind=kind)
        assert np.isfinite(np.array(output)).all()
        assert np.abs(np.array(output[0] - want)).max() < 1e-5
        bench.store.finish_prefill()
    bench.check()


@pytest.mark.parametrize("kind", [Kind(window=100), Kind(window=200, keep=4), Kind(chunk=256)])
def test_a_row_stays_small_for_thousands_of_steps(kind: Kind) -> None:
    bench = Bench(LayerGeometry(1, 8, 8), Scheme(8, 8), layers=1, kind=kind)
    row = bench.new(500)
    most = 0
    for step in range(2000):
        if step % 100 == 3:
            decode_and_compare(bench, [row])
        else:
            bench.decode([row])
            mx.eval(bench.store.arrays())
        most = max(most, len(row.row.pages))

    assert most <= kind.max_pages(row.row.length)
    assert bench.store.pages.allocators[0].capacity <= kind.max_pages(row.row.length) + 64
    bench.drain()
    bench.check()


def test_windows_step_down_too() -> None:
    bench = Bench(
        LayerGeometry(1, 64, 64), [Scheme(8, 8), Scheme(4, 4)], layers=1, kind=Kind(window=300)
    )
    rows = [bench.new(700), bench.new(200)]
    bench.drain()
    for row in rows:
        row.shown(0, bench.store)
    StepDown(bench.store, [rows[0].row], 1).advance(1.0, lambda: 0.0)
    rows[0].step_down(1)
    for _ in range(100):
        decode_and_compare(bench, rows)
    bench.drain()
    bench.check()


@pytest.mark.parametrize("kind", [FULL, Kind(window=150), Kind(window=200, keep=4)])
def test_trimmed_rows_continue(kind: Kind) -> None:
    bench = Bench(LayerGeometry(1, 64, 64), Scheme(16, 16), layers=1, kind=kind)
    row = bench.new(137)
    for back in (0, 5, 20, 60, 3):
        bench.drain()
        bench.store.trim(row.row, back)
        row.keys[0] = row.keys[0][:, : row.row.length]
        row.values[0] = row.values[0][:, : row.row.length]
        bench.check()
        for _ in range(30):
            decode_and_compare(bench, [row])
    bench.drain()
    bench.check()


def test_dropped_pages_do_not_return() -> None:
    bench = Bench(LayerGeometry(1, 8, 8), Scheme(8, 8), layers=1, kind=Kind(window=70))
    row = bench.new(600)
    assert row.row.skipped
    assert bench.store.can_trim(row.row, 0)
    assert not bench.store.can_trim(row.row, 200)
    with pytest.raises(ValueError, match="cannot be taken back"):
        bench.store.trim(row.row, 200)


@pytest.mark.parametrize("start", [64, 300, 512])
def test_rows_stay_dense_until_the_start(start: int) -> None:
    schemes = [Scheme(16, 16), Scheme(8, 8)]
    bench = Bench(LayerGeometry(1, 64, 64), schemes, layers=1, quantized_start=start)
    short, long = bench.new(100), bench.new(600)
    assert {page.level for page in long.row.pages} == {1}
    while short.row.length < start + 1:
        bench.decode([short, long])
        assert {page.level for page in short.row.pages} <= {int(short.row.length > start)}
    bench.drain()
    assert {page.level for page in short.row.pages} <= {1}
    check_store(bench.store)


@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(1, 400),
    keep=st.integers(0, 100),
    queries=st.lists(st.integers(0, 1000), min_size=1, max_size=5),
)
def test_visible_positions(window: int, keep: int, queries: list[int]) -> None:
    kind = Kind(window=window, keep=min(keep, window - 1))
    keys = mx.arange(1001)
    seen = np.array(kind.visible(mx.array(queries)[:, None], keys))
    for query, row in zip(queries, seen, strict=True):
        assert row.sum() == min(query + 1, window) or query < window
        assert row[query]
        assert row[: min(kind.keep, query + 1)].all()
        assert not row[query + 1 :].any()
