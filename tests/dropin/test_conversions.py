"""To mlx-lm's own caches and back, to files and back, and models that cannot have ours."""

from __future__ import annotations

import subprocess
import sys

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from kvd.worker.cache.dropin import BatchQuantizedKVCache, BatchQuantizedRotatingKVCache
from kvd.worker.quantize_kv import install, quantize_kv
from kvd.worker.seam import scaled_dot_product_attention
from protocol.errors import UnsupportedModel
from tests.architectures.zoo import build

pytestmark = pytest.mark.mlx


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def random(rng, tokens: int, dim: int = 64, batch: int = 1) -> mx.array:
    return mx.array(rng.normal(size=(batch, 2, tokens, dim)).astype(np.float32))


def attended(cache, rng_seed: int, tokens: int) -> np.ndarray:
    """What the next tokens see, through the seam, ours or mlx-lm's."""
    rng = np.random.default_rng(rng_seed)
    outputs = []
    for _ in range(tokens):
        queries, keys, values = (random(rng, 1) for _ in range(3))
        mask = cache.make_mask(1, return_array=False, window_size=None)
        found = cache.update_and_fetch(keys, values)
        outputs.append(scaled_dot_product_attention(queries, *found, cache, 0.2, mask))
    output = np.array(mx.concatenate(outputs, axis=2))
    assert np.isfinite(output).all()
    return output


def test_dense_there_and_back_is_exact(rng) -> None:
    theirs = KVCache()
    theirs.update_and_fetch(random(rng, 300), random(rng, 300))

    ours = BatchQuantizedKVCache.from_kv_cache(theirs, "k16v16")
    back = ours.to_kv_cache()

    assert ours.offset == back.offset == 300
    for mine, true in zip(back.keys_and_values(), theirs.keys_and_values(), strict=True):
        np.testing.assert_array_equal(np.array(mine), np.array(true))
    np.testing.assert_allclose(attended(ours, 1, 80), attended(back, 1, 80), atol=1e-5)


@pytest.mark.parametrize("length", [50, 200, 333])
def test_a_window_becomes_a_rotating_cache(rng, length) -> None:
    ours = BatchQuantizedRotatingKVCache(100, keep=4, scheme="k16v16")
    keys, values, queries = random(rng, length), random(rng, length), random(rng, length)
    found = ours.update_and_fetch(keys, values)
    mx.eval(scaled_dot_product_attention(queries, *found, ours, 0.2, None))

    theirs = ours.to_kv_cache()

    assert (theirs.max_size, theirs.keep, theirs.offset) == (100, 4, length)
    np.testing.assert_allclose(attended(ours, 2, 120), attended(theirs, 2, 120), atol=1e-5)


def test_rotating_caches_convert_until_they_overwrite(rng) -> None:
    theirs = RotatingKVCache(100, keep=4)
    theirs.update_and_fetch(random(rng, 90), random(rng, 90))
    ours = BatchQuantizedRotatingKVCache.from_kv_cache(theirs, "k16v16")
    np.testing.assert_allclose(attended(ours, 3, 60), attended(theirs, 3, 60), atol=1e-5)

    with pytest.raises(ValueError, match="before it overwrites"):
        BatchQuantizedRotatingKVCache.from_kv_cache(theirs)


