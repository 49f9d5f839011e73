"""Tails of ended rows are freed while other rows run, and the running rows are not affected."""

from __future__ import annotations

import numpy as np
import pytest

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.serving import probe
from kvd.worker.serving.runner import Runner
from tests.worker.architectures.zoo import build
from tests.worker.cache.invariants import check_cache
from tests.worker.cache.test_snapshot import SETTINGS, decode, ids, prefill

pytestmark = pytest.mark.mlx


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
def test_tails_and_states_are_cut_to_the_running_rows(name: str) -> None:
    model, _ = build(name)
    runner = Runner(model, ModelCache(probe.find_layout(model), SETTINGS["plain"]))
    cache = runner.cache
    rows = [cache.new_row() for _ in range(4)]
    for seed, row in enumerate(rows):
        prefill(runner, row, ids(100 + seed, seed))
    decode(runner, rows, ids(3, 5))
    cache.flush()
    snapshot = [cache.snapshots.take(rows[place]) for place in (1, 3)]
    wanted = [decode(runner, [rows[place]], ids(80, 6))[0] for place in (1, 3)]
    for row in rows:
        cache.free(row)
    twins = [cache.new_row() for _ in range(2)] + [cache.restore(one) for one in snapshot]
    for row in twins[:2]:
        prefill(runner, row, ids(40, 7))
    for row in twins[:2]:
        cache.free(row, clean=False)
    for one in snapshot:
        cache.snapshots.drop(one)
    assert cache.tail_slots == 4
    cache.cut_tails()
    check_cache(cache)
    assert cache.tail_slots == 2
    one = sum(store.tails.row_bytes for store in cache.stores) + cache.states.row_bytes
    assert cache.usage.tails_bytes == 2 * one
    for row, want in zip(twins[2:], wanted, strict=True):
        np.testing.assert_array_equal(decode(runner, [row], ids(80, 6))[0], want)
    cache.cut_tails()
    assert cache.tail_slots == 2
    late = cache.new_row()
    prefill(runner, late, ids(30, 8))
    check_cache(cache)
    assert cache.tail_slots == 3
