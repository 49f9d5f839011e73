"""Estimates from a model's files equal the costs that its worker reports, except the base bytes.

The base bytes include the interpreter's memory, which an estimate takes from a constant.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from kvd.daemon.estimate import Machine, estimate, folder_of, sharers
from protocol import memory_bounds
from protocol.costs import Costs
from protocol.errors import InvalidModel, UnknownModel
from protocol.kv import KVSpec
from protocol.memory_bounds import CUDA_PASS_TOKENS, WIDE_PASS_TOKENS
from protocol.pages import PAGE_TOKENS
from protocol.worker import Grant, LoadModel

MACHINE = Machine(
    on_cpu=True, native=False, prefill_chunk=256, max_rows=32, attention_scratch=256 * 2**20
)
QWEN = {
    "model_type": "qwen3",
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "hidden_size": 512,
    "head_dim": 64,
    "intermediate_size": 1024,
}


def folder(tmp_path: Path, config: dict[str, object]) -> Path:
    """Make a folder with this config, a tensor of 1000 half floats, and an empty one per layer."""
    tensors = {"w": {"dtype": "BF16", "shape": [10, 100], "data_offsets": [0, 2000]}}
    empty = {"dtype": "BF16", "shape": [0], "data_offsets": [2000, 2000]}
    header = json.dumps(tensors | {f"layer{number}": empty for number in range(4)}).encode()
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = len(header).to_bytes(8, "little") + header + bytes(2000)
    (tmp_path / "model.safetensors").write_bytes(data)
    return tmp_path


def test_bytes_of_weights_are_read_from_the_safetensors_headers(tmp_path):
    found = estimate(folder(tmp_path, QWEN), KVSpec(), MACHINE).costs
    packed = estimate(tmp_path, KVSpec(), replace(MACHINE, native=True)).costs
    on_card = estimate(tmp_path, KVSpec(), replace(MACHINE, on_cpu=False)).costs

    assert (found.weights_bytes, packed.weights_bytes, on_card.weights_bytes) == (4000, 2000, 2000)
    assert found.base_bytes > found.weights_bytes + MACHINE.attention_scratch


def test_ranks_divide_the_matrices_of_layers_and_repeat_the_rest(tmp_path):
    names = {
        "model.embed_tokens.weight": [100, 10],
        "lm_head.weight": [100, 10],
        "model.norm.weight": [10],
        "model.layers.0.mlp.up_proj.weight": [300, 10],
        "model.layers.0.input_layernorm.weight": [10],
        "layers.3.mlp.down_proj.weight": [10, 300],
    }
    at, header = 0, {}
    for name, shape in names.items():
        nbytes = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    data = len(text).to_bytes(8, "little") + text + bytes(at)
    (tmp_path / "model.safetensors").write_bytes(data)
    repeated = 2 * (1000 + 1000 + 10 + 10)
    card = replace(MACHINE, on_cpu=False)
    one, three = (estimate(tmp_path, KVSpec(), card, ranks).costs for ranks in (1, 3))

    assert one.weights_bytes == at
    assert three.weights_bytes == at + 2 * repeated
    assert without_base(three) == msgspec.structs.replace(
        without_base(one), weights_bytes=three.weights_bytes
    ), "pages and rows are divided, and cost the same in total"
    native = replace(MACHINE, native=True)
    on_cpu = estimate(tmp_path, KVSpec(), native, 2).costs
    vectors = 2 * 2 * (10 + 10)  # of both ranks, in float32
    assert on_cpu.weights_bytes == at + repeated + vectors, "the library keeps halves"
    plain = replace(native, sharers=1)
    alone = estimate(tmp_path, KVSpec(), plain).costs
    waiting = memory_bounds.waiting_bytes(4096, 1024, plain.pass_tokens(), 256)
    each = alone.base_bytes - alone.weights_bytes - waiting
    assert on_cpu.base_bytes - on_cpu.weights_bytes - waiting == 2 * each


@pytest.mark.parametrize(
    ("kv", "ranks", "tokens"),
    [
        (KVSpec(), 1, CUDA_PASS_TOKENS),
        (KVSpec(), 2, WIDE_PASS_TOKENS),
        (KVSpec(), 4, WIDE_PASS_TOKENS),
        (KVSpec(quantized_kv_start=512), 2, CUDA_PASS_TOKENS),
        (KVSpec(max_kv_size=512), 2, CUDA_PASS_TOKENS),
    ],
)
def test_long_passes_of_several_gpus_are_charged(tmp_path, kv, ranks, tokens):
    card = replace(MACHINE, on_cpu=False, cuda=True)
    costs = estimate(folder(tmp_path, QWEN), kv, card, ranks).costs
    assert costs.step == tokens + card.max_rows


def test_freed_buffers_are_charged_for_the_device(tmp_path):
    path = folder(tmp_path, QWEN)
    metal = replace(MACHINE, on_cpu=False, prefill_chunk=4096)
    bases = [
        estimate(path, KVSpec(), one).costs.base_bytes for one in (metal, replace(metal, cuda=True))
    ]
    assert bases[1] - bases[0] == (512 - 128) * 2**20


def test_kept_tails_are_charged(tmp_path):
    """They have one page of tokens after each chunk of a pass, not quantized."""
    path, card = folder(tmp_path, QWEN), replace(MACHINE, on_cpu=False, cuda=True)
    short, long = (
        estimate(path, KVSpec(), replace(card, prefill_chunk=chunk)).costs for chunk in (192, 1024)
    )
    token = 4 * 2 * 2 * 64 * 2  # layers, keys and values, heads, channels, bytes
    assert long.base_bytes - short.base_bytes == 4 * PAGE_TOKENS * (token + token // 4)


def test_activations_are_those_of_a_whole_pass(tmp_path):
    """256 tokens or one chunk, on CUDA 4096; rows that do not decode add theirs.

    No tails are kept of chunks as short as the first two.
    """
    path = folder(tmp_path, QWEN)
    card = replace(MACHINE, on_cpu=False, cuda=True)
    by_chunk = [
        [estimate(path, KVSpec(), replace(one, prefill_chunk=chunk)).costs for chunk in chunks]
        for one, chunks in ((MACHINE, (64, 128, 1024)), (card, (64, 192, 8192)))
    ]

    assert [[costs.step for costs in some] for some in by_chunk] == [
        [288, 288, 1056],
        [4128, 4128, 8224],
    ]
    for least, same, more in by_chunk:
        assert least.base_bytes == same.base_bytes < more.base_bytes


def test_layers_with_a_window_are_a_separate_attention_kind(tmp_path):
    types = ["sliding_attention", "full_attention"] * 2
    config = QWEN | {"sliding_window": 1024, "layer_types": types}
    kinds = estimate(folder(tmp_path, config), KVSpec(), MACHINE).costs.kinds
    patterned = QWEN | {"sliding_window": 512, "sliding_window_pattern": 4}
    third = estimate(folder(tmp_path, patterned), KVSpec(), MACHINE).costs.kinds

    assert [(one.window, one.layers) for one in kinds] == [(1024, 2), (None, 2)]
    assert [(one.window, one.layers) for one in third] == [(512, 3), (None, 1)]


def test_a_multimodal_config_has_its_language_model_one_level_down(tmp_path):
    flat = estimate(folder(tmp_path, QWEN), KVSpec(), MACHINE)
    nested = estimate(folder(tmp_path, {"text_config": QWEN}), KVSpec(), MACHINE)

    assert nested == flat


@pytest.mark.parametrize(
    "config",
    [
        {},
        QWEN | {"num_attention_heads": 0, "head_dim": None},
        QWEN | {"hidden_size": "x"},
        QWEN | {"hidden_size": float("inf")},
        QWEN | {"num_hidden_layers": "1000000000"},
        QWEN | {"num_key_value_heads": [1, 2]},
        QWEN | {"num_hidden_layers": -1},
        QWEN | {"sliding_window": 5, "layer_types": [{}]},
    ],
)
def test_a_missing_or_invalid_value_in_the_config_is_an_error_with_advice(tmp_path, config):
    config = {**config}
    config.pop("head_dim", None)
    with pytest.raises(InvalidModel, match="load the model first"):
        estimate(folder(tmp_path, config), KVSpec(), MACHINE)


def test_broken_folders_are_named(tmp_path):
    with pytest.raises(InvalidModel, match=r"config\.json is missing"):
        estimate(tmp_path, KVSpec(), MACHINE)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InvalidModel, match="not a JSON object"):
        estimate(tmp_path, KVSpec(), MACHINE)
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    with pytest.raises(InvalidModel, match="has no model"):
        estimate(tmp_path, KVSpec(), MACHINE)
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(InvalidModel, match="truncated or no safetensors"):
        estimate(tmp_path, KVSpec(), MACHINE)


def test_an_estimate_reads_no_endless_file_and_builds_no_endless_list(tmp_path):
    layers = folder(tmp_path, QWEN | {"num_hidden_layers": 10**9})
    with pytest.raises(InvalidModel, match="the weight files have only 5 tensors"):
        estimate(layers, KVSpec(), MACHINE)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").symlink_to("/dev/zero")
    with pytest.raises(InvalidModel, match="is a device"):
        estimate(tmp_path, KVSpec(), MACHINE)


def test_sources_are_resolved_to_folders(tmp_path, monkeypatch):
    snapshot = tmp_path / "hub/models--org--name/snapshots/abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "hub/models--org--name/refs").mkdir()
    (tmp_path / "hub/models--org--name/refs/main").write_text("abc\n")
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path))

    assert (folder_of("demo") / "config.json").exists()
    assert folder_of(str(tmp_path)) == tmp_path
    assert folder_of("org/name") == snapshot
    for source in ("org/other", "nothing", "/no/such/folder"):
        with pytest.raises(UnknownModel):
            folder_of(source)


def test_processes_that_map_mlx_are_counted(tmp_path):
    for pid, text in ((1, "a /lib/libc.so\n"), (2, "b /x/libmlx.so\n"), (3, "c /x/libmlx.so\n")):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "maps").write_text(text)

    assert sharers(tmp_path) == 2
    assert replace(MACHINE, sharers=1).interpreter < MACHINE.interpreter


@pytest.mark.mlx
@pytest.mark.parametrize(
    "kv",
    [
        KVSpec(),
        KVSpec(k_bits=8, v_bits=4, prefix_cache=0, floors={0: "k8v8", -1: "k8v4"}),
        KVSpec(quantized_kv_start=512),
        KVSpec(max_kv_size=1024),
    ],
    ids=["default", "floors", "dense start", "bounded rows"],
)
def test_an_estimate_equals_what_the_worker_reports(kv):
    pytest.importorskip("mlx.core")
    from kvd.worker.core.engine import MLXEngine

    def grant(total: int, _reason: str) -> Grant:
        return Grant(
            seq=1, total_bytes=total, granted=True, available_bytes=2**40, limit_bytes=2**40
        )

    info = MLXEngine().load(LoadModel(source="demo", kv=kv), lambda *_: None, grant)
    machine = replace(MACHINE, native=info.native == "on")
    found = estimate(folder_of("demo"), kv, machine)

    assert info.costs is not None
    assert without_base(found.costs) == without_base(info.costs)
    assert found.schemes == info.kv_schemes
    assert found.context_length == info.context_length


def without_base(costs: Costs) -> Costs:
    return msgspec.structs.replace(costs, base_bytes=0)
