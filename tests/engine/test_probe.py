"""The probe at load: each model gets the best way that is right, and the reason is kept."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from kvd.worker import probe, seam
from kvd.worker.cache import packed
from kvd.worker.cache.composite import CacheSettings
from kvd.worker.cache.own import OwnCache
from kvd.worker.cache.scheme import Scheme
from kvd.worker.probe import Served

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
    settings = CacheSettings(ladder=(Scheme.parse(scheme),))
    return probe.serve(model_of(kind, **changes), settings, VOCAB)


def paths(found: Served) -> dict[str, str]:
    return {kind.name: access.value for kind, access in found.runner.cache.access.items()}


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
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("scheme", ["k8v8", "k4v4", "k16v4"])
def test_head_sizes_and_schemes(head_dim: int, kv_heads: int, scheme: str) -> None:
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


def test_a_model_that_works_on_its_keys_gets_arrays_and_the_reason_is_kept() -> None:
    found = served("gemma2")

    assert paths(found) == {"full": "dequantize-on-read"}
    assert "mask" in next(iter(found.reasons.values()))


class Stranger(KVCache):
    """A cache of a class that nobody knows."""


def test_a_cache_that_nobody_knows_is_served_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("qwen3")
    make = lambda: [Stranger() for _ in model.layers]  # noqa: E731
    monkeypatch.setattr(type(model), "make_cache", lambda _: make(), raising=False)
    found = probe.serve(model, CacheSettings(), VOCAB)

    assert isinstance(found.runner.cache, OwnCache)
    assert found.path == "dense, mlx-lm's own caches"
    assert "Stranger" in next(iter(found.reasons.values()))
    assert found.runner.cache.token_bytes == 2 * 2 * 2 * 64 * 4


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
    assert "differ" in next(iter(found.reasons.values()))
    assert found.runner.cache.nbytes == 0
