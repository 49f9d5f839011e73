"""Attention of several rows' chunks in one pass.

Compared with dense attention in float32, and with the result of each row alone.
"""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention import group
from kvd.worker.attention.group import group_attention
from kvd.worker.attention.prefill import prefill_attention
from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.batch import GroupHandle, PrefillHandle
from kvd.worker.cache.layer import Chunk
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from tests.worker.attention.dense import dense_attention
from tests.worker.attention.test_prefill import SLACK, peak_over
from tests.worker.cache.helpers import Bench, DenseRow

pytestmark = pytest.mark.mlx

BEFORE = (0, 1, 63, 64, 65, 200)
COUNTS = (200, 65, 64, 63, 2, 1)


class Group:
    """One layer's pass over chunks of several rows, with padding that must not affect results."""

    def __init__(
        self, bench: Bench, rows: list[DenseRow], counts: tuple[int, ...], repeats: int = 2
    ) -> None:
        self.bench, self.rows, self.counts = bench, rows, counts
        self.width = max(counts) + 3 * (len(set(counts)) > 1)
        store, g = bench.store, bench.geometry
        self.before = [row.shown(0, store) for row in rows]
        store.begin_group([row.row for row in rows], list(counts), self.width)
        own = [bench._add(row, 0, count) for row, count in zip(rows, counts, strict=True)]
        self.own = own
        keys, values = (
            mx.concatenate([self._padded(one[side], 7.0) for one in own]) for side in (0, 1)
        )
        handle, same = bench.caches[0].update_and_fetch(keys, values)
        assert handle is same
        assert isinstance(handle, GroupHandle)
        self.handle = handle
        shape = (len(rows), g.kv_heads * repeats, self.width, g.k_dim)
        self.queries = mx.array(bench.rng.normal(size=shape).astype(np.float32))
        self.scale = g.k_dim**-0.5
        mx.eval(keys, values, self.queries)

    def _padded(self, chunk: mx.array, value: float) -> mx.array:
        missing = self.width - chunk.shape[2]
        padding = [(0, 0), (0, 0), (0, missing), (0, 0)]
        return mx.pad(chunk, padding, constant_values=mx.array(value))

    def attend(self, sinks: mx.array | None = None) -> mx.array:
        return group_attention(self.queries, self.handle, self.scale, sinks)

    def check(self, sinks: mx.array | None = None) -> None:
        output = self.attend(sinks)
        assert output.shape == (*self.queries.shape[:3], self.bench.geometry.v_dim)
        assert np.isfinite(np.array(output)).all()
        for row, count in enumerate(self.counts):
            keys, values = (
                mx.concatenate([mx.array(old), new[0]], axis=1)
                for old, new in zip(self.before[row], self.own[row], strict=True)
            )
            want = dense_attention(
                self.queries[row, :, :count], keys, values, self.scale, sinks, self.bench.store.kind
            )
            got = output[row, :, :count]
            bound = 1e-5 * max(1.0, mx.abs(want).max().item())
            assert mx.abs(got - want).max().item() <= bound

    def finish(self) -> None:
        self.bench.store.finish_prefill()
        self.bench.check()


def bench_of(dim: int = 64, kind: Kind = FULL, scheme: Scheme | None = None) -> Bench:
    return Bench(LayerGeometry(2, dim, dim), scheme or Scheme(8, 8), layers=1, kind=kind)


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("repeats", [1, 4])
def test_unequal_rows_with_unequal_pasts(dim: int, repeats: int) -> None:
    bench = bench_of(dim)
    rows = [bench.new(length) for length in BEFORE]
    for counts in (COUNTS, COUNTS[::-1]):  # in the second pass, every row has earlier tokens
        case = Group(bench, rows, counts, repeats)
        case.check()
        case.check(mx.array(np.linspace(-2, 9, 2 * repeats), mx.float32))
        case.finish()


