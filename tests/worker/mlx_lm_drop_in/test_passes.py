"""Passes in which layers share keys, while memory is allocated and freed."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from kvd.worker.cache.attention_kind import FULL, Kind
from kvd.worker.cache.scheme import Scheme
from kvd.worker.mlx_lm_drop_in.caches import DropInKVCache, DropInRotatingKVCache
from kvd.worker.mlx_lm_drop_in.padding import Span
from kvd.worker.mlx_lm_drop_in.quantize_kv import quantize_kv
from kvd.worker.mlx_lm_drop_in.shared_store import Reading, SharedStore
from tests.worker.architectures.zoo import build

pytestmark = pytest.mark.mlx

DIM = 16


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def random(rng: np.random.Generator, tokens: int, batch: int = 1) -> mx.array:
    return mx.array(rng.normal(size=(batch, 1, tokens, DIM)).astype(np.float32))


def filled(store: SharedStore, tokens: int, rng: np.random.Generator) -> DropInKVCache:
    cache = DropInKVCache.on(store)
    with store.at_work():
        store.fill(cache.rows, [Span(0, tokens)], random(rng, tokens), random(rng, tokens))
    return cache


def attended(reading: Reading, queries: mx.array) -> np.ndarray:
    output = np.array(reading.attend(queries, 0.2, None))
    assert np.isfinite(output).all()
    return output


@pytest.mark.parametrize("tokens", [1, 100])
def test_layers_that_share_keys_see_the_same_after_memory_was_freed(rng, tokens) -> None:
    store = SharedStore([Scheme(8, 8)], home=True)
    neighbour, cache = filled(store, 15000, rng), filled(store, 1000, rng)
    before = store.nbytes
    del neighbour
    keys, queries = random(rng, tokens), random(rng, tokens)

    reading, _ = cache.update_and_fetch(keys, keys)
    first = attended(reading, queries)
    again = attended(cache.keys_and_values()[0], queries)

    np.testing.assert_array_equal(again, first)
    cache.update_and_fetch(random(rng, 100), random(rng, 100))[0].attend(random(rng, 100), 1, None)
    assert store.nbytes < before / 2, "the neighbour's memory is given back between passes"


def test_sharing_layers_of_a_model_see_the_same_after_memory_was_freed() -> None:
    model, _ = build("gemma3n")
    prompt = [(7 * index + 3) % 97 for index in range(700)]
    quantize_kv(model, "k16v16")

    def prefill(caches: list[object], tokens: list[int]) -> np.ndarray:
        for start in range(0, len(tokens), 128):
            logits = model(mx.array([tokens[start : start + 128]]), cache=caches)
            mx.eval(logits)
        return np.array(logits[0, -1])

    wanted = prefill(model.make_cache(), prompt)
    neighbour = model.make_cache()
    prefill(neighbour, prompt[:1])
    for store in {id(one.shared): one.shared for one in neighbour if not one.empty()}.values():
        g = store.rows.layers[0].geometry
        sides = (mx.zeros((1, g.kv_heads, 20000, dim)) for dim in (g.k_dim, g.v_dim))
        cache = next(one for one in neighbour if one.shared is store)
        with store.at_work():
            store.fill(cache.rows, [Span(0, 20000)], *sides)
    caches = model.make_cache()
    prefill(caches, prompt[:640])
    neighbour.clear()
    del cache

    got = prefill(caches, prompt[640:])

    np.testing.assert_allclose(got, wanted, atol=1e-4)
    del model.make_cache


def test_pages_that_leave_a_window_are_not_reused_for_rows_that_leave_the_dense_start(rng) -> None:
    """In one pass, one row frees pages of the level on which another row gets pages."""
    schemes, kind = [Scheme(16, 16), Scheme(8, 8)], Kind(window=150)
    store = SharedStore(schemes, kind, quantized_start=300, home=True)
    old, young = DropInRotatingKVCache.on(store), DropInRotatingKVCache.on(store)
    for cache, counts in ((old, (250, 200)), (young, (200,))):
        for count in counts:
            keys = random(rng, count)
            attended(cache.update_and_fetch(keys, keys)[0], random(rng, count))
    batch = old.merge([old, young])
    del old, young, cache
    keys, queries = random(rng, 150, batch=2), random(rng, 150, batch=2)

    reading, _ = batch.update_and_fetch(keys, keys)
    first = attended(reading, queries)

    np.testing.assert_array_equal(attended(batch.keys_and_values()[0], queries), first)


def test_a_reading_raises_after_its_pass(rng) -> None:
    store = SharedStore([Scheme(8, 8)], FULL)
    cache, other = filled(store, 300, rng), filled(store, 300, rng)
    one = random(rng, 1)
    reading, _ = cache.update_and_fetch(one, one)
    other.update_and_fetch(one, one)

    with pytest.raises(RuntimeError, match="pass that is over"):
        reading.attend(one, 0.2, None)
    with pytest.raises(RuntimeError, match="pass that is over"):
        cache.keys_and_values()[0].attend(one, 0.2, None)


def test_a_row_leaves_the_dense_start_at_its_own_length(rng) -> None:
    """A flush for another row in between does not change the content of this row."""
    keys, queries, more = random(rng, 130), random(rng, 20), random(rng, 20)

    def output(*, neighbour: bool) -> np.ndarray:
        store = SharedStore([Scheme(16, 16), Scheme(2, 2)], FULL, quantized_start=130)
        cache = DropInKVCache.on(store)
        with store.at_work():
            store.fill(cache.rows, [Span(0, 128)], keys[:, :, :128], keys[:, :, :128])
        for token in (128, 129):
            one = keys[:, :, token : token + 1]
            attended(cache.update_and_fetch(one, one)[0], one)
        if neighbour:
            filled(store, 10, rng)
        return attended(cache.update_and_fetch(more, more)[0], queries)

    np.testing.assert_array_equal(output(neighbour=True), output(neighbour=False))
