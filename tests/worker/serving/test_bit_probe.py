"""The probe of layers: its estimates against measured losses, for all models, in bounded memory."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache, make_prompt_cache

from kvd import demo
from kvd.worker.cache.layout import AttentionPart
from kvd.worker.native import build as native_build
from kvd.worker.native import operations
from kvd.worker.native.layers import pack_weights
from kvd.worker.serving import bit_probe, model_files, probe, seam
from kvd.worker.serving.bit_choice import text_ids
from kvd.worker.serving.bit_probe import BitProbe, NoEstimateError, SideCosts
from kvd.worker.serving.probe import UnknownCacheError
from tests.breadth import part_of
from tests.worker.architectures.reference import difference, run, tokens
from tests.worker.architectures.zoo import ZOO, build

pytestmark = pytest.mark.mlx

MEMORY = 256 << 20
FIRST = bit_probe.QUANTIZED + bit_probe.EXACT
WIDE_STATES = {
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
"""Changes of a configuration that make its recurrent states larger than its activations."""
WIDE_HEADS = {
    "linear_attn_config": ZOO["kimi_linear"].config["linear_attn_config"] | {"head_dim": 128}
}


@cache
def loaded() -> model_files.LoadedModel:
    seam.install()
    return model_files.load(demo.path())


@pytest.fixture(scope="module")
def library() -> ModuleType:
    if native_build.compiler() is None:
        pytest.skip("no C++ compiler")
    return native_build.load()


def costs_of(model: Any, ids: list[int], *, unit: int = 16, memory: int = MEMORY) -> Any:
    found = BitProbe(model, ids, unit=unit, memory=memory)
    while found.units:
        found.advance()
    return found.costs()


def quantized(x: mx.array, bits: int, *, keys: bool) -> mx.array:
    """Return ``[1, heads, tokens, dim]`` after quantization as in pages."""
    if keys:
        _, heads, count, dim = x.shape
        pages = x.reshape(heads, count // 64, 64, dim).swapaxes(-1, -2)
        packed = mx.quantize(pages, group_size=64, bits=bits)
        back = mx.dequantize(*packed, group_size=64, bits=bits)
        return back.swapaxes(-1, -2).reshape(x.shape)
    packed = mx.quantize(x, group_size=64, bits=bits)
    return mx.dequantize(*packed, group_size=64, bits=bits)


def measured(ids: list[int], bits: int) -> list[float]:
    """Return the KL divergence of quantizing each side alone: keys, values of layer 0, 1, ..."""
    model = loaded().model
    own = make_prompt_cache(model)
    model(mx.array([ids[:FIRST]]), cache=own)
    states = [(one.keys[:, :, :FIRST], one.values[:, :, :FIRST]) for one in own]

    def logits(changed: int | None) -> mx.array:
        caches = []
        for layer, sides in enumerate(states):
            filled = KVCache()
            filled.update_and_fetch(*(
                mx.concatenate(
                    [
                        quantized(x[:, :, : bit_probe.QUANTIZED], bits, keys=side == 0),
                        x[:, :, bit_probe.QUANTIZED :],
                    ],
                    axis=2,
                )
                if changed == 2 * layer + side
                else x
                for side, x in enumerate(sides)
            ))  # fmt: skip
            caches.append(filled)
        out = model(mx.array([ids[FIRST:]]), cache=caches)
        return out - mx.logsumexp(out, axis=-1, keepdims=True)

    exact = logits(None)
    return [
        (mx.exp(exact) * (exact - logits(side))).sum(axis=-1).mean().item()
        for side in range(2 * len(states))
    ]


def test_the_estimates_rank_layers_as_their_losses_do():
    ids = text_ids(loaded())
    found: list[SideCosts] = costs_of(loaded().model, ids)
    estimated = [one / 15**2 for cost in found for one in (cost.keys, cost.values)]
    losses = measured(ids, 4)
    assert int(np.argmax(estimated)) == int(np.argmax(losses)) == 8  # the keys of layer 4
    ranks = [np.argsort(np.argsort(one)) for one in (estimated, losses)]
    assert np.corrcoef(*ranks)[0, 1] > 0.8
    assert 0.3 < sum(estimated) / sum(losses) < 3


def test_the_numbers_of_a_probe_do_not_depend_on_other_random_numbers():
    ids = text_ids(loaded())
    first = costs_of(loaded().model, ids)
    mx.random.seed(77)
    state = [one.tolist() for one in mx.random.state]
    assert costs_of(loaded().model, ids) == first
    assert [one.tolist() for one in mx.random.state] == state


@pytest.mark.parametrize("unit", [64, 8])
def test_units_of_any_size_find_the_delicate_layer(unit: int):
    found = costs_of(loaded().model, text_ids(loaded()), unit=unit)
    assert max(found, key=lambda one: one.keys).layer == 4
    assert max(found, key=lambda one: one.keys).keys > 4 * sorted(one.keys for one in found)[-2]


def test_the_probe_counts_its_units():
    found = BitProbe(loaded().model, text_ids(loaded()), unit=16, memory=MEMORY)
    left = []
    while found.units:
        left.append(found.units)
        found.advance()
    assert left == list(range(len(left), 0, -1))


def test_a_small_memory_makes_small_units_and_is_not_exceeded():
    ids = text_ids(loaded())
    costs_of(loaded().model, ids)  # MLX's own first allocations
    for memory in (14 << 20, 18 << 20, 40 << 20):
        found = BitProbe(loaded().model, ids, unit=64, memory=memory)
        mx.clear_cache()
        mx.reset_peak_memory()
        before = mx.get_active_memory()
        while found.units:
            found.advance()
        assert mx.get_peak_memory() - before < memory
        assert max(found.costs(), key=lambda one: one.keys).layer == 4


@pytest.mark.parametrize(
    ("name", "larger"),
    [
        ("jamba", {"mamba_d_state": 64}),  # gradients of a state for each token
        ("qwen3_next", WIDE_STATES),
        ("kimi_linear", WIDE_HEADS),
        ("deepseek_v3", {}),  # keys and values of all heads from latents
        ("gemma", {}),
    ],
)
def test_models_with_states_or_latents_stay_within_the_memory(name: str, larger: dict[str, Any]):
    model, _ = build(name, config=ZOO[name].config | larger)
    ids = tokens(bit_probe.TOKENS).tolist()
    memory = least_memory(model, ids)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    costs_of(model, ids, memory=memory)
    taken = mx.get_peak_memory() - before
    assert taken < memory
    if larger:  # the states take most of it
        assert memory < 2.2 * taken


@pytest.mark.parametrize("unit", [64, 4])
@pytest.mark.parametrize(
    "name",
    [
        "gptj",
        "gpt_bigcode",
        "minimax_m3_vl",  # its number of heads is in a part of the settings
        "step3p5",  # layers with twice as many heads
        "afm7",  # layers that read the keys and values of others
        "nemotron_h",  # layers without attention
    ],
)
def test_the_estimate_of_the_memory_is_near_what_a_model_takes(name: str, unit: int):
    model, _ = build(name)
    found = BitProbe(model, tokens(bit_probe.TOKENS).tolist(), unit=unit, memory=MEMORY)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    found.advance()
    needed = found._needed(unit)
    while found.units:
        found.advance()
    taken = mx.get_peak_memory() - before
    assert taken < needed < 5 * taken


@pytest.mark.parametrize("name", ["jamba", "qwen3_next", "gemma"])
def test_the_memory_between_units_is_known_after_the_first_one(name: str):
    larger = {"jamba": {"mamba_d_state": 64}, "qwen3_next": WIDE_STATES}.get(name, {})
    model, _ = build(name, config=ZOO[name].config | larger)
    mx.eval(model.parameters())
    before = mx.get_active_memory()
    found = BitProbe(model, tokens(bit_probe.TOKENS).tolist(), unit=16, memory=MEMORY)
    found.advance()
    most = found.held_bytes
    while found.units:
        found.advance()
        assert mx.get_active_memory() - before <= most


@pytest.mark.parametrize(
    ("text", "error"),
    [("[malloc] Unable to allocate 4096 bytes.", MemoryError), ("no", NoEstimateError)],
)
def test_a_shortage_is_no_property_of_the_model(text: str, error: type[Exception]):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError(text)

    found = BitProbe(loaded().model, text_ids(loaded()), unit=16, memory=MEMORY)
    found._read_unit = fail  # type: ignore[method-assign]
    with pytest.raises(error):
        found.advance()


def least_memory(model: Any, ids: list[int]) -> int:
    """Return the least memory that a probe takes for enough, to a thousandth."""
    low, high = 1, 1 << 30
    while high - low > low // 1000:
        middle = (low + high) // 2
        try:
            BitProbe(model, ids, unit=16, memory=middle).advance()
            high = middle
        except NoEstimateError:
            low = middle
    return high


def test_too_little_memory_ends_the_probe_for_now():
    with pytest.raises(NoEstimateError, match="1 MiB are free") as caught:
        costs_of(loaded().model, text_ids(loaded()), memory=1 << 20)
    assert not caught.value.lasting


def test_packed_weights_have_the_same_gradients(library: ModuleType):
    seam.install()
    ids = tokens(bit_probe.TOKENS).tolist()
    model, _ = build("qwen3")
    with operations.installed(None):
        expected = costs_of(model, ids)
    packed, _ = build("qwen3")
    pack_weights(packed, library)
    with operations.installed(library):
        logits = run(packed, tokens(40))
        found = costs_of(packed, ids)
        assert difference(run(packed, tokens(40)), logits) == 0
    for one, other in zip(found, expected, strict=True):
        assert (one.keys, one.values) == pytest.approx((other.keys, other.values), rel=1e-3)


WITHOUT = {
    "deepseek_v41": "has its own cache class",
    "mamba": "keeps no keys and values",
    "mamba2": "keeps no keys and values",
    "recurrent_gemma": "has a square root at zero, whose gradient is infinite",
    "rwkv7": "keeps no keys and values",
}
"""Models without an estimate, and why."""


@pytest.mark.parametrize("name", sorted({*part_of([*ZOO], 3), *WITHOUT}))
def test_every_model_gets_estimates_or_a_reason_and_stays_as_it_was(name: str):
    model, _ = build(name)
    before = run(model, tokens(90), decoded=1)
    ids = tokens(bit_probe.TOKENS).tolist()
    if name in WITHOUT:
        with pytest.raises((NoEstimateError, UnknownCacheError)):
            costs_of(model, ids)
    else:
        found = costs_of(model, ids, unit=32)  # the largest of which there are several
        layout = probe.find_layout(model)
        sizes: dict[int, list[int]] = {}
        for entry, some in enumerate(layout.entries):
            parts = [part.geometry for part in some.parts if isinstance(part, AttentionPart)]
            if parts:
                sides = ((one.kv_heads * one.k_dim, one.kv_heads * one.v_dim) for one in parts)
                sizes[entry] = [sum(side) for side in zip(*sides, strict=True)]
        assert {one.layer: [one.key_elements, one.value_elements] for one in found} == sizes
        assert all(one.keys >= 0 and one.values >= 0 for one in found)
        assert not sizes or any(one.keys > 0 for one in found)
    assert difference(run(model, tokens(90), decoded=1), before) == 0