@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("counts", [(1,), (64, 64, 64), (65, 63, 64, 1), (2, 200)])
def test_fresh_rows_at_once_and_row_by_row(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], *, on_cpu: bool
) -> None:
    monkeypatch.setattr(group, "_on_cpu", lambda: on_cpu)
    bench = bench_of(scheme=Scheme(4, 4))
    case = Group(bench, [bench.new() for _ in counts], counts)

    at_once = group._in_one_call(case.queries, case.handle, None)
    several = len(counts) > 1 and bench.store.backend is None
    assert at_once == ((case.handle.step.even or not on_cpu) and several)
    case.check()
    case.check(mx.zeros((4,)))
    case.finish()


@pytest.mark.parametrize(
    "kind",
    [Kind(window=1), Kind(window=40), Kind(window=150, keep=70), Kind(chunk=96), Kind(window=512)],
    ids=lambda kind: kind.name,
)
@pytest.mark.parametrize("on_cpu", [True, False])
def test_windows_and_chunks(monkeypatch: pytest.MonkeyPatch, kind: Kind, *, on_cpu: bool) -> None:
    monkeypatch.setattr(group, "_on_cpu", lambda: on_cpu)
    bench = bench_of(kind=kind)
    rows = [bench.new() for _ in range(4)]
    for counts in ((130, 64, 97, 1), (5, 200, 3, 128), (64, 1, 1, 64)):
        case = Group(bench, rows, counts)
        case.check()
        case.finish()


@pytest.mark.parametrize("counts", [(64, 64, 64), (64, 1, 65), (200, 130, 63)])
@pytest.mark.parametrize("length", [0, 200])
def test_on_the_cpu_a_row_has_the_same_bits_alone_and_in_a_group(
    counts: tuple[int, ...], length: int
) -> None:
    bench = bench_of()
    case = Group(bench, [bench.new(length) for _ in counts], counts)
    together = case.attend()
    for row, (count, part) in enumerate(zip(counts, case.handle.parts, strict=True)):
        row_queries = mx.contiguous(case.queries[row : row + 1, :, :count])
        chunk = Chunk(mx.contiguous(part.chunk.keys), mx.contiguous(part.chunk.values))
        alone = PrefillHandle(bench.store, part.layer, part.step, chunk)
        expected = prefill_attention(row_queries, alone, case.scale)
        assert mx.isfinite(expected).all()
        assert mx.array_equal(together[row, :, :count], expected[0])


def test_nan_padding_affects_no_row_and_is_not_stored() -> None:
    """These rows attend one by one, and the padding is cut off before any product."""
    bench = bench_of()
    case = Group(bench, [bench.new(100), bench.new()], (70, 3))
    poisoned = mx.where(mx.arange(case.width) < 3, 0.0, mx.nan)[None, :, None]
    case.queries[1] = case.queries[1] + poisoned

    assert mx.isfinite(case.attend()).all()
    case.check()
    case.finish()


def test_rows_of_a_group_stay_within_the_scratch_together() -> None:
    """A row's pages are copied to dense arrays after the previous row's copies are freed."""
    bench = bench_of()
    rows = [bench.new(2000) for _ in range(6)]
    case = Group(bench, rows, (8,) * 6)
    one = bench.geometry.dense_bytes(2000) * 5  # dense copies and scores of one row
    bench.store.scratch.limit = scratch = 2 * one
    outputs = 2 * case.queries.nbytes

    assert peak_over(case.attend) <= scratch + outputs + SLACK
    case.check()


@pytest.mark.parametrize("counts", [(0, 5), (5, 9)])
def test_chunks_that_do_not_fit_the_rectangle_are_refused(counts: tuple[int, ...]) -> None:
    bench = bench_of()
    rows = [bench.new().row for _ in counts]
    with pytest.raises(ValueError, match="do not fit a rectangle 8 wide"):
        bench.store.begin_group(rows, list(counts), 8)
