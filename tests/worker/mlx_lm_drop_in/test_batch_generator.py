"""mlx-lm's generation loops with kvd's caches, compared with kvd's engine and mlx-lm's caches."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import BatchGenerator, generate_step, speculative_generate_step
from mlx_lm.models.cache import KVCache, LRUPromptCache, make_prompt_cache

from kvd.worker.mlx_lm_drop_in.caches import DropInKVCache
from kvd.worker.mlx_lm_drop_in.quantize_kv import QuantizedKV, quantize_kv
from kvd.worker.serving.seam import scaled_dot_product_attention
from protocol.kv import KVSpec
from tests.breadth import part_of
from tests.worker import shallow
from tests.worker.architectures.zoo import build
from tests.worker.core.driver import Driver

pytestmark = pytest.mark.mlx

LENGTHS = (300, 5, 130, 1, 64, 513)


def prompts_of(vocabulary: int, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    rng = np.random.default_rng(1)
    return [rng.integers(1, vocabulary, size=length).tolist() for length in lengths]


@pytest.fixture
def quantized() -> Iterator[Callable[..., QuantizedKV]]:
    """Install caches on a model, and assert after the test that none of their memory is left."""
    installed: list[tuple[Any, QuantizedKV]] = []

    def install(model: Any, *how: Any, **options: Any) -> QuantizedKV:
        installed.append((model, quantize_kv(model, *how, **options)))
        return installed[-1][1]

    yield install
    gc.collect()
    for model, kv in installed:
        model.__dict__.pop("make_cache", None)
        assert kv.nbytes == 0


def batched(
    model: Any, prompts: list[list[int]], tokens: int, *, late: int = 2, **options: Any
) -> tuple[list[list[int]], list[np.ndarray]]:
    """Generate greedily. The last ``late`` prompts join while others run, and rows leave."""
    generator = BatchGenerator(model, prefill_step_size=256, **options)
    limits = [tokens - 7 * index for index in range(len(prompts))]
    first = len(prompts) - late
    uids = generator.insert(prompts[:first], limits[:first])
    got: dict[int, list[int]] = {}
    logprobs: dict[int, list[np.ndarray]] = {}
    steps = 0
    while responses := generator.next_generated():
        for response in responses:
            got.setdefault(response.uid, []).append(response.token)
            logprobs.setdefault(response.uid, []).append(np.array(response.logprobs))
        steps += 1
        if steps == 10:
            uids += generator.insert(prompts[first:], limits[first:])
    generator.close()
    assert [len(got[uid]) for uid in uids] == limits
    return [got[uid] for uid in uids], [np.stack(logprobs[uid]) for uid in uids]


def alone(model: Any, prompt: list[int], tokens: int, **options: Any) -> tuple[list[int], Any]:
    steps = generate_step(
        mx.array(prompt), model, max_tokens=tokens, prefill_step_size=256, **options
    )
    found = [(token, np.array(logprobs)) for token, logprobs in steps]
    return [token for token, _ in found], np.stack([logprobs for _, logprobs in found])


@pytest.mark.parametrize("scheme", ["k8v8", "k4v4"])
def test_batch_generator_gives_the_engines_tokens(scheme, quantized) -> None:
    driver = Driver(shallow.path(), kv=KVSpec(k_bits=int(scheme[1]), v_bits=int(scheme[3])))
    model = driver.engine._runner.model
    prompts = prompts_of(2000)
    for index, prompt in enumerate(prompts):
        driver.submit(str(index), prompt, max_tokens=100 - 7 * index)
    driver.run()

    quantized(model, scheme)
    got, _ = batched(model, prompts, 100)

    wanted = [driver.outcomes[str(index)].tokens for index in range(len(prompts))]
    assert sum(len(tokens) for tokens in wanted) > 200
    # The engine stops at the model's end token, which this generator does not know.
    assert [tokens[: len(true)] for tokens, true in zip(got, wanted, strict=True)] == wanted


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    part_of(["gpt_oss", "llama", "gemma3_text", "qwen3", "mixtral", "olmo3", "gemma4_text"], 3),
)
def test_dense_pages_give_mlx_lms_logits(name, quantized) -> None:
    model, config = build(name)
    prompts = prompts_of(config["vocab_size"])
    wanted = [alone(model, p, 64 - 7 * i) for i, p in enumerate(prompts)]

    quantized(model, "k16v16")
    got, logprobs = batched(model, prompts, 64)

    for (tokens, true), mine, found in zip(wanted, got, logprobs, strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_allclose(found, true, atol=1e-4)
        assert mine == tokens


def test_a_sequence_gives_the_same_tokens_alone_and_in_a_batch(quantized) -> None:
    model, config = build("qwen3")
    prompts = prompts_of(config["vocab_size"])
    quantized(model, "k4v4", group_size=32)

    got, logprobs = batched(model, prompts, 120)

    for index, prompt in enumerate(prompts):
        tokens, true = alone(model, prompt, 120 - 7 * index)
        np.testing.assert_allclose(logprobs[index], true, atol=1e-4)
        assert got[index] == tokens


def test_a_sequence_is_quantized_from_quantized_kv_start_on(quantized) -> None:
    model, config = build("qwen3")
    (prompt,) = prompts_of(config["vocab_size"], (200,))
    dense, true = alone(model, prompt, 150)
    quantized(model, "k2v2", quantized_kv_start=300)

    _, logprobs = alone(model, prompt, 150)

    np.testing.assert_allclose(logprobs[:100], true[:100], atol=1e-4)
    assert np.abs(logprobs[110:] - true[110:]).max() > 1e-3
    assert len(dense) == 150


def test_max_kv_size_works_as_in_mlx_lm(quantized) -> None:
    model, config = build("qwen3")
    (prompt,) = prompts_of(config["vocab_size"], (100,))
    tokens, true = alone(model, prompt, 200, max_kv_size=128)
    kv = quantized(model, "k16v16", max_kv_size=128)

    got, logprobs = alone(model, prompt, 200)

    assert type(kv.make_cache()[0]).__name__ == "DropInRotatingKVCache"
    np.testing.assert_allclose(logprobs, true, atol=1e-4)
    assert got == tokens


def test_speculative_decoding_trims_refused_tokens(quantized) -> None:
    model, config = build("qwen3")
    draft, _ = build("qwen3", seed=5)
    (prompt,) = prompts_of(config["vocab_size"], (180,))
    wanted, _ = alone(model, prompt, 60)
    for one in (model, draft):
        quantized(one, "k16v16")

    steps = list(speculative_generate_step(mx.array(prompt), model, draft, max_tokens=60))

    assert [int(token) for token, _, _ in steps] == wanted
    assert not all(from_draft for _, _, from_draft in steps)
    del steps


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
def test_prompt_cache_of_the_server(name, quantized) -> None:
    """Insert a cache, fetch a trimmed copy, and continue it. The inserted one does not change."""
    model, config = build(name)
    (prompt,) = prompts_of(config["vocab_size"], (250,))
    branch = prompt[:30] + [token % 50 + 1 for token in prompt[30:60]]
    short = prompt[:40]
    wanted = [alone(model, p, 20)[0] for p in (branch, prompt)]
    quantized(model, "k16v16")
    lru = LRUPromptCache()

    cache = make_prompt_cache(model)
    alone(model, short, 1, prompt_cache=cache)
    lru.insert_cache("m", [*short, 0][: cache[-1].offset], cache)
    assert lru.nbytes == sum(one.nbytes for one in cache) > 0
    del cache

    for tokens, expected in zip((branch, prompt), wanted, strict=True):
        found, rest = lru.fetch_nearest_cache("m", tokens)
        assert len(rest) < len(tokens)
        assert alone(model, rest, 20, prompt_cache=found)[0] == expected
        del found
    lru.trim_to(n_sequences=0)


def test_responses_have_caches_that_can_continue(quantized) -> None:
    model, config = build("qwen3")
    first, second = prompts_of(config["vocab_size"], (70, 200))
    quantized(model, "k16v16")
    generator = BatchGenerator(model, prefill_step_size=256)
    generator.insert([first, second], [60, 90])
    done: dict[int, Any] = {}
    while responses := generator.next_generated():
        done |= {r.uid: (r.prompt_cache, r.all_tokens) for r in responses if r.finish_reason}

    for caches, tokens in done.values():
        assert all(cache.offset == len(tokens) for cache in caches)
        more = [*tokens, 7, 8, 9]
        got = BatchGenerator(model)
        got.insert([[7, 8, 9]], [15], caches=[caches], all_tokens=[list(tokens)])
        found = [r.token for _ in range(15) for r in got.next_generated()]
        assert found == alone(model, more, 15)[0]
        assert all(cache.offset == len(tokens) for cache in caches), "inserted caches stay"
    done.clear()


def test_merging_and_splitting_copies_no_key(quantized) -> None:
    """The cost of building a batch does not grow with the context."""
    model, config = build("qwen3")
    kv = quantized(model, "k8v4")
    grown = []
    for length in (256, 2048):
        parts = []
        for prompt in prompts_of(config["vocab_size"], (length, length)):
            cache = make_prompt_cache(model)
            alone(model, prompt, 1, prompt_cache=cache)
            parts.append(cache)
        mx.synchronize()
        pages = [dict(one.shared.rows.pages.allocators[0].references) for one in parts[0]]
        before, held = mx.get_active_memory(), kv.nbytes
        mx.reset_peak_memory()
        batch = [one.merge([one, two]) for one, two in zip(*parts, strict=True)]
        for cache in batch:
            cache.extend(cache.extract(1))
            cache.filter([2, 0])
        assert mx.get_active_memory() == before
        grown.append(max(0, mx.get_peak_memory() - before))
        assert kv.nbytes == held
        assert pages == [dict(one.shared.rows.pages.allocators[0].references) for one in batch]
        del batch, cache, parts
    assert grown == [0, 0]


@pytest.mark.slow
def test_pipelined_decoding_holds_no_second_copy(quantized) -> None:
    """mlx-lm launches a step before it reads the previous one. Flushes must not copy pools then."""
    model, config = build("qwen3")
    kv = quantized(model, "k16v16")
    generator = BatchGenerator(model, prefill_step_size=512)
    prompts = prompts_of(config["vocab_size"], (2048, 2010, 1000, 980))
    generator.insert(prompts, [330] * 4)
    while not generator.next_generated():
        pass
    mx.synchronize()
    mx.set_cache_limit(0)
    stores = [cache.shared.rows for cache in generator._generation_batch.prompt_cache]
    peaks = []
    for _ in range(320):
        flushes, held, before = stores[0].flushes, kv.nbytes, mx.get_active_memory()
        mx.reset_peak_memory()
        assert generator.next_generated()
        if stores[0].flushes > flushes and kv.nbytes == held:  # growing pools are copied
            peaks.append(mx.get_peak_memory() - before)

    assert len(peaks) >= 2
    assert max(peaks) < stores[0].layers[0].pools[0].keys[0].nbytes // 2, "a pool was copied"
    del generator, stores


def test_a_flush_waits_for_steps_that_were_not_evaluated() -> None:
    rng = np.random.default_rng(0)
    random = [mx.array(rng.normal(size=(1, 2, 8000, 64)).astype(np.float32)) for _ in range(2)]
    upstream = KVCache()
    upstream.update_and_fetch(*random)
    cache = DropInKVCache.from_kv_cache(upstream, "k16v16")
    store = cache.shared.rows
    mx.set_cache_limit(0)
    peaks, output = [], None
    for _ in range(300):
        flushes, held, before = store.flushes, store.nbytes, mx.get_active_memory()
        mx.reset_peak_memory()
        token = random[0][:, :, :1]
        found = cache.update_and_fetch(token, token)
        if store.flushes > flushes and store.nbytes == held:
            peaks.append(mx.get_peak_memory() - before)
        # Not evaluated yet. Its evaluation reads the pool.
        output = scaled_dot_product_attention(token, *found, cache, 0.2, None)

    assert peaks
    assert max(peaks) < store.layers[0].pools[0].keys[0].nbytes // 2, "a pool was copied"
    assert np.isfinite(np.array(output)).all()


def test_generators_dropped_during_a_step_leave_nothing(quantized) -> None:
    model, config = build("qwen3")
    kv = quantized(model, "k8v8")
    generator = BatchGenerator(model, prefill_step_size=64)
    generator.insert(prompts_of(config["vocab_size"]), [100] * len(LENGTHS))
    for _ in range(20):
        generator.next()
    assert kv.nbytes > 0
    assert isinstance(make_prompt_cache(model)[0], DropInKVCache)
    del generator
    gc.collect()

    assert kv.nbytes == 0
