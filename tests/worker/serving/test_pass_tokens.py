"""A pass of several GPUs has more prompt tokens, unless that costs rows memory or time."""

from __future__ import annotations

import pytest

from kvd.worker.cache import padded_sizes
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving.probe import find_layout
from kvd.worker.serving.runner import Runner
from protocol.memory_bounds import CUDA_PASS_TOKENS, WIDE_PASS_TOKENS
from tests.worker.architectures.zoo import build


def runner_of(name: str, ranks: int, **settings: int) -> Runner:
    model = build(name)[0]
    schemes = (Scheme(16, 16), Scheme(8, 8)) if settings else (Scheme(8, 8),)
    cache = ModelCache(find_layout(model), CacheSettings(schemes, **settings))
    runner = Runner(model, cache)
    runner.packs, runner.ranks = True, ranks
    return runner


@pytest.mark.parametrize(
    ("name", "ranks", "settings", "alone", "tokens"),
    [
        ("qwen3", 1, {}, True, CUDA_PASS_TOKENS),
        ("qwen3", 2, {}, True, WIDE_PASS_TOKENS),
        ("qwen3", 8, {}, True, WIDE_PASS_TOKENS),
        ("qwen3", 2, {}, False, CUDA_PASS_TOKENS),
        # Each row would reserve its window, or a dense start, for the longer pass.
        ("gemma3_text", 2, {}, True, CUDA_PASS_TOKENS),
        ("qwen3", 2, {"quantized_start": 512}, True, CUDA_PASS_TOKENS),
        ("qwen3", 2, {"max_size": 512}, True, CUDA_PASS_TOKENS),
    ],
)
def test_passes_of_several_gpus_are_longer_while_no_rows_decode(
    name: str,
    ranks: int,
    settings: dict[str, int],
    alone: bool,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(padded_sizes, "attention_is_planned", lambda: True)
    assert runner_of(name, ranks, **settings).pass_tokens(1024, alone=alone) == tokens
