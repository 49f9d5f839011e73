"""Whole layers as operations of the library: equal to the bit, and only where results are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx import nn
from mlx_lm.models import activations

from kvd.worker import decoder_layers
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.packed import page_product
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.native import operations, whole_layers
from kvd.worker.native.layers import PackedPart, pack_weights
from kvd.worker.native.step import Library
from kvd.worker.serving import kernel_choice
from kvd.worker.serving.probe import find_layout
from kvd.worker.serving.runner import Runner
from tests.worker.architectures.zoo import build

pytestmark = pytest.mark.mlx
SETTINGS = CacheSettings((Scheme(8, 8), Scheme(4, 4)))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest, library: ModuleType) -> Iterator[None]:
    before = library.threads()
    library.use_threads(request.param)
    with operations.installed(library):
        yield
    library.use_threads(before)


def packed(
    name: str, library: ModuleType, monkeypatch: pytest.MonkeyPatch, **config: Any
) -> tuple[Any, dict[str, Any]]:
    model, settings = build(name)
    if config:
        model, settings = build(name, config=settings | config)
    pack(model, library, monkeypatch)
    return model, settings


def pack(model: Any, library: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_weights(model, library)
    # The module may have been imported before the library's operations were installed.
    monkeypatch.setattr(sys.modules[type(model).__module__], "swiglu", activations.swiglu)


def decoded(model: Any, library: ModuleType, *, compiled: bool = False) -> list[np.ndarray]:
    """Return the logits of rows that commit pages, join and leave."""
    runner = Runner(model, ModelCache(find_layout(model), SETTINGS))
    runner.cache.use(page_product, Library(library))
    assert not compiled or runner.compile()
    rows, found = [], []
    for length in (3, 62, 127, 200):
        rows.append(runner.cache.new_row())
        for start in range(0, length, 64):
            prompt = [5 + at % 50 for at in range(start, min(start + 64, length))]
            runner.prefill(rows[-1], prompt)
    for step in range(5):
        if step == 3:
            runner.cache.free(rows.pop(1))
        if runner.cache.needs_flush(rows):
            runner.cache.flush()
        logits = runner.decode(rows, mx.array([7 + step + at for at in range(len(rows))]))
        mx.eval(logits, runner.cache.arrays())
        found.append(np.array(logits))
    return found


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("name", "config"),
    [("llama", {"rope_scaling": LLAMA3}), ("qwen2", {}), ("qwen3", {})],
    ids=["llama, scaled positions", "qwen2, biases", "qwen3, norms of heads"],
)
def test_whole_layers_give_the_same_bits(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, config: dict[str, Any]
) -> None:
    model, _ = packed(name, library, monkeypatch, **config)
    expected = decoded(model, library)
    calls, fused = [], whole_layers.fuse(model, library)
    plain = whole_layers.WholeLayer.compute

    def counted(*arguments: Any) -> mx.array | None:
        calls.append(plain(*arguments))
        return calls[-1]

    monkeypatch.setattr(whole_layers.WholeLayer, "compute", counted)
    for compiled in (False, True):
        calls.clear()
        got = decoded(model, library, compiled=compiled)
        assert sum(one is not None for one in calls) >= fused == len(model.layers)
        for one, other in zip(got, expected, strict=True):
            assert np.isfinite(one).all()
            np.testing.assert_array_equal(one, other)
    decoder_layers.unfuse(model)
    assert not any("block" in vars(layer) for layer in model.layers)


def prefilled(model: Any, library: ModuleType) -> list[np.ndarray]:
    """Return what packed passes leave: logits of the next tokens, pages and tails of each layer.

    Each pass has chunks of several rows, chunks of one row that see earlier ones, and padding.
    """
    cache = ModelCache(find_layout(model), SETTINGS)
    runner = Runner(model, cache)
    cache.use(page_product, Library(library))
    runner._min_tokens = 24
    assert runner.pack()
    rows = [cache.new_row() for _ in range(3)]
    for counts in (((3,), (128, 70, 5), (64,)), ((200,), (61,), (1, 64)), ((2,), (), ())):
        pairs = [(row, count) for row, some in zip(rows, counts, strict=True) for count in some]
        chunks = [[5 + (at * count) % 50 for at in range(count)] for _, count in pairs]
        runner.prefill_pass([row for row, _ in pairs], chunks)
    logits = runner.decode(rows, mx.array([7, 8, 9]))
    mx.eval(logits, cache.arrays())
    return [np.array(logits), *map(np.array, cache.arrays())]


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("threads", [2], indirect=True)
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("llama", {"rope_scaling": LLAMA3}),
        ("qwen2", {}),
        ("qwen3", {"hidden_size": 256, "intermediate_size": 520, "head_dim": 24}),
    ],
    ids=["llama, scaled positions", "qwen2, biases", "qwen3, norms and odd sizes"],
)
def test_whole_layers_prefill_to_the_same_bits(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, config: dict[str, Any]
) -> None:
    model, _ = packed(name, library, monkeypatch, **config)
    expected = prefilled(model, library)
    calls, fused = [], whole_layers.fuse(model, library)
    plain = whole_layers.WholeLayer._prefill

    def counted(*arguments: Any) -> mx.array:
        calls.append(plain(*arguments))
        return calls[-1]

    monkeypatch.setattr(whole_layers.WholeLayer, "_prefill", counted)
    got = prefilled(model, library)
    assert len(calls) >= 3 * fused == 3 * len(model.layers)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_divided_layers_give_the_same_bits(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A group of one rank has the layers of a gang; their sums have one term.

    `tests.worker.gang.test_architectures` runs them over several ranks.
    """
    runs = [decoded, partial(decoded, compiled=True), prefilled]
    mx.random.seed(5)  # for the biases, which the zoo does not choose
    model, _ = packed(name, library, monkeypatch)
    undivided = [run(model, library) for run in runs]
    mx.random.seed(5)
    model, _ = build(name)
    model.shard(mx.distributed.init())
    pack(model, library, monkeypatch)
    own = [run(model, library) for run in runs]
    assert whole_layers.fuse(model, library) == len(model.layers)
    assert all(type(layer.block) is whole_layers.DividedLayer for layer in model.layers)
    calls = []
    plain = whole_layers.DividedLayer.compute

    def counted(*arguments: Any) -> mx.array | None:
        calls.append(plain(*arguments))
        return calls[-1]

    monkeypatch.setattr(whole_layers.DividedLayer, "compute", counted)
    for run, *expected in zip(runs, undivided, own, strict=True):
        calls.clear()
        got = run(model, library)
        assert sum(one is not None for one in calls) >= len(model.layers)
        for one, *others in zip(got, *expected, strict=True):
            assert np.isfinite(one).all()
            for other in others:
                np.testing.assert_array_equal(one, other)


