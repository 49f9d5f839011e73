"""Memory of a prefill pass besides its pages: no more than is charged, and the terms are needed."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.packed import page_product
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving import loading
from kvd.worker.serving.probe import find_layout
from kvd.worker.serving.runner import Row, Runner
from protocol import memory_bounds
from tests.worker.architectures.zoo import ZOO, build

pytestmark = pytest.mark.mlx

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 64,
}
TOKENS = 512


def runner_of() -> Runner:
    model = build("qwen3", config=ZOO["qwen3"].config | SHAPE)[0]
    cache = ModelCache(find_layout(model), CacheSettings((Scheme(8, 8),), scratch=1 << 20))
    cache.use(page_product, None)
    runner = Runner(model, cache)
    runner.packs = True  # whether a check to the bit passes depends on the random weights
    return runner


def peak_of(runner: Runner, rows: list[Row], counts: int) -> int:
    """Return the bytes that a pass takes at its peak, above those before it."""
    gc.collect()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    runner.prefill_pass(rows, [[1 + at % 60 for at in range(counts)] for _ in rows])
    return mx.get_peak_memory() - before


def test_tails_that_wait_for_the_flush_are_charged() -> None:
    """Short prompts fill no page. Their tails exist twice until the flush has written them."""
    runner = runner_of()
    rows = [runner.cache.new_row() for _ in range(TOKENS // 64)]
    peak = peak_of(runner, rows, 64)
    activations = memory_bounds.CHUNK_COPIES * TOKENS * 512 * 4
    waiting = loading.waiting_bytes(runner, TOKENS)

    assert peak <= activations + waiting + runner.cache.settings.scratch
    assert peak > activations + runner.cache.settings.scratch  # the rest of the charge
