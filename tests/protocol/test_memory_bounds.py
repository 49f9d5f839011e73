"""Upper bounds of a step's memory, for the configurations that mlx-lm's models have."""

from __future__ import annotations

from typing import Any

import pytest

from protocol.memory_bounds import (
    CHUNK_COPIES,
    COUNT_BYTES,
    CUDA_PASS_TOKENS,
    LOGIT_COPIES,
    PASS_TOKENS,
    SAMPLED_AT_ONCE,
    SAMPLED_COPIES,
    SCORED_AT_ONCE,
    STAGE_COPIES,
    WIDE_PASS_TOKENS,
    pass_tokens,
    step_bytes,
)

SMALL = {"hidden_size": 64, "vocab_size": 10}
CHUNK, ROWS = 256, 32


@pytest.mark.parametrize(
    ("config", "width"),
    [
        ({"intermediate_size": 300}, 300),
        ({"intermediate_size": [100, 500, 300]}, 500),
        ({"num_attention_heads": 8, "head_dim": 128}, 1024),
        ({"intermediate_size": 300, "num_experts_per_tok": 4}, 1200),
        ({"intermediate_size": 300, "num_experts_per_tok": 4, "moe_intermediate_size": 50}, 300),
        ({"intermediate_size": 90, "moe_topk": [2, 8], "moe_intermediate_size": [20, 50]}, 400),
        ({"num_experts_per_tok": 16, "moe_intermediate_size": 10, "intermediate_size": 64}, 512),
        ({"ffn_config": {"ffn_hidden_size": 100, "moe_top_k": 4}}, 400),
        ({}, 256),
    ],
    ids=str,
)
def test_the_widest_activation(config: dict[str, Any], width: int) -> None:
    config = SMALL | config
    expected = CHUNK_COPIES * (CHUNK + ROWS) * width * 4
    counts = COUNT_BYTES * ROWS * config["vocab_size"]
    assert step_bytes(config, CHUNK, ROWS, on_cpu=True) == counts + expected
    assert step_bytes(config, CHUNK, ROWS, on_cpu=False) == counts + expected // 2
    assert step_bytes({"text_config": config}, CHUNK, ROWS, on_cpu=True) == counts + expected


def test_logits_of_a_large_vocabulary() -> None:
    config = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 150_000}
    logits = LOGIT_COPIES * SCORED_AT_ONCE * 150_000 * 4
    sampled, counts = SAMPLED_COPIES * SAMPLED_AT_ONCE, COUNT_BYTES * 150_000
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    hidden = CHUNK * (STAGE_COPIES * 64 + 2 * 64) * 4
    assert step_bytes(config, CHUNK, 1, on_cpu=True) == logits + sampled + counts + hidden
    assert step_bytes(config, CHUNK, 1, on_cpu=False) == logits + sampled + counts + hidden // 2
    shared = config | {"num_hidden_layers": 5, "num_kv_shared_layers": 2}
    more = step_bytes(shared, CHUNK, 1, on_cpu=True) - step_bytes(config, CHUNK, 1, on_cpu=True)
    assert more == CHUNK * 4 * 64 * 4
    most = 2 * logits + sampled + 64 * counts + hidden
    assert step_bytes(config, CHUNK, 64, on_cpu=True) == most
    whole = step_bytes(config, CHUNK, 1, on_cpu=True, whole_logits=CHUNK)
    assert whole == logits + sampled + counts + CHUNK * 150_000 * 4


def test_few_small_logits_are_sampled_at_once() -> None:
    config = {"hidden_size": 1, "intermediate_size": 1, "vocab_size": 1000}
    copies = LOGIT_COPIES + SAMPLED_COPIES
    expected = copies * SCORED_AT_ONCE * 1000 * 4 + COUNT_BYTES * 1000 + STAGE_COPIES * 4
    assert step_bytes(config, 1, 1, on_cpu=True) == expected


def test_passes_of_several_gpus_have_more_tokens() -> None:
    assert pass_tokens(256, cuda=True) == CUDA_PASS_TOKENS
    assert pass_tokens(256, cuda=True, wide=True) == WIDE_PASS_TOKENS > CUDA_PASS_TOKENS
    assert pass_tokens(256, cuda=False, wide=True) == PASS_TOKENS
    assert pass_tokens(10_000, cuda=True, wide=True) == 10_000
