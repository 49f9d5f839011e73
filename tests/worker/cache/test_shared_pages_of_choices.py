"""Several choices of one prompt: together they hold no more than is reserved for them."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.serving import probe
from kvd.worker.serving.runner import Row, Runner
from tests.worker.architectures.zoo import build
from tests.worker.cache.test_snapshot import CHUNK, SETTINGS, ids, prefill

pytestmark = pytest.mark.mlx
CHOICES, STEPS = 3, 150


def held(cache: ModelCache) -> int:
    """Return the charge of the pages in use."""
    return sum(
        allocator.used * store.pages.charge(allocator.level)
        for store in cache.stores
        for allocator in store.pages.allocators
    )


def branches(runner: Runner, start: int) -> list[Row]:
    """Return a row per choice, all of which continue one prompt of ``start`` tokens."""
    cache = runner.cache
    row = cache.new_row()
    prefill(runner, row, ids(start))
    cache.flush()
    snapshot = cache.snapshots.take(row)
    rows = [row, *(cache.restore(snapshot) for _ in range(CHOICES - 1))]
    cache.snapshots.drop(snapshot)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("start", [60, 330])
@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("qwen3", "plain"),
        ("qwen3", "dense at first"),
        ("qwen3", "bounded"),
        ("gpt_oss", "plain"),
        ("baichuan_m1", "plain"),
    ],
)
def test_the_pages_that_choices_share_are_reserved_once(
    model: str, settings: str, start: int
) -> None:
    made, _ = build(model)
    cache = ModelCache(probe.find_layout(made), SETTINGS[settings])
    runner = Runner(made, cache)
    end = start + STEPS
    whole, own = cache.costs.pages_bytes(end, CHUNK), cache.costs.continued_bytes(start, end, CHUNK)
    assert 0 <= own <= whole
    rows = branches(runner, start)
    most = held(cache)
    for step in range(STEPS):
        if cache.needs_flush(rows):
            cache.flush()
        tokens = mx.array([1 + (step + number) % 50 for number in range(CHOICES)], mx.int32)
        mx.eval(runner.decode(rows, tokens), cache.arrays())
        most = max(most, held(cache))
    cache.flush()
    most = max(most, held(cache))

    assert most <= whole + (CHOICES - 1) * own
    if (model, settings) == ("qwen3", "plain"):
        assert most == whole + (CHOICES - 1) * own
        assert (own < whole) == (start > 128)
