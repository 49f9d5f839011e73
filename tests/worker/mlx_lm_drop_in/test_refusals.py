"""`quantize_kv` refuses a model whose logits change, or that raises, with kvd's caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import BatchKVCache, make_prompt_cache

from kvd.worker.mlx_lm_drop_in.caches import DropInKVCache
from kvd.worker.mlx_lm_drop_in.quantize_kv import quantize_kv
from protocol.errors import UnsupportedModel
from tests.worker.architectures.zoo import build

pytestmark = pytest.mark.mlx


class Particular:
    """A model with the logits ``transform(cache, logits)``; ``cache``: that of the first layer."""

    def __init__(self, transform: Callable[[Any, mx.array], mx.array]) -> None:
        self._model, _ = build("qwen3")
        self.layers = self._model.layers
        self.transform = transform

    def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
        return self.transform(cache[0], self._model(tokens, cache=cache))


def raising(error: Exception) -> Callable[[Any, mx.array], mx.array]:
    def transform(cache: Any, logits: mx.array) -> mx.array:
        if isinstance(cache, DropInKVCache):
            raise error
        return logits

    return transform


@pytest.mark.parametrize(
    "error",
    [
        ValueError("too many values to unpack"),
        KeyError("keys"),
        AssertionError("a batch of one"),
        NotImplementedError("trim"),
        TypeError("not an array"),
        AttributeError("no shape"),
        IndexError("no item"),
        RuntimeError("no stream"),
        ZeroDivisionError("by the offset"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_model_that_raises_with_the_caches_is_refused(error) -> None:
    with pytest.raises(UnsupportedModel, match="cannot use paged caches") as refused:
        quantize_kv(Particular(raising(error)))
    assert refused.value.__cause__ is error


def test_a_memory_error_is_not_a_refusal() -> None:
    with pytest.raises(MemoryError):
        quantize_kv(Particular(raising(MemoryError("no room"))))


def off_with_drop_ins(cache: Any, logits: mx.array) -> mx.array:
    """Return wrong logits for a cache without ``keys``, which drop-in caches do not have."""
    return logits if hasattr(cache, "keys") else logits + 0.1 * mx.arange(logits.shape[-1])


def off_in_batches(cache: Any, logits: mx.array) -> mx.array:
    return logits if isinstance(cache.offset, int) else off_with_drop_ins(cache, logits)


def off_when_long(cache: Any, logits: mx.array) -> mx.array:
    return logits if cache.size() < 100 else off_with_drop_ins(cache, logits)


@pytest.mark.parametrize("transform", [off_with_drop_ins, off_in_batches, off_when_long])
def test_a_model_with_different_logits_is_refused(transform) -> None:
    with pytest.raises(UnsupportedModel, match="logits differ by"):
        quantize_kv(Particular(transform))


@pytest.mark.parametrize("bits", [16, 8])
def test_logits_must_be_numbers(bits) -> None:
    def transform(cache: Any, logits: mx.array) -> mx.array:
        is_trial = isinstance(cache, DropInKVCache) and cache.scheme.k_bits == bits
        return logits * mx.nan if is_trial else logits

    with pytest.raises(UnsupportedModel, match="logits are not finite"):
        quantize_kv(Particular(transform), "k8v4")


def test_a_model_that_never_batches_still_gets_caches() -> None:
    """The model fails in a batch with mlx-lm's caches, too, so this is no reason to refuse it."""

    def transform(cache: Any, logits: mx.array) -> mx.array:
        if isinstance(cache, BatchKVCache) or not isinstance(cache.offset, int):
            raise TypeError("only length-1 arrays can be converted to Python scalars")
        return logits

    model = Particular(transform)
    kv = quantize_kv(model, "k16v16")
    tokens = mx.array([[1, 2, 3, 4]])
    np.testing.assert_allclose(
        np.array(model(tokens, cache=kv.make_cache())),
        np.array(model(tokens, cache=make_prompt_cache(model._model))),
        atol=1e-4,
    )


@pytest.mark.parametrize("size", [16, 64, 200])
def test_max_kv_size_is_no_reason_to_refuse(size) -> None:
    kv = quantize_kv(Particular(lambda _, logits: logits), "k8v4", max_kv_size=size)
    assert kv.make_cache()[0].max_size == size


def test_installed_caches_stay_when_another_scheme_is_refused() -> None:
    model = Particular(lambda _, logits: logits)
    kv = quantize_kv(model, "k8v4")
    model.transform = off_with_drop_ins

    with pytest.raises(UnsupportedModel):
        quantize_kv(model, "k4v4")

    assert model.make_cache == kv.make_cache
    assert kv.nbytes == 0


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "stablelm", "plamo2", "llama4"])
def test_models_that_touch_their_keys_are_refused(name) -> None:
    model, _ = build(name)
    with pytest.raises(UnsupportedModel):
        quantize_kv(model)
    assert "make_cache" not in model.__dict__


@pytest.mark.parametrize("name", ["lfm2", "gemma3n", "mixtral", "jamba"])
def test_models_that_do_not_touch_their_keys_are_accepted(name) -> None:
    model, _ = build(name)
    assert quantize_kv(model, "k8v4").nbytes == 0, "the trial leaves nothing behind"
    del model.make_cache
