"""`bench/gpu` runs on the tiny shape, and its loops make the same tokens."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import pytest

from bench.gpu import __main__ as gpu
from bench.gpu import shapes
from bench.gpu.loops import Ours, Steps, Theirs
from bench.gpu.stub import no_attention
from kvd.worker import model, probe, seam
from kvd.worker.cache.composite import CacheSettings
from kvd.worker.cache.scheme import Scheme

pytestmark = pytest.mark.mlx


def test_it_runs_and_writes_what_it_measured(tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    gpu.main([
        "--shape", "tiny", "--rows", "2", "--tokens", "100", "--prefill", "300", "--runs", "1",
        "--chunk", "64", "--steps", "4", "--json", str(file),
    ])  # fmt: skip
    result = json.loads(file.read_text())

    assert [row["loop"] for row in result["decode"]] == ["kvd k8v8", "mlx-lm BatchGenerator"]
    for row in result["decode"]:
        assert math.isfinite(row["tok_s"])
        assert row["tok_s"] > 0
        assert row["kv_bytes"] > 0
    assert result["decode"][0]["host_without_attention_ms"] > 0
    assert [row["tokens"] for row in result["prefill"]] == [300, 300]
    assert len(gpu.verdicts(result)) == 2
    assert len(gpu.verdicts(result | {"device": "NVIDIA"})) == 3


def test_both_loops_prefill_and_decode_the_same_rows() -> None:
    seam.install()
    model = shapes.build("tiny", mx.float32)
    settings = CacheSettings(ladder=(Scheme(16, 16),))
    ours = Ours(probe.serve(model, settings, 512).runner, 512, chunk=64)
    theirs = Theirs(model, longest=32)
    prompts = [shapes.tokens("tiny", length, length) for length in (90, 90)]
    ours.fill(prompts)
    theirs.fill(prompts)
    first = ours.tokens
    steps = ours.decode(3)

    assert isinstance(steps, Steps)
    assert len(steps.wall) == len(theirs.decode(3).wall) == 3
    assert first == theirs.first_tokens
    ours.close()
    theirs.close()


def test_the_stub_takes_attention_away_and_puts_it_back() -> None:
    from mlx_lm.models import qwen3

    before = qwen3.scaled_dot_product_attention
    with no_attention():
        queries = mx.ones((1, 2, 1, 4))
        assert qwen3.scaled_dot_product_attention(queries, None, None, mask=None).shape == (
            1, 2, 1, 4,
        )  # fmt: skip
    assert qwen3.scaled_dot_product_attention is before


def test_a_folder_for_servers_never_says_what_its_tokenizer_does_not_know(tmp_path: Path) -> None:
    seam.install()
    gpu.main(["--shape", "tiny", "--folder", str(tmp_path / "m")])
    loaded = model.load(tmp_path / "m")

    assert loaded.vocab_size == shapes.SHAPES["tiny"]["vocab_size"]
    logits = loaded.model(mx.array([[3, 5, 400, 2]]))[0]
    assert mx.isfinite(logits).all()
    assert loaded.tokenizer.decode([3, 5]) != ""


def test_what_a_tokenizer_does_not_know_is_never_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seam.install()
    wide = shapes.SHAPES["tiny"] | {"vocab_size": 6000}
    monkeypatch.setitem(shapes.SHAPES, "wide", wide)
    shapes.write("wide", mx.float32, tmp_path / "m")
    loaded = model.load(tmp_path / "m")
    ids = mx.array([[7 * at % 4096 for at in range(64)]])

    assert loaded.model(ids).argmax(axis=-1).max().item() < 4096
