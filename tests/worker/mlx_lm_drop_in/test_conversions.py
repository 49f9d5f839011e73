"""Conversions to mlx-lm's caches and files, and back. Failures change nothing."""

from __future__ import annotations

import copy
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.scheme import Scheme
from kvd.worker.mlx_lm_drop_in.caches import DropInKVCache, DropInRotatingKVCache
from kvd.worker.mlx_lm_drop_in.quantize_kv import install, quantize_kv
from kvd.worker.mlx_lm_drop_in.shared_store import LayerRows, SharedStore
from kvd.worker.serving.seam import scaled_dot_product_attention
from tests.worker.architectures.zoo import build
from tests.worker.mlx_lm_drop_in.dense import check_shared

pytestmark = pytest.mark.mlx


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def random(rng, tokens: int, dim: int = 64, batch: int = 1) -> mx.array:
    return mx.array(rng.normal(size=(batch, 2, tokens, dim)).astype(np.float32))


def attended(cache, rng_seed: int, tokens: int) -> np.ndarray:
    """Return the attention output of the next tokens, through the seam."""
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


def test_dense_conversion_and_back_is_exact(rng) -> None:
    upstream = KVCache()
    upstream.update_and_fetch(random(rng, 300), random(rng, 300))

    paged = DropInKVCache.from_kv_cache(upstream, "k16v16")
    back = paged.to_kv_cache()

    assert paged.offset == back.offset == 300
    for mine, true in zip(back.keys_and_values(), upstream.keys_and_values(), strict=True):
        np.testing.assert_array_equal(np.array(mine), np.array(true))
    np.testing.assert_allclose(attended(paged, 1, 80), attended(back, 1, 80), atol=1e-5)


@pytest.mark.parametrize("length", [50, 200, 333])
def test_a_window_becomes_a_rotating_cache(rng, length) -> None:
    paged = DropInRotatingKVCache(100, keep=4, scheme="k16v16")
    keys, values, queries = random(rng, length), random(rng, length), random(rng, length)
    found = paged.update_and_fetch(keys, values)
    mx.eval(scaled_dot_product_attention(queries, *found, paged, 0.2, None))

    upstream = paged.to_kv_cache()

    assert (upstream.max_size, upstream.keep, upstream.offset) == (100, 4, length)
    np.testing.assert_allclose(attended(paged, 2, 120), attended(upstream, 2, 120), atol=1e-5)


def test_rotating_caches_convert_until_they_overwrite(rng) -> None:
    upstream = RotatingKVCache(100, keep=4)
    upstream.update_and_fetch(random(rng, 90), random(rng, 90))
    paged = DropInRotatingKVCache.from_kv_cache(upstream, "k16v16")
    np.testing.assert_allclose(attended(paged, 3, 60), attended(upstream, 3, 60), atol=1e-5)

    with pytest.raises(ValueError, match="before it overwrites"):
        DropInRotatingKVCache.from_kv_cache(upstream)


def test_to_and_from_mlx_lms_quantized_cache(rng) -> None:
    upstream = QuantizedKVCache(group_size=64, bits=8)
    keys, values = random(rng, 300), random(rng, 300)
    upstream.update_and_fetch(keys, values)

    paged = DropInKVCache.from_quantized(upstream, "k8v8")
    back = paged.to_quantized(bits=8)

    assert isinstance(back, QuantizedKVCache)
    assert back.offset == paged.offset == 300
    shown = mx.dequantize(*back.keys_and_values()[0], group_size=64, bits=8)
    lost = np.abs(np.array(shown - keys)).max()
    assert 0 < lost < 0.1, "three times quantized to 8 bits"


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "lfm2"])
@pytest.mark.parametrize("scheme", ["k8v4", "k16v16"])
def test_mlx_lms_files_hold_drop_in_caches(name, scheme, tmp_path) -> None:
    model, _ = build(name)
    kv = quantize_kv(model, scheme)
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array([[5 + i % 90 for i in range(373)]]), cache=caches))
    file = str(tmp_path / "prompt.safetensors")

    save_prompt_cache(file, caches, {"of": "a test"})
    loaded, metadata = load_prompt_cache(file, return_metadata=True)

    assert metadata == {"of": "a test"}
    assert [type(one) for one in loaded] == [type(one) for one in caches]
    for token in range(50):  # the loaded caches commit pages of their own
        true = np.array(model(mx.array([[token + 1]]), cache=caches))
        np.testing.assert_allclose(
            np.array(model(mx.array([[token + 1]]), cache=loaded)), true, atol=1e-4
        )
    batch = [one.merge([one, two]) for one, two in zip(loaded, caches, strict=True)]
    logits = np.array(model(mx.array([[7], [7]]), cache=batch))
    np.testing.assert_allclose(logits[0], logits[1], atol=1e-4)
    del batch, caches
    assert kv.nbytes == 0


