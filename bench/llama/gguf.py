"""Writes a Qwen3 model folder as a GGUF file in half precision, without an end of text.

Completions of the file have exactly the requested number of tokens, as those of `kvd.bench.twin`.
llama.cpp recognizes tokens that end a text by their ids and by their names. The file therefore
gives the special tokens other names and makes them common tokens, so that each of them also has a
text. The token of the byte 0xFF, which UTF-8 never contains, is the end of text.

The keys and names are those of the format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx

_ARCHITECTURE = "qwen3"
_F16_FILE = 1
"""The format's number for files whose matrices are in half precision."""
_COMMON_TOKEN = 1
_NEVER_GENERATED = "\u00ff"
"""How byte-level vocabularies write the byte 0xFF."""

_INTEGERS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
}
_FLOATS = {
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
_TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write(model: Path, file: Path) -> None:
    """Write the model in a folder to ``file``, whose name ends with ``.gguf``.

    Raises ValueError for a model that is no Qwen3, or has no byte-level vocabulary.
    """
    config = json.loads((model / "config.json").read_text())
    if config.get("model_type") != _ARCHITECTURE:
        raise ValueError(
            f"--llama converts models of the type {_ARCHITECTURE}, and {model} is of the type"
            f" {config.get('model_type')!r}"
        )
    metadata = described(config) | vocabulary(
        json.loads((model / "tokenizer.json").read_text()), config["vocab_size"]
    )
    weights: dict[str, mx.array] = {}
    for part in sorted(model.glob("*.safetensors")):
        weights |= mx.load(str(part), stream=mx.cpu)  # type: ignore[arg-type]
    mx.save_gguf(str(file), converted(weights), metadata)


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that describe the architecture."""
    integers = {key: mx.array(config[name], mx.uint32) for key, name in _INTEGERS.items()}
    floats = {key: mx.array(config[name], mx.float32) for key, name in _FLOATS.items()}
    return {
        "general.architecture": _ARCHITECTURE,
        "general.file_type": mx.array(_F16_FILE, mx.uint32),
        **{f"{_ARCHITECTURE}.{key}": value for key, value in (integers | floats).items()},
    }


def vocabulary(tokenizer: Mapping[str, Any], size: int) -> dict[str, Any]:
    """Return the keys of the vocabulary, from the content of ``tokenizer.json``."""
    model = tokenizer["model"]
    ids: Mapping[str, int] = model["vocab"]
    if _NEVER_GENERATED not in ids:
        raise ValueError("--llama needs a model with a byte-level vocabulary, such as Qwen's")
    names = [f"[unused_{number}]" for number in range(size)]
    for name, number in ids.items():
        names[number] = name
    for token in tokenizer["added_tokens"]:
        special = f"[special_{token['id']}]"
        names[token["id"]] = special if token["special"] else token["content"]
    end = mx.array(ids[_NEVER_GENERATED], mx.uint32)
    return {
        "tokenizer.ggml.model": "gpt2",  # the format's word for byte-level pairs
        "tokenizer.ggml.pre": "qwen2",  # the expression that splits words
        "tokenizer.ggml.tokens": names,
        "tokenizer.ggml.token_type": mx.full((size,), _COMMON_TOKEN, mx.int32),
        "tokenizer.ggml.merges": list(_merges(model["merges"])),
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": mx.array(False),
    }


def _merges(merges: Iterable[Any]) -> Iterable[str]:
    return (one if isinstance(one, str) else " ".join(one) for one in merges)


def converted(weights: Mapping[str, mx.array]) -> dict[str, mx.array]:
    """Return the weights by the format's names: matrices in half precision, vectors in single."""
    return {
        tensor_name(name): array.astype(mx.float16 if array.ndim > 1 else mx.float32, stream=mx.cpu)
        for name, array in weights.items()
    }


def tensor_name(name: str) -> str:
    """Return the format's name of a weight: ``blk.3.attn_q.weight``."""
    stem, _, kind = name.rpartition(".")
    place = ""
    if stem.startswith("model.layers."):
        _, _, layer, stem = stem.split(".", 3)
        place = f"blk.{layer}."
    if stem not in _TENSORS:
        raise ValueError(f"--llama cannot convert the model: it has a weight {name}")
    return f"{place}{_TENSORS[stem]}.{kind}"
