"""The measuring process of `kvctl bench-kv`: its numbers, its memory, its options and errors."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import mlx.core as mx
import pytest

from kvd.worker.cache.scheme import Scheme
from kvd.worker.tools import bench_kv
from kvd.worker.tools.bench_kv import Shape, measure, shape_of
from protocol.errors import InvalidRequest, UnsupportedModel

pytestmark = pytest.mark.mlx

SHAPE = Shape(heads=4, kv_heads=2, head_dim=64, layers=3, dtype="float32")
SCHEMES = [Scheme(16, 16), Scheme(8, 8), Scheme(8, 4), Scheme(4, 4)]


def silent(_: str) -> None:
    pass


def test_bytes_errors_and_times_by_scheme() -> None:
    messages: list[str] = []
    result = measure(SHAPE, SCHEMES, [256, 1100], messages.append)
    rows = {(one["scheme"], one["tokens"]): one for one in result["results"]}

    assert len(rows) == 8
    assert len(messages) == 10
    for (scheme, _), one in rows.items():
        assert all(math.isfinite(one[name]) for name in ("k_error", "v_error", "output_error"))
        assert one["attend_ms"] > 0
        assert one["dense_attend_ms"] > 0
        if scheme != "k4v4":
            assert one["requantize_ms_per_1k"] > 0
    dense, k8v8, k8v4, k4v4 = (rows[scheme.name, 1100] for scheme in SCHEMES)
    assert dense["k_error"] == dense["v_error"] == 0
    assert dense["output_error"] < 1e-5
    assert 0.001 < k8v8["k_error"] == k8v4["k_error"] < 0.01
    assert 0.05 < k4v4["k_error"] < 0.15
    assert k8v8["output_error"] < k8v4["output_error"]
    assert k8v8["v_error"] < k8v4["v_error"] == k4v4["v_error"]
    # 2 heads x 64 x keys and values x 3 layers; 64 elements have a scale and a bias in float32.
    elements = 2 * 64 * 2 * 3
    assert dense["bytes_per_token"] == elements * 4
    assert k8v8["bytes_per_token"] == elements * (1 + 8 / 64)
    assert k4v4["bytes_per_token"] == elements * (1 / 2 + 8 / 64)
    assert k4v4["share_of_fp16"] == (1 / 2 + 8 / 64) / 2
    assert [one["requantize_to"] for one in (dense, k8v8, k8v4, k4v4)] == [
        "k8v8", "k8v4", "k4v4", None,
    ]  # fmt: skip


def test_a_scheme_is_stepped_down_only_to_one_that_takes_fewer_bytes() -> None:
    shape = Shape(heads=2, kv_heads=1, head_dim=64, layers=1, dtype="float32")
    schemes = [Scheme.parse(name) for name in ("k8v8", "k8v8g32", "k8v8", "k4v8g32")]
    rows = measure(shape, schemes, [192], silent)["results"]

    assert [one["requantize_to"] for one in rows] == [None, "k8v8", None, None]


def test_half_precision_has_half_the_scales() -> None:
    shape = Shape(heads=2, kv_heads=1, head_dim=64, layers=1, dtype="bfloat16")
    (one,) = measure(shape, [Scheme(8, 8)], [192], silent)["results"]

    assert one["share_of_fp16"] == (1 + 4 / 64) / 2


@pytest.mark.slow
def test_never_more_than_one_dense_layer_is_alive() -> None:
    shape = Shape(heads=4, kv_heads=4, head_dim=128, layers=40, dtype="float32")
    tokens = 16384
    layer = shape.geometry.dense_bytes(tokens)
    chunk = shape.geometry.dense_bytes(bench_kv.CHUNK)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    measure(shape, [Scheme(16, 16), Scheme(8, 8), Scheme(4, 4)], [tokens], silent)

    # The dense layer, the pages it is stepped down to, and a few temporary chunks.
    pages = tokens // 64 * shape.geometry.page_bytes(Scheme(8, 8))
    assert layer <= mx.get_peak_memory() - before < layer + pages + 4 * chunk < 2 * layer
    assert mx.get_active_memory() - before < chunk


@pytest.mark.parametrize(
    ("config", "given", "want"),
    [
        (
            {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
             "num_hidden_layers": 28, "torch_dtype": "bfloat16", "hidden_size": 1024},
            {"dtype": "bfloat16"}, Shape(16, 8, 128, 28, "bfloat16"),
        ),
        (
            {"text_config": {"num_attention_heads": 8, "hidden_size": 640,
                             "num_hidden_layers": 2}},
            {"dtype": "float16", "layers": 3}, Shape(8, 8, 80, 3, "float16"),
        ),
        (
            {}, {"heads": 4, "kv_heads": 2, "head_dim": 96, "layers": 1, "dtype": "float32"},
            Shape(4, 2, 96, 1, "float32"),
        ),
    ],
)  # fmt: skip
def test_the_shape_is_read_from_the_configuration(config, given, want) -> None:
    assert shape_of(config, **given) == want


def test_missing_configuration_is_requested_as_options() -> None:
    with pytest.raises(UnsupportedModel, match="--head-dim, --layers"):
        shape_of({"num_attention_heads": 4})
    with pytest.raises(UnsupportedModel, match="latents"):
        shape_of({"kv_lora_rank": 512, "num_attention_heads": 4, "num_hidden_layers": 2})
    with pytest.raises(InvalidRequest, match="must be a multiple"):
        Shape(3, 2, 64, 1, "float32")
    with pytest.raises(InvalidRequest, match="dtype"):
        Shape(2, 2, 64, 1, "int8")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"num_attention_heads": [8, 8]}, "num_attention_heads"),
        ({"hidden_size": "512"}, "hidden_size"),
        ({"num_hidden_layers": 2.5}, "num_hidden_layers"),
        ({"num_key_value_heads": {"full": 2}}, "num_key_value_heads"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"head_dim": True}, "head_dim"),
        ({"text_config": [1]}, "text_config"),
    ],
)
def test_an_invalid_configuration_is_refused_with_its_field(change, field) -> None:
    config = {"num_attention_heads": 8, "hidden_size": 512, "num_hidden_layers": 2} | change
    with pytest.raises(UnsupportedModel, match=f"^{field} in config.json is ") as caught:
        shape_of(config)
    assert caught.value.detail == {"field": field}


def test_given_values_override_invalid_ones() -> None:
    config = {"num_attention_heads": [8, 4], "hidden_size": 512, "num_hidden_layers": 2}
    config["torch_dtype"] = ["float32"]
    shape = shape_of(config, heads=8, kv_heads=2, dtype="float32")
    assert shape == Shape(8, 2, 64, 2, "float32")
    assert shape_of(config, heads=8).dtype == "float32"
    with pytest.raises(InvalidRequest, match="heads must be at least 1"):
        shape_of(config, heads=0, kv_heads=2, head_dim=64)


def test_only_the_configuration_of_a_hub_model_is_downloaded(monkeypatch, tmp_path) -> None:
    import huggingface_hub

    (tmp_path / "config.json").write_text('{"num_attention_heads": 8}')
    patterns: list[list[str]] = []

    def download(_source: str, *, allow_patterns: list[str]) -> str:
        patterns.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert bench_kv.read_config("some/model") == {"num_attention_heads": 8}
    assert patterns == [["config.json"]]


@pytest.mark.parametrize(
    ("text", "says"),
    [("4k", "give tokens"), ("", "not a context"), ("-512", "not a context"), ("64", "below 128"),
     ("\u0661", "not a context")],
)  # fmt: skip
def test_a_wrong_length_is_refused_by_name(text, says) -> None:
    with pytest.raises(InvalidRequest, match=f"^lengths: .*{says}") as caught:
        bench_kv._tokens(text)
    assert caught.value.detail == {"field": "lengths"}


def run(*arguments: str, tool: str = "bench_kv") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvd.worker.tools", tool, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_unknown_tool_is_refused() -> None:
    done = run("demo", tool="fidelity")
    assert done.returncode == 1
    assert "usage: python -m kvd.worker.tools bench_kv|calibrate" in done.stderr


def test_the_process_prints_one_json_and_its_progress() -> None:
    done = run("demo", "--schemes", "k8v8,k4v4", "--lengths", "192")

    assert done.returncode == 0
    assert [one["scheme"] for one in json.loads(done.stdout)["results"]] == ["k8v8", "k4v4"]
    assert done.stderr.splitlines()[-1] == "3/3 k4v4, 192 tokens"


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["nosuch", "--schemes", "k8v8", "--lengths", "192"], "unknown_model"),
        (["demo", "--schemes", "k9v8", "--lengths", "192"], "invalid_request"),
        (["demo", "--schemes", "k8v8", "--lengths", "64"], "invalid_request"),
        (["--heads", "2", "--schemes", "k8v8", "--lengths", "192"], "unsupported_model"),
    ],
)
def test_errors_are_json_too(arguments: list[str], code: str) -> None:
    done = run(*arguments)

    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["code"] == code
