"""The self-check at load: right models pass, wrong paths are replaced or refused."""

from __future__ import annotations

import importlib
from typing import Any

import mlx.core as mx
import pytest

from kvd.worker import seam, selfcheck
from kvd.worker.cache import packed
from kvd.worker.cache.scheme import Scheme
from kvd.worker.runner import Runner
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


def runner_of(kind: str, scheme: str = "k8v8", **changes: Any) -> Runner:
    return Runner.of(model_of(kind, **changes), Scheme.parse(scheme), prefill_scratch=1 << 28)


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
    verdict = selfcheck.check(runner_of(kind, **changes), VOCAB)

    assert verdict.path == "reference, gathered pages"
    assert 0 <= verdict.error < 1e-4


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("scheme", ["k8v8", "k4v4", "k16v4"])
def test_head_sizes_and_schemes(head_dim: int, kv_heads: int, scheme: str) -> None:
    runner = runner_of("llama", scheme, head_dim=head_dim, num_key_value_heads=kv_heads)

    assert selfcheck.check(runner, VOCAB).error < 1e-4
    assert runner.store.nbytes == 0


def test_half_precision_passes_within_its_rounding() -> None:
    model = model_of("qwen3")
    model.set_dtype(mx.bfloat16)
    runner = Runner.of(model, Scheme(8, 8), prefill_scratch=1 << 28)

    assert runner.store.dtype == mx.bfloat16
    assert selfcheck.check(runner, VOCAB).error < 5e-2


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    [
        ("mamba2", {"state_size": 16, "num_heads": 4, "conv_kernel": 4}, "ArraysCache"),
        ("gemma3_text", {"sliding_window": 64, "sliding_window_pattern": 2}, "RotatingKVCache"),
        ("gemma2", {}, "keys and values itself"),
    ],
)
def test_other_models_are_refused_with_the_reason(kind: str, changes: dict, says: str) -> None:
    if kind == "mamba2":
        changes = changes | {
            "time_step_limit": (0.0, 100.0),
            "n_groups": 1,
            "time_step_rank": 4,
            "layer_norm_epsilon": 1e-5,
            "use_bias": False,
            "use_conv_bias": True,
            "residual_in_fp32": False,
            "rms_norm": True,
            "chunk_size": 16,
            "head_dim": 32,
        }
    with pytest.raises(UnsupportedModel, match=says):
        selfcheck.check(runner_of(kind, **changes), VOCAB)


def test_wrong_product_is_replaced_by_the_one_that_copies() -> None:
    runner = runner_of("qwen3")
    right = packed.page_product
    runner.store.page_product = lambda *a, **k: right(*a, **k) * 1.35

    assert selfcheck.check(runner, VOCAB).path == "reference, copied pages"


def test_missing_product_is_replaced_by_the_one_that_copies() -> None:
    runner = runner_of("qwen3")

    def missing(*_: object, **__: object) -> mx.array:
        raise RuntimeError("not implemented on this device")

    runner.store.page_product = missing

    assert selfcheck.check(runner, VOCAB).path == "reference, copied pages"


def test_no_right_path_refuses_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of("qwen3")
    right = packed.page_product
    wrong = lambda *a, **k: right(*a, **k) * mx.nan  # noqa: E731
    runner.store.page_product = wrong
    monkeypatch.setattr(selfcheck, "page_product_by_copy", wrong)

    with pytest.raises(UnsupportedModel, match="self-check"):
        selfcheck.check(runner, VOCAB)
    assert runner.store.nbytes == 0
