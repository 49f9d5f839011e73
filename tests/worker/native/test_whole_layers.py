"""Whole layers as operations of the library: equal to the bit, and only where results are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import activations

from kvd.worker import decoder_layers
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.packed import page_product
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.native import operations, whole_layers
from kvd.worker.native.layers import pack_weights
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
    pack_weights(model, library)
    # The module may have been imported before the library's operations were installed.
    monkeypatch.setattr(sys.modules[type(model).__module__], "swiglu", activations.swiglu)
    return model, settings


def decoded(model: Any, library: ModuleType, *, compiled: bool) -> list[np.ndarray]:
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
    expected = decoded(model, library, compiled=False)
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
        decoded(model, library, compiled=False)
