"""Forecasts from `Costs` equal the worker's own accounting, for caches of every kind."""

from __future__ import annotations

import pytest

pytest.importorskip("mlx.core")

import mlx.core as mx

from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.layout import Access, AttentionPart, Entry, Layout
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import LayerGeometry, Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving.describe import costs_of
from protocol.costs import Costs

pytestmark = pytest.mark.mlx

SCHEMES = (Scheme(8, 8), Scheme(8, 4), Scheme(4, 4))
LENGTHS = (1, 127, 128, 500, 1024, 5000, 70_000)


def cache_of(*kinds: Kind, access: Access = Access.PAGES, **settings) -> ModelCache:
    parts = [AttentionPart(kind, LayerGeometry(2, 64, 64)) for kind in kinds]
    layout = Layout(tuple(Entry((part,)) for part in parts), mx.float32)
    settings = CacheSettings(
        schemes=SCHEMES, floors=lambda n: [Scheme(8, 8)] + [None] * (n - 1), **settings
    )
    return ModelCache(layout, settings, access=dict.fromkeys(kinds, access))


def worker_costs(cache: ModelCache) -> Costs | None:
    row = cache.row_bytes + cache.costs.checkpoint_bytes
    return costs_of(cache, weights=10, base=1000, row=row, first=70, step=256)


@pytest.mark.parametrize(
    "cache",
    [
        cache_of(FULL, FULL),
        cache_of(FULL, Kind(window=1024), Kind(window=512, keep=4)),
        cache_of(FULL, Kind(chunk=4096)),
        cache_of(FULL, FULL, quantized_start=1000),
        cache_of(FULL, FULL, max_size=2048, keep=4),
    ],
    ids=["full", "windows", "chunks", "dense start", "bounded rows"],
)
def test_costs_are_the_workers_own(cache):
    costs = worker_costs(cache)
    assert costs is not None
    for level in range(3):
        for length in LENGTHS:
            assert costs.pages_bytes(length, level) == cache.costs.pages_bytes(length, 256, level)


def test_a_grant_covers_the_rows_and_at_least_an_idle_worker():
    costs = worker_costs(cache_of(FULL, FULL))
    assert costs is not None
    unit, row = costs.unit_bytes, costs.row_units(5000, 0)

    assert costs.total_bytes(0, 5000) == 1000 + 70 * unit
    assert costs.total_bytes(9, 5000) == 1000 + 9 * row * unit
    assert costs.total_bytes(9, 5000, held_units=100) == 1000 + (9 * row + 100) * unit
    for budget in (costs.total_bytes(9, 5000), costs.total_bytes(10, 5000) - 1):
        assert costs.max_rows(budget, 5000) == 9
    assert costs.max_rows(0, 5000) == 0
    assert costs.token_bytes(0) > costs.token_bytes(1) > costs.token_bytes(2)


def test_rectangles_have_no_formula():
    assert worker_costs(cache_of(FULL, access=Access.RECTANGLES)) is None
