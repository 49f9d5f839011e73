"""The first chunks of a pass's rows, which are attended together on GPUs.

Compared with dense attention in float32.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.attention import packed as packing
from kvd.worker.cache import padded_sizes
from kvd.worker.cache.attention_kind import FULL, Kind
from tests.worker.attention.test_packed import Group, bench_of
from tests.worker.attention.test_prefill import SLACK, peak_over

pytestmark = pytest.mark.mlx


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Attend first chunks together, as on CUDA; list the shapes of queries of several chunks."""
    shapes = []
    dense = mx.fast.scaled_dot_product_attention

    def attention(queries: mx.array, *others: Any, **more: Any) -> mx.array:
        if len(queries) > 1:
            shapes.append(queries.shape)
        return dense(queries, *others, **more)

    monkeypatch.setattr(packing, "joins_starts", lambda: True)
    monkeypatch.setattr(padded_sizes, "attention_is_planned", lambda: True)
    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", attention)
    return shapes


@pytest.mark.parametrize(
    ("dim", "repeats", "kind"),
    [
        (64, 1, FULL),
        (64, 16, Kind(window=40)),
        (80, 1, Kind(window=150, keep=70)),
        (80, 16, FULL),
        (256, 1, Kind(chunk=96)),
        (256, 16, Kind(window=150, keep=70)),
    ],
    ids=lambda it: it.name if isinstance(it, Kind) else str(it),
)
def test_first_chunks_of_one_width_are_attended_together(
    dim: int, repeats: int, kind: Kind, calls: list[tuple[int, ...]]
) -> None:
    bench = bench_of(dim, kind)
    # One group of wide chunks, two of narrow ones, and some of both widths that make no group.
    counts = (200, 64, 255, 63, 65, 1, 193, 90, 256, 64, 2, 64, 33, 64, 40, 194, 50)
    rows = [bench.new(100 if count == 90 else 0) for count in counts]
    case = Group(bench, rows, counts, repeats)
    case.check()
    heads = 2 * repeats
    assert calls == [(4, heads, 256, dim), *[(4, heads, 64, dim)] * 2]
    case.check(mx.array(np.linspace(-2, 9, heads), mx.float32))
    case.finish()


def test_first_chunks_that_are_attended_together_do_not_see_each_other(
    calls: list[tuple[int, ...]],
) -> None:
    bench = bench_of()
    case = Group(bench, [bench.new() for _ in range(4)], (70, 128, 100, 65))
    before = case.attend()
    keys, values = (mx.array(side) for side in (case.handle.keys, case.handle.values))
    keys[70:198], values[70:198] = mx.nan, mx.nan
    case.handle = replace(case.handle, keys=keys, values=values)
    found, wanted = case.parts(case.attend()), case.parts(before)
    assert calls[-1][0] == 4
    assert mx.isnan(found.pop(1)).all()
    del wanted[1]
    for got, want in zip(found, wanted, strict=True):
        assert mx.isfinite(got).all()
        assert mx.array_equal(got, want)


def test_first_chunks_that_are_attended_together_stay_within_the_scratch(
    calls: list[tuple[int, ...]],
) -> None:
    bench = bench_of()
    case = Group(bench, [bench.new() for _ in range(12)], (256,) * 12)
    one = bench.geometry.dense_bytes(256) * 4 + 4 * 256 * 256 * (1 + 4) + case.queries.nbytes // 12
    bench.store.scratch.limit = scratch = 4 * one
    taken = 2 * (case.queries.nbytes + case.handle.keys.nbytes + case.handle.values.nbytes)

    assert peak_over(case.attend) <= scratch + taken + SLACK
    assert {shape[0] for shape in calls} == {3}
    case.check()
