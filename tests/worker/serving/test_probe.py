"""The probe at load serves each model in the best way that gives right logits, and records why
better ways were rejected."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from kvd.worker.cache import packed
from kvd.worker.cache.attention_kind import FULL
from kvd.worker.cache.mlx_lm_cache import MlxLmCache
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving import describe, probe, seam, selfcheck
from kvd.worker.serving.probe import Served
from protocol.errors import UnsupportedModel

pytestmark = pytest.mark.mlx

VOCAB = 160
TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
    "rope_theta": 10000.0,
}


def model_of(kind: str, **changes: Any) -> Any:
    seam.install()
    module = importlib.import_module(f"mlx_lm.models.{kind}")
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(TINY | {"model_type": kind} | changes))
    mx.eval(model.parameters())
    return model


def served(kind: str, scheme: str = "k8v8", **changes: Any) -> Served:
    settings = CacheSettings(schemes=(Scheme.parse(scheme),))
    return probe.serve(model_of(kind, **changes), settings, VOCAB)


def paths(found: Served) -> dict[str, str]:
    return {kind.name: access.value for kind, access in found.runner.cache.access.items()}


def test_a_load_needs_no_memory_for_the_logits_of_whole_prompts() -> None:
    """With Gemma 3's vocabulary, those of one prompt took 612 MB, and the worker ended itself."""
    words = 60_000
    model = model_of("qwen3", vocab_size=words)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    probe.serve(model, CacheSettings(schemes=(Scheme.parse("k8v8"),)), words)
    assert mx.get_peak_memory() - before < 4 * words * max(selfcheck.LENGTHS)


