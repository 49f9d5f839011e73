"""Scored prompts: the runner computes logits of few tokens at a time, with the same numbers."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.device import on_cpu
from kvd.worker.serving import probe
from kvd.worker.serving.runner import Runner
from protocol import memory_bounds
from tests.worker.serving.test_probe import TINY, model_of

pytestmark = pytest.mark.mlx

VOCAB = 30_000
CHUNK = 256


def runner_of(kind: str = "qwen3", **changes: Any) -> Runner:
    model = model_of(kind, vocab_size=VOCAB, **changes)
    return probe.serve(model, CacheSettings(schemes=(Scheme.parse("k8v8"),)), VOCAB).runner


def ids(count: int) -> list[int]:
    return [(at * 7919) % VOCAB for at in range(count)]


def scores(runner: Runner) -> list[mx.array]:
    row = runner.cache.new_row()
    found = [runner.score(row, ids(count)) for count in (CHUNK, 71)]
    mx.eval(found)
    runner.cache.free(row)
    return found


@pytest.mark.parametrize("kind", ["qwen3", "gemma2"])
def test_logits_in_parts_are_those_of_the_whole_chunk(kind: str) -> None:
    runner = runner_of(kind, query_pre_attn_scalar=64.0)
    expected = scores(runner)
    assert runner.split_head()
    found = scores(runner)

    for one, other in zip(found, expected, strict=True):
        assert mx.isfinite(other).all()
        same = mx.array_equal(one, other) if on_cpu() else mx.allclose(one, other, atol=1e-2)
        assert same.item()


def test_a_scored_prompt_takes_no_more_memory_than_is_charged() -> None:
    runner, config = runner_of(), TINY | {"vocab_size": VOCAB}
    assert runner.split_head()
    row = runner.cache.new_row()
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    for part in runner.score_parts(row, ids(CHUNK)):
        mx.eval(mx.logsumexp(part.astype(mx.float32), axis=-1))
        del part
    used = mx.get_peak_memory() - before

    assert used < memory_bounds.step_bytes(config, CHUNK, 1, on_cpu=True)
    assert used < CHUNK * VOCAB * 4


def test_a_model_whose_inner_part_computes_logits_is_not_split() -> None:
    runner = runner_of(
        "gpt_neox", layer_norm_eps=1e-5, rotary_emb_base=10000, rotary_pct=0.5, head_dim=16
    )
    assert not runner.split_head()
    assert not runner.splits_head
    assert runner.score(runner.cache.new_row(), ids(40)).shape == (40, VOCAB)
    config = TINY | {"vocab_size": VOCAB}
    whole = memory_bounds.step_bytes(config, CHUNK, 1, on_cpu=True, whole_logits=CHUNK)
    assert whole >= CHUNK * VOCAB * 4
