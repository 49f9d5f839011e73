"""Prefill attention in parts equals dense attention in float32 and stays within the scratch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention import prefill
from kvd.worker.attention.prefill import prefill_attention
from kvd.worker.attention.tiles import Plan, Work, plan
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.batch import PrefillHandle, make_caches
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.store import KVStore
from tests.worker.attention.dense import dense_attention

pytestmark = pytest.mark.mlx

KIB, MIB = 1 << 10, 1 << 20
SLACK = 128 * KIB
"""Bytes beyond the scratch for small arrays, such as positions, and the allocator's rounding."""


@dataclass
class Chunk:
    """A chunk during prefill: its handle in one layer, and a dense copy of the row."""

    store: KVStore
    handle: PrefillHandle
    queries: mx.array
    keys: mx.array
    values: mx.array
    scale: float

    def attend(self, scratch: int, sinks: mx.array | None = None) -> mx.array:
        self.store.scratch.limit = scratch
        self.store.scratch.add(scratch)  # reaches the limit, which resets the count
        return prefill_attention(self.queries, self.handle, self.scale, sinks)

    def truth(self, sinks: mx.array | None = None) -> mx.array:
        return dense_attention(
            self.queries[0], self.keys, self.values, self.scale, sinks, self.store.kind
        )

    def check(self, scratch: int, sinks: mx.array | None = None, *, bound: float = 1e-5) -> None:
        output = self.attend(scratch, sinks)
        assert output.dtype == self.queries.dtype
        got, want = (np.array(side.astype(mx.float32)) for side in (output[0], self.truth(sinks)))
        assert np.isfinite(got).all()
        assert np.abs(got - want).max() <= bound * max(1.0, np.abs(want).max())


def chunk_of(
    geometry: LayerGeometry,
    length: int,
    count: int,
    repeats: int = 2,
    scheme: Scheme | list[Scheme] | None = None,
    dtype: mx.Dtype = mx.float32,
    kind: Kind = FULL,
) -> Chunk:
    """Begin to prefill ``count`` tokens of a row that already has ``length`` tokens.

    The row's pages are spread over all levels in turn.
    """
    store = KVStore([geometry], scheme or Scheme(8, 8), dtype, kind=kind)
    (cache,) = make_caches(store)
    mx.random.seed(length + count)

    def tokens(heads: int, n: int, dim: int) -> mx.array:
        return mx.random.normal((1, heads, n, dim)).astype(dtype)

    def extend(n: int) -> PrefillHandle:
        store.begin_prefill(row, n)
        sides = (tokens(geometry.kv_heads, n, dim) for dim in (geometry.k_dim, geometry.v_dim))
        handle, _ = cache.update_and_fetch(*sides)
        assert isinstance(handle, PrefillHandle)
        return handle

    row = store.new_row()
    for start in range(0, length, 512):
        extend(min(512, length - start))
        store.finish_prefill()
    levels = len(store.schemes)
    for level in range(1, levels):
        pages = [page for index, page in enumerate(row.pages) if index % levels == level]
        store.pages.convert(0, level, pages)
    held, (keys, values) = store.positions(row), store.read(row, 0)
    handle = extend(count)
    before = handle.step.tail_length
    dense = []
    for old, new in ((keys, handle.chunk.keys), (values, handle.chunk.values)):
        side = mx.zeros((geometry.kv_heads, length + count, old.shape[-1]), dtype)
        if held:
            side[:, mx.array(held)] = old
        side[:, length:] = new[:, before:]
        dense.append(side)
    queries = tokens(geometry.kv_heads * repeats, count, geometry.k_dim)
    mx.eval(queries, dense, store.arrays())
    return Chunk(store, handle, queries, *dense, geometry.k_dim**-0.5)


def peak_over(run: Callable[[], mx.array]) -> int:
    """Return the peak memory of a run in bytes, less the memory used before and the result's."""
    mx.synchronize()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    output = run()
    mx.eval(output)
    mx.synchronize()
    return mx.get_peak_memory() - before - output.nbytes


TILED, SPLIT = 800 * KIB, 250 * KIB
"""Scratch sizes in bytes. With the first, a tile takes all queries and some keys. With the second,
it takes only some of the queries too."""


