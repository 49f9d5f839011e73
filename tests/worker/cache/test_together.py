"""Tails and pools of all layers change size with few evaluations, and never only in part."""

from __future__ import annotations

import mlx.core as mx
import pytest

from kvd.worker.cache import together
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.serving import probe
from tests.worker.architectures.zoo import build
from tests.worker.cache.invariants import check_cache
from tests.worker.cache.test_snapshot import SETTINGS

pytestmark = pytest.mark.mlx


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch) -> ModelCache:
    """A small model's cache whose arrays are evaluated together as on an accelerator."""
    monkeypatch.setattr(together, "CPU_BYTES", together.GPU_BYTES)
    model, _ = build("qwen3")
    return ModelCache(probe.find_layout(model), SETTINGS["plain"])


@pytest.fixture
def evaluations(cache: ModelCache, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the number of arrays of each evaluation from now on."""
    found: list[int] = []
    put = together._put

    def counted(replacements: list[together.Replacement]) -> None:
        found.append(sum(len(replacement.arrays) for replacement in replacements))
        put(replacements)

    monkeypatch.setattr(together, "_put", counted)
    return found


def test_a_burst_of_rows_evaluates_once_per_row(cache: ModelCache, evaluations: list[int]) -> None:
    rows = [cache.new_row() for _ in range(8)]
    layers = len(cache.stores[0].layers)

    assert evaluations == [2 * layers] * 8
    assert len(rows) == cache.tail_slots == 8
    check_cache(cache)


def test_pools_of_all_layers_change_size_in_one_evaluation(
    cache: ModelCache, evaluations: list[int]
) -> None:
    store = cache.stores[0]
    arrays = sum(layer.pools[0].array_count for layer in store.layers)
    pages = store.pages.take(0, 3)
    assert evaluations == [arrays]

    store.pages.release(pages)
    store.pages.cut_to_used()
    assert evaluations == [arrays] * 2
    assert store.pages.nbytes == 0


def test_arrays_beyond_the_limit_are_evaluated_in_parts() -> None:
    put: list[int] = []
    bytes_each = together.limit_bytes() // 2 + 1
    items = [
        together.Replacement(
            [mx.zeros((bytes_each,), mx.uint8)], lambda at=at: put.append(at), bytes_each
        )
        for at in range(5)
    ]
    seen = []

    def given():
        for item in items:
            yield item
            seen.append(list(put))

    together.replace_all(given())
    assert seen == [[], [0, 1], [0, 1], [0, 1, 2, 3], [0, 1, 2, 3]]
    assert put == [0, 1, 2, 3, 4]


def test_an_evaluation_that_fails_puts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(together.mx, "eval", fail)
    put: list[int] = []
    with pytest.raises(MemoryError):
        together.replace_all([together.Replacement([mx.zeros(3)], lambda: put.append(1), 12)])
    assert not put