@pytest.mark.parametrize(
    "kind", ["qwen3", "llama", "qwen2", "mistral3", "olmo2", "glm4", "granite"]
)
def test_full_attention_models_pass(kind: str) -> None:
    changes: dict[str, Any] = {}
    if kind == "mistral3":
        changes = {"text_config": TINY | {"model_type": "llama"}}
    if kind == "glm4":
        changes = {"attention_bias": False, "partial_rotary_factor": 0.5}
    if kind == "granite":
        changes = dict.fromkeys(
            ("attention_multiplier", "embedding_multiplier", "residual_multiplier"), 0.1
        )
        changes |= {"logits_scaling": 2.0, "attention_bias": False, "mlp_bias": False}
    found = served(kind, **changes)

    assert found.path == "reference, gathered pages"
    assert 0 <= found.error < 1e-4
    assert paths(found) == {"full": "pages"}
    assert found.runner.cache.batched
    assert not found.reasons


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("scheme", ["k8v8", "k4v4", "k16v4"])
def test_head_sizes_and_schemes(head_dim: int, scheme: str) -> None:
    # Every head size, and every scheme, occurs with 1 and with 4 KV heads.
    kv_heads = 4 if (head_dim // 16 + len(scheme)) % 2 else 1
    found = served("llama", scheme, head_dim=head_dim, num_key_value_heads=kv_heads)

    assert found.error < 1e-4
    assert found.runner.cache.nbytes == 0


def test_half_precision_passes_within_its_rounding() -> None:
    model = model_of("qwen3")
    model.set_dtype(mx.bfloat16)
    found = probe.serve(model, CacheSettings(), VOCAB)

    assert found.runner.cache.layout.dtype == mx.bfloat16
    assert found.error < 5e-2
    assert paths(found) == {"full": "pages"}


def test_windows_have_a_store_of_their_own() -> None:
    found = served("gemma3_text", sliding_window=64, sliding_window_pattern=2)

    assert paths(found) == {"window 64": "pages", "full": "pages"}


def test_recurrent_models_keep_their_states() -> None:
    found = served(
        "mamba2",
        state_size=16,
        num_heads=4,
        conv_kernel=4,
        time_step_limit=(0.0, 100.0),
        n_groups=1,
        time_step_rank=4,
        layer_norm_epsilon=1e-5,
        use_bias=False,
        use_conv_bias=True,
        residual_in_fp32=False,
        rms_norm=True,
        chunk_size=16,
        head_dim=32,
    )

    assert paths(found) == {}
    assert found.path == "recurrent states"
    assert found.runner.cache.states.row_bytes > 0


def test_a_model_that_computes_with_its_keys_gets_dequantized_ones_and_the_reason_is_kept() -> None:
    found = served("gemma2")

    assert paths(found) == {"full": "dequantize-on-read"}
    assert "mask" in next(iter(found.reasons.values()))


class Stranger(KVCache):
    """A cache of an unknown class."""


def test_an_unknown_cache_is_served_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3")
    make = lambda: [Stranger() for _ in model.layers]  # noqa: E731
    monkeypatch.setattr(type(model), "make_cache", lambda _: make(), raising=False)
    found = probe.serve(model, CacheSettings(), VOCAB)

    assert isinstance(found.runner.cache, MlxLmCache)
    assert found.path == "dense, mlx-lm's own caches"
    assert "Stranger" in next(iter(found.reasons.values()))
    assert found.runner.cache.costs.token_bytes == 2 * 2 * 2 * 64 * 4


def test_wrong_product_is_replaced_by_the_one_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed.page_product
    monkeypatch.setattr(probe, "page_product", lambda *a, **k: right(*a, **k) * 1.35)

    assert served("qwen3").path == "reference, copied pages"


def test_missing_product_is_replaced_by_the_one_that_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(*_: object, **__: object) -> mx.array:
        raise RuntimeError("not implemented on this device")

    monkeypatch.setattr(probe, "page_product", missing)

    assert served("qwen3").path == "reference, copied pages"


def test_without_any_right_product_pages_are_dequantized(monkeypatch: pytest.MonkeyPatch) -> None:
    right = packed.page_product
    wrong = lambda *a, **k: right(*a, **k) * mx.nan  # noqa: E731
    monkeypatch.setattr(probe, "page_product", wrong)
    monkeypatch.setattr(probe, "page_product_by_copy", wrong)
    found = served("qwen3")

    assert paths(found) == {"full": "dequantize-on-read"}
    assert "not finite" in next(iter(found.reasons.values()))
    assert found.runner.cache.nbytes == 0


@pytest.mark.parametrize(("chunk", "start"), [(describe.PREFILL_CHUNK, 0), (64, 200)])
def test_status_reports_the_bound_of_a_bounded_row(
    monkeypatch: pytest.MonkeyPatch, chunk: int, start: int
) -> None:
    settings = CacheSettings(max_size=256, keep=4, quantized_start=start)
    found = probe.serve(model_of("llama"), settings, VOCAB)
    (part,) = describe.parts(found, chunk)
    cache = found.runner.cache
    most = 0
    (store,) = cache.stores
    take = store.pages.take

    def watched(level: int, count: int) -> Any:
        nonlocal most
        pages = take(level, count)
        most = max(most, store.pages.used_bytes + store.tails.row_bytes)
        return pages

    monkeypatch.setattr(store.pages, "take", watched)
    row = cache.new_row()
    for _ in range(0, 768, chunk):
        found.runner.prefill(row, [3] * chunk)
    for _ in range(130):
        if cache.needs_flush([row]):
            cache.flush()
        mx.eval(found.runner.decode([row], mx.array([5], mx.int32)), cache.arrays())

    assert most <= part.bound_bytes <= 1.3 * most


# Checks beyond the packing of new rows.


def wrong_below(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Make products of pages with fewer bits than this wrong, except those that copy."""

    def product(x: mx.array, packed_: Any, packing: Any, index: Any, **rest: Any) -> mx.array:
        got = packed.page_product(x, packed_, packing, index, **rest)
        return got * 0.5 if packing.bits < bits else got

    monkeypatch.setattr(probe, "page_product", product)


@pytest.mark.parametrize(
    ("schemes", "floor"),
    [("k8v8 k4v4", None), ("k8v8 k8v4", None), ("k8v8 k8v4 k4v4", None), ("k8v8 k2v2", "k4v4")],
)
def test_a_wrong_product_of_a_lower_level_is_found(
    monkeypatch: pytest.MonkeyPatch, schemes: str, floor: str | None
) -> None:
    wrong_below(monkeypatch, 8)
    floors = lambda layers: [None if floor is None else Scheme.parse(floor)] * layers  # noqa: E731
    settings = CacheSettings(schemes=tuple(map(Scheme.parse, schemes.split())), floors=floors)
    found = probe.serve(model_of("llama"), settings, VOCAB)

    assert found.path == "reference, copied pages"
    assert found.runner.cache.settings == settings


def test_a_level_whose_packings_no_layer_has_is_not_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrong_below(monkeypatch, 8)
    settings = CacheSettings(
        schemes=(Scheme(8, 8), Scheme(4, 4)), floors=lambda layers: [Scheme(8, 8)] * layers
    )

    assert probe.serve(model_of("llama"), settings, VOCAB).path == "reference, gathered pages"


@pytest.mark.parametrize("start", [1, 512])
def test_a_wrong_product_behind_a_dense_start_is_found(
    monkeypatch: pytest.MonkeyPatch, start: int
) -> None:
    wrong_below(monkeypatch, 16)
    found = probe.serve(model_of("llama"), CacheSettings(quantized_start=start), VOCAB)

    assert found.path == "reference, copied pages"
    assert found.runner.cache.settings.quantized_start == start


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, tuple[int, ...]]]:
    """Return the settings and prompt lengths of the checks over quantized pages, in order."""
    made: list[tuple[Any, tuple[int, ...]]] = []
    check = selfcheck.against_dequantized

    def spy(runner: Any, vocab_size: int, lengths: Any) -> float:
        made.append((runner.cache.settings, tuple(lengths)))
        return check(runner, vocab_size, lengths)

    monkeypatch.setattr(probe.selfcheck, "against_dequantized", spy)
    return made


def test_each_new_packing_costs_one_check(checks: list[Any]) -> None:
    schemes = (Scheme(8, 8), Scheme(8, 4), Scheme(4, 4))
    probe.serve(model_of("llama"), CacheSettings(schemes=schemes), VOCAB)

    assert [settings.schemes[0] for settings, _ in checks] == [Scheme(8, 8), Scheme(4, 4)]


@pytest.mark.parametrize("keep", [0, 4, 2000])
def test_a_bounded_size_is_checked_on_rows_that_have_passed_it(
    checks: list[Any], keep: int
) -> None:
    settings = CacheSettings(max_size=8192, keep=keep)
    found = probe.serve(model_of("llama"), settings, VOCAB)

    assert found.error < 1e-4
    assert paths(found) == {"full": "pages"}
    ((checked, lengths),) = checks
    kind = checked.kind(FULL)
    assert kind.keep < kind.low(max(lengths)) < max(lengths)
    assert found.runner.cache.settings == settings


def test_rows_of_the_check_exceed_windows_unless_they_are_long(checks: list[Any]) -> None:
    served("gemma3_text", sliding_window=300, sliding_window_pattern=2)
    served("gemma3_text", sliding_window=4096, sliding_window_pattern=2)

    assert [max(lengths) for _, lengths in checks] == [372, 200]


# Models that fail.


def test_a_model_with_damaged_weights_is_refused_with_the_reason() -> None:
    model = model_of("llama")
    model.model.norm.weight = model.model.norm.weight * mx.nan

    with pytest.raises(UnsupportedModel, match="logits are not finite"):
        probe.serve(model, CacheSettings(), VOCAB)


def test_a_model_that_mlx_lm_cannot_run_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("llama")

    def broken(*_: object, **__: object) -> mx.array:
        raise KeyError("rope")

    monkeypatch.setattr(type(model), "__call__", broken)
    with pytest.raises(UnsupportedModel, match=r"cannot run this model here.*KeyError"):
        probe.serve(model, CacheSettings(), VOCAB)


class Forgetful(KVCache):
    """Scales the values differently for each cache."""

    made = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).made += 1
        self.noise = type(self).made

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        keys, values = super().update_and_fetch(keys, values)
        return keys, values * self.noise


def test_a_model_that_is_wrong_over_its_own_caches_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of("qwen3")
    make = lambda _: [Forgetful() for _ in model.layers]  # noqa: E731
    monkeypatch.setattr(type(model), "make_cache", make, raising=False)

    with pytest.raises(UnsupportedModel, match="even mlx-lm's own caches do not"):
        probe.serve(model, CacheSettings(), VOCAB)


@pytest.mark.parametrize(
    "error", [AssertionError("no state"), KeyError("state"), ZeroDivisionError(), OSError("disk")]
)
def test_a_model_that_fails_over_kvds_caches_is_served_dense(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    model = model_of("llama")
    layer = type(model.model.layers[0])
    call = layer.__call__

    def picky(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if cache is not None and not isinstance(cache, KVCache):
            raise error
        found: mx.array = call(self, x, mask, cache)
        return found

    monkeypatch.setattr(layer, "__call__", picky)
    found = probe.serve(model, CacheSettings(), VOCAB)

    assert found.path == "dense, mlx-lm's own caches"
    assert type(error).__name__ in next(iter(found.reasons.values()))


def test_lack_of_memory_is_no_verdict_on_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object, **__: object) -> mx.array:
        raise MemoryError

    monkeypatch.setattr(probe, "page_product", short)
    with pytest.raises(MemoryError):
        served("llama")