def test_states_of_other_caches_are_refused() -> None:
    for state in ({}, {"header": '{"format": 99}'}, (mx.zeros((1, 2, 3, 4)), mx.zeros(1), 3)):
        with pytest.raises(ValueError, match="expected the state of a quantized cache"):
            DropInKVCache.from_state(state)


def saved(rng) -> dict[str, Any]:
    cache = DropInKVCache("k8v4")
    cache.update_and_fetch(random(rng, 300), random(rng, 300))
    cache.extend(DropInKVCache("k8v4"))
    return {
        name: list(part) if isinstance(part, list) else part for name, part in cache.state.items()
    }


def damages() -> Iterator[tuple[str, Callable[[dict[str, Any], dict[str, Any]], None]]]:
    for name in ("kind", "schemes", "quantized_start", "batched", "rows", "geometry", "dtype"):
        yield f"no {name}", lambda _, header, name=name: header.pop(name)
    for name in ("tails", "keys0", "values0"):
        yield f"no {name}", lambda state, _, name=name: state.pop(name)
    for name, value in {
        "kind": [1],
        "schemes": [],
        "geometry": [2, 64],
        "dtype": "eval",
        "quantized_start": "soon",
        "rows": [None, {}],
    }.items():
        yield f"{name} {value}", lambda _, header, of=(name, value): header.update([of])
    for name, value in {
        "length": 1000,
        "level": 1,
        "pages": [[0, 7]],
        "skipped": -3,
        "more": 1,
    }.items():
        yield (
            f"a row's {name} {value}",
            lambda _, header, of=(name, value): header["rows"][0].update([of]),
        )
    for name in ("keys0", "values0", "tails"):
        yield (
            f"{name} of another shape",
            lambda state, _, name=name: state.update({name: [part[:, :1] for part in state[name]]}),
        )
        yield f"one of {name} missing", lambda state, _, name=name: state[name].pop()


@pytest.mark.parametrize("damage", [pytest.param(do, id=name) for name, do in damages()])
def test_damaged_states_are_refused(rng, damage) -> None:
    state = saved(rng)
    assert DropInKVCache.from_state(state).lengths == [300, 0]
    header = json.loads(state["header"])
    damage(state, header)
    state["header"] = json.dumps(header)

    with pytest.raises(ValueError, match=r"is damaged; make the cache again from its prompt"):
        DropInKVCache.from_state(state)


@pytest.mark.parametrize("header", ["", "no JSON", "[1]", "null", 5])
def test_wrong_headers_are_refused(header) -> None:
    with pytest.raises(ValueError, match="expected the state of a quantized cache"):
        DropInKVCache.from_state({"header": header})


def test_a_state_replaces_the_content_of_a_cache(rng) -> None:
    store = SharedStore([Scheme(8, 4)], home=True)
    cache = DropInKVCache.on(store)
    cache.update_and_fetch(random(rng, 200), random(rng, 200))

    cache.state = saved(rng)

    assert cache.lengths == [300, 0]
    assert store.nbytes == 0


@pytest.mark.parametrize("lengths", [(100,), (100, 50)])
def test_mlx_lms_batches_do_not_convert_but_their_sequences_do(rng, lengths) -> None:
    parts = [KVCache() for _ in lengths]
    for part, length in zip(parts, lengths, strict=True):
        part.update_and_fetch(random(rng, length), random(rng, length))
    batch = KVCache.merge(parts)

    with pytest.raises(TypeError, match=r"cannot convert a BatchKVCache.* extract\(\)"):
        DropInKVCache.from_kv_cache(batch, "k16v16")

    paged = DropInKVCache.merge(
        [
            DropInKVCache.from_kv_cache(batch.extract(index), "k16v16")
            for index in range(len(lengths))
        ]
    )
    assert paged.lengths == list(lengths)
    for index, part in enumerate(parts):
        np.testing.assert_array_equal(
            np.array(paged.dense(index)[0]), np.array(part.keys_and_values()[0][0])
        )


@pytest.mark.parametrize(
    "other", [ArraysCache(2), CacheList(KVCache()), ChunkedKVCache(64), DropInKVCache()]
)
def test_caches_of_other_types_do_not_convert(other) -> None:
    with pytest.raises(TypeError, match=f"cannot convert a {type(other).__name__}"):
        DropInKVCache.from_kv_cache(other)


def test_evaluating_a_state_copies_no_pages(rng) -> None:
    cache = DropInKVCache("k8v8")
    found = cache.update_and_fetch(random(rng, 4096), random(rng, 4096))
    mx.eval(scaled_dot_product_attention(random(rng, 4096), *found, cache, 0.2, None))
    del found
    mx.synchronize()
    cache.trim(0)
    before = mx.get_active_memory()
    mx.reset_peak_memory()

    mx.eval([cache.state])

    assert mx.get_peak_memory() <= before