@pytest.mark.parametrize(
    ("k_dim", "v_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
)
@pytest.mark.parametrize(("repeats", "scratch"), [(1, SPLIT), (4, TILED), (16, SPLIT)])
def test_head_sizes_and_shared_heads(k_dim: int, v_dim: int, repeats: int, scratch: int) -> None:
    chunk_of(LayerGeometry(2, k_dim, v_dim), 700, 40, repeats).check(scratch)


@pytest.mark.parametrize("length", [0, 1, 63, 64, 127, 128, 191, 192, 1000])
@pytest.mark.parametrize("count", [1, 64, 130])
@pytest.mark.parametrize("scratch", [1, TILED, 64 * MIB])
def test_lengths_and_tails(length: int, count: int, scratch: int) -> None:
    chunk_of(LayerGeometry(2, 64, 64), length, count).check(scratch)


@pytest.mark.parametrize("scheme", [Scheme(16, 16), Scheme(3, 5), Scheme(4, 8, k_group=32)])
@pytest.mark.parametrize("scratch", [SPLIT, TILED])
def test_schemes(scheme: Scheme, scratch: int) -> None:
    chunk_of(LayerGeometry(2, 64, 64), 900, 70, scheme=scheme).check(scratch)


@pytest.mark.parametrize("scratch", [SPLIT, TILED, 64 * MIB])
def test_pages_on_several_levels(scratch: int) -> None:
    schemes = [Scheme(16, 16), Scheme(8, 8), Scheme(4, 4)]
    case = chunk_of(LayerGeometry(2, 64, 64), 1100, 70, scheme=schemes)

    assert len(case.handle.step.tables) == 3
    case.check(scratch)


@pytest.mark.parametrize(
    "kind",
    [
        Kind(window=1),
        Kind(window=100),
        Kind(window=640),
        Kind(window=640, keep=4),
        Kind(window=640, keep=100),
        Kind(chunk=96),
        Kind(chunk=512),
    ],
    ids=lambda kind: kind.name,
)
@pytest.mark.parametrize(("length", "count"), [(0, 200), (511, 70), (1300, 100)])
@pytest.mark.parametrize("scratch", [SPLIT, TILED, 64 * MIB])
def test_windows_and_chunks(kind: Kind, length: int, count: int, scratch: int) -> None:
    case = chunk_of(LayerGeometry(1, 64, 64), length, count, kind=kind)
    case.check(scratch, mx.random.normal((2,)))


@pytest.mark.parametrize("scratch", [SPLIT, TILED, 64 * MIB])
@pytest.mark.parametrize("length", [0, 400])
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_sinks_are_counted_once_over_all_parts(length: int, scratch: int, size: float) -> None:
    case = chunk_of(LayerGeometry(2, 64, 64), length, 70, repeats=4)

    case.check(scratch, size * mx.random.normal((8,)))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
@pytest.mark.parametrize("scratch", [SPLIT, TILED])
def test_half_precision_results_are_rounded_only_at_the_end(dtype: mx.Dtype, scratch: int) -> None:
    case = chunk_of(LayerGeometry(2, 64, 64, itemsize=2), 700, 40, dtype=dtype)
    case.check(scratch, bound=4e-3)  # half the distance between bfloat16 numbers near 1
    case.check(scratch, mx.zeros((4,), dtype), bound=4e-3)


def test_a_chunk_that_fits_has_the_bits_of_one_call_of_the_dense_kernel() -> None:
    case = chunk_of(LayerGeometry(2, 64, 64), 700, 100)
    want = mx.fast.scaled_dot_product_attention(
        case.queries, case.keys[None], case.values[None], scale=case.scale, mask="causal"
    )

    assert mx.array_equal(case.attend(256 * MIB), want)


@pytest.mark.parametrize("kind", [FULL, Kind(window=300)], ids=lambda kind: kind.name)
@pytest.mark.parametrize("heads", [1, 2])
def test_calls_for_some_heads_give_the_bits_of_one_call_for_all(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, heads: int
) -> None:
    """Results do not depend on how many heads a call of the dense kernel computes.

    Plans cut by heads only if that kernel is fused. On the CPU it is not fused, so the test
    replaces the plan.
    """
    case = chunk_of(LayerGeometry(3, 64, 64), 700, 100, kind=kind)
    sinks = mx.random.normal((6,))
    want = case.attend(256 * MIB, sinks)

    def some_heads(work: Work, _: int) -> Plan:
        return Plan(heads, work.queries, None, work.dense_bytes(heads))

    monkeypatch.setattr(prefill, "plan", some_heads)
    monkeypatch.setattr(prefill._Task, "is_fused_available", lambda _: False)
    assert mx.array_equal(case.attend(MIB, sinks), want)


def test_mlx_is_asked_whether_its_kernel_is_fused() -> None:
    task = prefill._Task.of(*_arguments(chunk_of(LayerGeometry(2, 64, 64), 100, 30)))

    assert task.is_fused_available() == (mx.default_device().type != mx.DeviceType.cpu)


def _arguments(case: Chunk) -> tuple[mx.array, PrefillHandle, float, None]:
    return case.queries, case.handle, case.scale, None


def test_pages_that_no_query_sees_are_not_read() -> None:
    """This row holds unseen pages, because its window is set after its prefill."""
    case = chunk_of(LayerGeometry(1, 64, 64), 1000, 10)
    case.store.kind = Kind(window=200, keep=70)
    task = prefill._Task.of(*_arguments(case))

    assert [pages.starts for pages in task.pages] == [(0, 64, *range(832, 896, 64))]
    case.check(64 * MIB)
    case.check(SPLIT)


@pytest.mark.parametrize(
    ("geometry", "scheme", "repeats", "length", "count", "scratch"),
    [
        (LayerGeometry(2, 64, 64), Scheme(8, 8), 4, 64 * 66, 64, 2 * MIB),
        (LayerGeometry(2, 64, 64), Scheme(5, 6), 4, 64 * 34, 64, 4 * MIB),
        (LayerGeometry(1, 128, 128), Scheme(8, 4), 16, 64 * 66 + 27, 64, 4 * MIB),
        (LayerGeometry(1, 64, 64), Scheme(8, 8), 2, 32 * KIB, 128, 8 * MIB),
        (LayerGeometry(2, 192, 128), Scheme(16, 16), 1, 2000, 300, 2 * MIB),
    ],
    ids=str,
)
def test_peak_memory_stays_within_the_scratch(
    geometry: LayerGeometry, scheme: Scheme, repeats: int, length: int, count: int, scratch: int
) -> None:
    case = chunk_of(geometry, length, count, repeats, scheme)
    scores = repeats * geometry.kv_heads * count * length * 4

    assert scores > scratch
    assert peak_over(lambda: case.attend(scratch)) <= scratch + SLACK
    assert peak_over(lambda: case.attend(scratch, mx.zeros((case.queries.shape[1],)))) <= (
        scratch + SLACK
    )
    case.check(scratch)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("kind", [FULL, Kind(window=1500)], ids=lambda kind: kind.name)
@pytest.mark.parametrize("bits", [3, 4, 8, 16])
def test_one_call_stays_within_its_bound(dtype: mx.Dtype, kind: Kind, bits: int) -> None:
    geometry = LayerGeometry(2, 64, 64, itemsize=dtype.size)
    case = chunk_of(geometry, 2000, 64, scheme=Scheme(bits, bits), dtype=dtype, kind=kind)
    for sinks in (None, mx.zeros((4,), dtype)):
        task = prefill._Task.of(case.queries, case.handle, case.scale, sinks)
        bound = task.work.dense_bytes(2)
        assert task.fits_one_call(plan(task.work, bound))
        assert not task.fits_one_call(plan(task.work, bound - 1))
        assert peak_over(lambda sinks=sinks, bound=bound: case.attend(bound, sinks)) <= (
            bound + SLACK
        )


def test_earlier_layers_are_evaluated_if_the_next_does_not_fit() -> None:
    case = chunk_of(LayerGeometry(2, 64, 64), 3000, 64)
    one = prefill._Task.of(*_arguments(case)).work.dense_bytes(2)
    scratch = one * 3 // 2

    def layers() -> mx.array:
        case.store.scratch.limit = scratch
        case.store.scratch.add(scratch)
        output = case.queries
        for _ in range(6):  # each layer's queries are the output of the layer before
            output = prefill_attention(output, case.handle, case.scale)
        return output

    assert peak_over(layers) <= scratch + 6 * case.queries.nbytes + SLACK
