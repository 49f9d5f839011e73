"""Hostile model folders through the engine's load: a model that answers, or a typed error."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from hypothesis.strategies import SearchStrategy

from protocol.costs import Estimate
from protocol.errors import InsufficientMemory, InvalidModel, UnsupportedModel
from protocol.kv import KVSpec
from tests.fuzz.child import InChild
from tests.fuzz.mutations import edited_bytes, edited_json, either
from tests.fuzz.target import Check

_NAMES = [
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "vocab_size", "rope_theta", "rope_scaling", "rope_parameters", "sliding_window", "layer_types",
    "quantization", "quantization_config", "text_config", "tie_word_embeddings", "eos_token_id",
    "model_type", "architectures", "max_position_embeddings", "chat_template", "tokenizer_class",
    "auto_map", "model_file", "bos_token", "added_tokens", "weight_map", "dtype", "shape",
    "data_offsets", "__metadata__", "llama", "qwen2", "gemma3_text", "mamba", "qwen3_moe",
]  # fmt: skip
_FILE = re.compile(r"[A-Za-z0-9_.-]{1,60}")


class Folders(InChild):
    """The input is an object: the JSON of a valid model's files, and of its weights' header.

    Values that are texts are written as they are. Input that is no object is the config itself.
    """

    name = "folders"
    examples = 20

    def inputs(self) -> SearchStrategy[bytes]:
        seeds = self.seeds()
        valid = [seed for seed in seeds if _object(seed) is not None]
        return either(edited_json(valid, _NAMES), edited_json(valid, _NAMES), edited_bytes(seeds))

    def serve(self, folder: Path) -> Check:
        from tests.worker import tiny_model

        model = tiny_model.save(folder / "valid")
        content = (model / "model.safetensors").read_bytes()
        data = content[8 + int.from_bytes(content[:8], "little") :]
        variant = folder / "variant"

        def check(given: bytes) -> None:
            shutil.rmtree(variant, ignore_errors=True)
            shutil.copytree(model, variant)
            _write(variant, given, data)
            _check(variant)

        return check


def _object(given: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(given)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _write(folder: Path, given: bytes, data: bytes) -> None:
    """Change the files of a valid model's folder."""
    changes = _object(given)
    if changes is None:
        (folder / "config.json").write_bytes(given)
        return
    for name, value in changes.items():
        if name == "header":
            header = given if isinstance(value, str) else json.dumps(value).encode()
            content = len(header).to_bytes(8, "little") + header + data
            (folder / "model.safetensors").write_bytes(content)
        elif _FILE.fullmatch(name) and not name.startswith("."):
            whole = isinstance(value, str)
            text = value.encode("utf-8", "surrogatepass") if whole else json.dumps(value).encode()
            (folder / name).write_bytes(text)


def _check(folder: Path) -> None:
    from kvd.worker.core.engine import MLXEngine
    from protocol.worker import Grant, LoadModel

    def grant(total: int, _reason: str) -> Grant:
        return Grant(seq=1, total_bytes=total, granted=True, budget_bytes=1 << 40)

    load = LoadModel(source=str(folder))
    try:
        answer: object = MLXEngine().load(load, lambda _stage, _part: None, grant)
    except (InvalidModel, UnsupportedModel, InsufficientMemory) as error:
        answer = error.info()
    msgspec.msgpack.encode(answer)
    _check_estimate(folder)


def _check_estimate(folder: Path) -> None:
    from kvd.daemon.estimate import Machine, estimate

    machine = Machine(
        on_cpu=True, native=False, prefill_chunk=256, max_rows=32, attention_scratch=1 << 28
    )
    for one in (machine, replace(machine, on_cpu=False)):
        try:
            found = estimate(folder, KVSpec(), one)
        except InvalidModel as error:
            msgspec.json.encode(error.info())
        else:
            assert msgspec.json.decode(msgspec.json.encode(found), type=Estimate) == found