def test_a_bias_of_a_divided_product_is_added_to_the_sum(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = nn.Linear(32, 48)
    linear.bias = mx.arange(48) / 7
    x = mx.random.normal((3, 32), key=mx.random.key(1))
    expected = linear(x)
    layer = PackedPart(library, nn.ShardedToAllLinear.from_linear(linear))
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert layer.product_bias is None
    monkeypatch.setattr(mx.distributed, "all_sum", lambda x, group: 3 * x)
    thrice = 3 * (expected - linear.bias) + linear.bias
    np.testing.assert_allclose(layer(x), thrice, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("one", ["o_proj", "down_proj"])
def test_a_layer_with_only_one_divided_sum_runs_its_own_code(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, one: str
) -> None:
    model, _ = packed("qwen3", library, monkeypatch)
    for layer in model.layers:
        part = layer.mlp if one == "down_proj" else layer.self_attn
        linear = nn.Linear(part[one].packed.shape[1], part[one].outputs, bias=False)
        part[one] = PackedPart(library, nn.ShardedToAllLinear.from_linear(linear))
    assert whole_layers.fuse(model, library) == 0
    assert "PackedPart" in whole_layers.obstacle(model, library)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("name", "used"), [("qwen3", True), ("granite", False)])
def test_the_probe_decides(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch, name: str, used: bool
) -> None:
    """Granite scales its residuals in code, so its layers' submodules look like Llama's."""
    model, config = packed(name, library, monkeypatch, num_hidden_layers=1)
    found = kernel_choice.serve_natively(model, SETTINGS, config["vocab_size"], library)

    assert found.path == ("native, whole layers" if used else "native")
    assert all(("block" in vars(layer)) == used for layer in model.layers)
    assert found.error < 1e-4


def test_layers_with_further_arguments_run_their_own_code(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ministral 3 passes each layer a factor of its queries, which is 1 for short prompts."""
    model, config = packed("ministral3", library, monkeypatch, num_hidden_layers=1)
    found = kernel_choice.serve_natively(model, SETTINGS, config["vocab_size"], library)

    assert found.path == "native"
    assert not any("block" in vars(layer) for layer in model.layers)


def test_weights_that_do_not_fit_are_refused(
    library: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = packed("qwen3", library, monkeypatch)
    assert whole_layers.fuse(model, library)
    block = model.layers[0].block
    model.layers[0].block = replace(block, heads=block.heads * 2)
    with pytest.raises(ValueError, match="does not fit"):
        decoded(model, library)
    gate, up, down = block.linears[4:]
    x = mx.zeros((2, 1, down.outputs))
    for linears, norm in (((gate, down, up), block.norms[3]), ((gate, up, down), block.norms[1])):
        with pytest.raises(ValueError, match=r"does not fit|a token's size"):
            library.layer_mlp(x, *whole_layers.weights_of(linears, (norm,)))