def test_caches_that_do_not_merge_raise(rng) -> None:
    one, two = DropInRotatingKVCache(100), DropInRotatingKVCache(200)
    with pytest.raises(ValueError, match="window 100, window 200"):
        one.merge([one, two])
    with pytest.raises(TypeError, match="KVCache"):
        DropInKVCache().merge([DropInKVCache(), KVCache()])
    cache = DropInKVCache()
    cache.update_and_fetch(random(rng, 3, batch=2), random(rng, 3, batch=2))
    assert cache.offset == 3
    with pytest.raises(ValueError, match="holds 2"):
        cache.update_and_fetch(random(rng, 3, batch=3), random(rng, 3, batch=3))
    with pytest.raises(ValueError, match="extract one"):
        cache.to_kv_cache()


def held(store: SharedStore) -> tuple[Any, ...]:
    rows = store.rows
    return (
        rows.pages.used_bytes,
        [row.slot for row in rows.rows],
        [dict(one.references) for one in rows.pages.allocators],
    )


@pytest.mark.parametrize("how", ["merge", "extend"])
def test_a_refused_merge_changes_nothing(rng, how) -> None:
    """A merge finds the third cache's different head size after it has copied the second cache."""
    store = SharedStore([Scheme(8, 8)], home=True)
    home, good, bad = (
        DropInKVCache.on(store),
        DropInKVCache("k8v8"),
        DropInKVCache("k8v8"),
    )
    for cache, dim in ((home, 64), (good, 64), (bad, 32)):
        cache.update_and_fetch(random(rng, 300, dim), random(rng, 300, dim))
    good.extend(home)
    home.nbytes  # noqa: B018 - finishes the pass, which writes its pages
    before = held(store)

    for _ in range(3):
        with pytest.raises(ValueError, match="this layer holds"):
            DropInKVCache.merge([home, good, bad]) if how == "merge" else bad.extend(good)

    assert held(store) == before
    assert (home.lengths, good.lengths, bad.lengths) == ([300], [300, 300], [300])
    check_shared(store, [home.rows, good.rows])
    check_shared(bad.shared, [bad.rows])
    assert isinstance(bad.offset, int)


@pytest.mark.parametrize("fails_at", range(5))
def test_a_merge_without_memory_changes_nothing(rng, monkeypatch, fails_at) -> None:
    store = SharedStore([Scheme(8, 8)], home=True)
    home, other = DropInKVCache.on(store), DropInKVCache("k4v4")
    for cache in (home, other):
        for batch in (1, 1):
            cache.update_and_fetch(random(rng, 300, batch=batch), random(rng, 300, batch=batch))
    twin = copy.copy(other)
    other.extend(twin.extract(0))
    twin.update_and_fetch(random(rng, 70), random(rng, 70))
    other.extend(twin)
    home.nbytes  # noqa: B018 - finishes the pass, which writes its pages
    before = held(store)
    calls = itertools.count()

    def short(function):
        def call(*arguments):
            if next(calls) == fails_at:
                raise MemoryError("injected")
            return function(*arguments)

        return call

    with monkeypatch.context() as patch:
        for kind, name in (
            (PagePool, "grow"),
            (LayerStore, "write"),
            (LayerRows, "new_row"),
            (LayerStore, "fill_tail"),
        ):
            patch.setattr(kind, name, short(getattr(kind, name)))
        with pytest.raises(MemoryError):
            DropInKVCache.merge([home, other])

    assert held(store) == before
    check_shared(store, [home.rows])
    merged = DropInKVCache.merge([home, other])
    assert merged.lengths == [600, 600, 600, 670]


def test_a_second_install_replaces_the_first() -> None:
    model, _ = build("qwen3")
    quantize_kv(model, "k8v8")
    assert quantize_kv(model, "k4v4").make_cache()[0].scheme.name == "k4v4"
    assert make_prompt_cache(model)[0].scheme.name == "k4v4"
    with pytest.raises(ValueError, match="no KV scheme"):
        quantize_kv(model, "k9v9")
    assert make_prompt_cache(model)[0].scheme.name == "k4v4"


def test_install_after_a_model_import_is_refused() -> None:
    install()
    late = """
from mlx_lm.models import qwen3
from kvd.worker.mlx_lm_drop_in.quantize_kv import quantize_kv
try:
    quantize_kv(None)
except RuntimeError as error:
    assert "mlx_lm.models.qwen3" in str(error)
else:
    raise SystemExit("installed although a model had the original")
"""
    subprocess.run([sys.executable, "-c", late], check=True)
