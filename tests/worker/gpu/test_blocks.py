"""Decode steps of whole decoder layers as blocks: which layers qualify, and equal results.

Tests run without a GPU: MLX's own products replace kvd's, and
`tests.worker.attention.stand_in.StandIn` replaces the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn

from kvd.worker import decoder_layers
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.gpu import blocks, joined_linear, products
from kvd.worker.serving import kernel_choice, kernel_timing
from kvd.worker.serving.kernel_check import describe_verdict
from kvd.worker.serving.kernel_timing import Times
from tests.worker.architectures.zoo import build
from tests.worker.attention.stand_in import StandIn
from tests.worker.core.test_fused import Side
from tests.worker.gpu import plain_products

pytestmark = pytest.mark.mlx
SETTINGS = CacheSettings((Scheme(8, 8), Scheme(4, 4)))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


class Counted:
    """Replaces kvd's products with plain operations, and counts the gated ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gated = 0
        monkeypatch.setattr(products, "multiply", plain_products.multiply)
        monkeypatch.setattr(products, "multiply_gated", self.multiply_gated)

    def plain(self, x: mx.array, weight: mx.array, sizes: Sequence[int]) -> list[mx.array]:
        return plain_products.multiply(x, weight, sizes)

    def multiply_gated(self, x: mx.array, weight: mx.array, norm: products.Norm) -> mx.array:
        self.gated += 1
        return plain_products.multiply_gated(x, weight, norm)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    times = Times(fused_s=1e-3, reference_s=2e-3, keys=64)
    monkeypatch.setattr(kernel_timing, "compare", lambda *_: times)
    return Counted(monkeypatch)


def joined(name: str, counted: Counted, **config: Any) -> tuple[Any, dict[str, Any]]:
    model, settings = build(name)
    if config:
        model, settings = build(name, config=settings | config)
    joined_linear.join(model, counted.plain)
    return model, settings


@pytest.mark.parametrize(
    ("name", "config"),
    [("llama", {"rope_scaling": LLAMA3}), ("qwen2", {}), ("qwen3", {})],
    ids=["llama, scaled positions", "qwen2, biases", "qwen3, norms of heads"],
)
def test_blocks_give_the_same_results(name: str, config: dict[str, Any], counted: Counted) -> None:
    model, _ = joined(name, counted, **config)
    count = len(model.layers)
    plain, kernels = Side(model, None), StandIn()
    fused = Side(model, kernels.backend())

    for side in (plain, fused):
        for length in (3, 64, 200):
            side.join(length)
    assert blocks.fuse(model) == count
    assert blocks.fuse(model) == 0
    for token in range(3):
        expected, got = plain.step(token), fused.step(token)
        assert abs(got - expected).max() <= 1e-4 * abs(expected).max()

    assert (kernels.rotated, counted.gated) == (3 * count, 3 * count)
    decoder_layers.unfuse(model)
    fused.step(4)
    assert counted.gated == 3 * count
    assert type(model.layers[0]).__mro__[1] is nn.Module


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_divided_layers_are_blocks(
    name: str, counted: Counted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group of one rank has the layers of a gang.

    `tests.worker.gang.test_kernels` runs them over two ranks.
    """
    sums = []

    def add(x: mx.array, *, group: Any) -> mx.array:
        sums.append(group)
        return x

    monkeypatch.setattr(mx.distributed, "all_sum", add)
    model, _ = build(name)
    model.shard(mx.distributed.init())
    joined_linear.join(model, counted.plain)
    count = len(model.layers)
    plain, kernels = Side(model, None), StandIn()
    fused = Side(model, kernels.backend())
    for side in (plain, fused):
        for length in (3, 64, 200):
            side.join(length)
    expected = [plain.step(token) for token in range(3)]
    assert blocks.fuse(model) == count
    sums.clear()
    for token, want in enumerate(expected):
        assert abs(fused.step(token) - want).max() <= 1e-4 * abs(want).max()
    assert (kernels.rotated, counted.gated, len(sums)) == (3 * count, 3 * count, 6 * count)


def test_compiled_steps_use_blocks(counted: Counted) -> None:
    model, config = joined("qwen3", counted, num_hidden_layers=1)
    kernels = StandIn()
    found = kernel_choice.serve(
        model, SETTINGS, config["vocab_size"], kernels.backend(), products=True
    )
    assert found.fused is not None
    assert found.fused.used
    assert found.fused.layers == len(model.layers)
    assert "whole layers run as kernels" in describe_verdict(found.fused)
    assert found.error < 1e-4

    before = counted.gated
    assert found.runner.compile()
    assert counted.gated > before


def test_layers_with_different_arithmetic_run_their_own_code(
    counted: Counted,
) -> None:
    """Granite scales its residuals in code, so its layers' submodules look like Llama's."""
    model, config = joined("granite", counted, num_hidden_layers=1)
    assert blocks.fuse(model) == len(model.layers)
    decoder_layers.unfuse(model)

    found = kernel_choice.serve(
        model, SETTINGS, config["vocab_size"], StandIn().backend(), products=True
    )

    assert found.fused is not None
    assert found.fused.used
    assert found.fused.layers == 0
    before = counted.gated
    assert not any("block" in vars(layer) for layer in model.layers)
    found.runner.compile()
    assert counted.gated == before


@pytest.mark.parametrize("name", ["gemma2", "cohere", "phi3", "olmo2", "stablelm"])
def test_layers_with_different_submodules_are_not_blocks(name: str, counted: Counted) -> None:
    model, _ = joined(name, counted)
    assert blocks.fuse(model) == 0


def test_a_dense_layer_among_expert_layers_is_a_block(counted: Counted) -> None:
    model, _ = joined("qwen3_moe", counted)
    assert blocks.fuse(model) == 1 < len(model.layers)


def test_layers_without_joined_weights_are_not_blocks() -> None:
    assert blocks.fuse(build("qwen3")[0]) == 0
