"""`bench/gpu` on a tiny model: a run, its verdicts, and the loops of kvd and mlx-lm."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mlx.core as mx
import pytest

from bench.gpu import __main__ as gpu
from bench.gpu import attentions, chunks, shapes
from bench.gpu.graph import computing, primitives
from bench.gpu.loops import Ours, Steps, Theirs
from bench.gpu.stub import no_attention
from kvd.worker.cache.scheme import Scheme
from kvd.worker.cache.settings import CacheSettings
from kvd.worker.serving import model_files, probe, seam
from tests.worker.attention.stand_in import StandIn

pytestmark = pytest.mark.mlx


def test_a_run_writes_its_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attentions, "find_kernels", StandIn().backend)
    file = tmp_path / "gpu.json"
    gpu.main([
        "--shape", "tiny", "--rows", "2", "--tokens", "100", "--prefill", "300", "--runs", "1",
        "--chunk", "64", "--steps", "4", "--kv", "k8v8", "--attention", "fused", "reference",
        "--json", str(file),
    ])  # fmt: skip
    result = json.loads(file.read_text())

    assert result["failed"] == []
    assert [(row["loop"], row.get("attention")) for row in result["decode"]] == [
        ("kvd k8v8", "fused"), ("kvd k8v8", "reference"), ("mlx-lm BatchGenerator", None),
    ]  # fmt: skip
    for row in result["decode"]:
        assert math.isfinite(row["tok_s"])
        assert row["tok_s"] > 0
        assert row["kv_bytes"] > 0
    for row in result["decode"][:2]:
        assert row["host_without_attention_ms"] > 0
        assert row["operations"] > 0
    assert [row["tokens"] for row in result["prefill"]] == [300, 300]
    assert [bar["limit"] for bar in result["bars"]] == [3.0, 1.15, 1.0]
    assert len(gpu.verdicts(result | {"device": "NVIDIA"})) == 5


def test_verdicts() -> None:
    ours = {"loop": "kvd k4v4", "attention": "fused", "tokens": 64, "tok_s": 900.0, "host_ms": 1.6}
    ours |= {"host_without_attention_ms": 1.0}
    theirs = {"loop": Theirs.name, "tokens": 64, "tok_s": 301.0}
    result = {"device": "NVIDIA", "layers": 14, "decode": [ours, theirs], "prefill": []}

    assert [str(bar) for bar in gpu.verdicts(result)] == [
        "host time per step outside attention, ms: 1.000, at most 4: pass",
        "host time of a step, fused attention, ms at 28 layers: 3.200, at most 3: MISS",
        "kvd k4v4 fused, 64 tokens: tok/s / BatchGenerator's: 2.990, at least 3: MISS",
    ]


def test_operations_of_a_graph() -> None:
    x = mx.ones((4, 4))
    fused = mx.compile(lambda a: mx.exp(a) * 2 + mx.sin(a))
    y = (fused(x) @ mx.ones((4, 4))).T
    counts = primitives([y])

    assert counts["Matmul"] == counts["Transpose"] == 1
    assert sum(name.startswith("Compiled") for name in counts) == 1
    assert computing(counts) == sum(counts.values()) - counts["Transpose"] - counts["Broadcast"]
    mx.eval(y)
    assert not primitives([y])


def test_both_loops_prefill_and_decode_the_same_rows() -> None:
    seam.install()
    model = shapes.build("tiny", mx.float32)
    settings = CacheSettings(schemes=(Scheme(16, 16),))
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


def test_the_stub_replaces_attention_and_restores_it() -> None:
    from mlx_lm.models import qwen3

    before = qwen3.scaled_dot_product_attention
    with no_attention():
        queries = mx.ones((1, 2, 1, 4))
        assert qwen3.scaled_dot_product_attention(queries, None, None, mask=None).shape == (
            1, 2, 1, 4,
        )  # fmt: skip
    assert qwen3.scaled_dot_product_attention is before


def test_a_model_folder_for_servers_can_be_loaded(tmp_path: Path) -> None:
    seam.install()
    gpu.main(["--shape", "tiny", "--folder", str(tmp_path / "m")])
    loaded = model_files.load(tmp_path / "m")

    assert loaded.vocab_size == shapes.SHAPES["tiny"]["vocab_size"]
    logits = loaded.model(mx.array([[3, 5, 400, 2]]))[0]
    assert mx.isfinite(logits).all()
    assert loaded.tokenizer.decode([3, 5]) != ""


def test_a_token_that_the_tokenizer_lacks_never_has_the_largest_logit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seam.install()
    wide = shapes.SHAPES["tiny"] | {"vocab_size": 6000}
    monkeypatch.setitem(shapes.SHAPES, "wide", wide)
    shapes.write("wide", mx.float32, tmp_path / "m")
    loaded = model_files.load(tmp_path / "m")
    ids = mx.array([[7 * at % 4096 for at in range(64)]])

    assert loaded.model(ids).argmax(axis=-1).max().item() < 4096


@pytest.mark.skipif(mx.cuda.is_available(), reason="measures there")
def test_chunks_are_measured_on_cuda_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert chunks.main([]) == 2
    assert "CUDA" in capsys.readouterr().err