def test_to_and_from_mlx_lms_quantized_cache(rng) -> None:
    theirs = QuantizedKVCache(group_size=64, bits=8)
    keys, values = random(rng, 300), random(rng, 300)
    theirs.update_and_fetch(keys, values)

    ours = BatchQuantizedKVCache.from_quantized(theirs, "k8v8")
    back = ours.to_quantized(bits=8)

    assert isinstance(back, QuantizedKVCache)
    assert back.offset == ours.offset == 300
    shown = mx.dequantize(*back.keys_and_values()[0], group_size=64, bits=8)
    lost = np.abs(np.array(shown - keys)).max()
    assert 0 < lost < 0.1, "three times quantized to 8 bits"


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("scheme", ["k8v4", "k16v16"])
def test_files_of_mlx_lm_hold_our_caches(name, scheme, tmp_path) -> None:
    model, _ = build(name)
    kv = quantize_kv(model, scheme)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[5 + i % 90 for i in range(333)]]), cache=caches))
    file = str(tmp_path / "prompt.safetensors")

    save_prompt_cache(file, caches, {"of": "a test"})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)

    assert metadata == {"of": "a test"}
    assert [type(one) for one in loaded] == [type(one) for one in caches]
    for token in range(90):  # the loaded ones seal pages of their own
        true = np.array(model(mx.array([[token + 1]]), cache=caches))
        np.testing.assert_allclose(
            np.array(model(mx.array([[token + 1]]), cache=loaded)), true, atol=1e-4
        )
    batch = [one.merge([one, two]) for one, two in zip(loaded, caches, strict=True)]
    logits = np.array(model(mx.array([[7], [7]]), cache=batch))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
    del batch, caches
    assert kv.nbytes == 0


def test_states_of_others_are_refused() -> None:
    for state in ({}, {"header": '{"format": 99}'}, (mx.zeros((1, 2, 3, 4)), mx.zeros(1), 3)):
        with pytest.raises(ValueError, match="no state of a quantized cache"):
            BatchQuantizedKVCache.from_state(state)


def test_evaluating_a_state_copies_no_pages(rng) -> None:
    cache = BatchQuantizedKVCache("k8v8")
    found = cache.update_and_fetch(random(rng, 4096), random(rng, 4096))
    mx.eval(scaled_dot_product_attention(random(rng, 4096), *found, cache, 0.2, None))
    del found
    mx.synchronize()
    cache.trim(0)
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    mx.eval([cache.state])

    assert mx.get_peak_memory() <= before


def test_what_does_not_merge_says_so(rng) -> None:
    one, two = BatchQuantizedRotatingKVCache(100), BatchQuantizedRotatingKVCache(200)
    with pytest.raises(ValueError, match="window 100, window 200"):
        one.merge([one, two])
    with pytest.raises(TypeError, match="KVCache"):
        BatchQuantizedKVCache().merge([BatchQuantizedKVCache(), KVCache()])
    cache = BatchQuantizedKVCache()
    cache.update_and_fetch(random(rng, 3, batch=2), random(rng, 3, batch=2))
    assert cache.offset == 3
    with pytest.raises(ValueError, match="holds 2"):
        cache.update_and_fetch(random(rng, 3, batch=3), random(rng, 3, batch=3))
    with pytest.raises(ValueError, match="extract one"):
        cache.to_kv_cache()


@pytest.mark.parametrize("name", ["gemma2", "deepseek_v3", "llama4"])
def test_models_that_touch_their_keys_are_refused(name) -> None:
    model, _ = build(name)
    with pytest.raises(UnsupportedModel):
        quantize_kv(model)
    assert "make_cache" not in model.__dict__


def test_installed_twice_the_newer_one_counts() -> None:
    model, _ = build("qwen3")
    quantize_kv(model, "k8v8")
    assert quantize_kv(model, "k4v4").make_cache()[0].scheme.name == "k4v4"
    assert make_prompt_cache(model)[0].scheme.name == "k4v4"
    with pytest.raises(ValueError, match="no KV scheme"):
        quantize_kv(model, "k9v9")
    assert make_prompt_cache(model)[0].scheme.name == "k4v4"


def test_install_refuses_to_be_late() -> None:
    install()
    late = """
from mlx_lm.models import qwen3
from kvd.worker.quantize_kv import quantize_kv
try:
    quantize_kv(None)
except RuntimeError as error:
    assert "mlx_lm.models.qwen3" in str(error)
else:
    raise SystemExit("installed although a model had the original")
"""
    subprocess.run([sys.executable, "-c", late], check=True)
