"""Models with random weights in the shapes of published models."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from kvd import demo
from kvd.worker.serving import seam

_QWEN3 = {
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 65536,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_key_value_heads": 8,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "tie_word_embeddings": False,
    },
    "qwen3-32b": _QWEN3
    | {
        "hidden_size": 5120,
        "intermediate_size": 25600,
        "num_hidden_layers": 64,
        "num_attention_heads": 64,
        "tie_word_embeddings": False,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 32768,
        "vocab_size": 151936,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "demo": _QWEN3
    | {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
    },
    "wide": _QWEN3
    | {
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 4096,
        "max_position_embeddings": 16384,
        "tie_word_embeddings": True,
    },
    "tiny": _QWEN3
    | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 4096,
        "tie_word_embeddings": True,
    },
}
"""Contents of config.json by name. ``qwen*-*`` are from huggingface.co/Qwen, ``demo`` has the shape
of the embedded model, and ``wide`` has eight times the demo's keys and values in each layer."""


def build(shape: str, dtype: mx.Dtype, layers: int | None = None) -> Any:
    """Return the model with random weights, evaluated; ``layers``: not the shape's number."""
    seam.install()  # before a model's module is imported
    module = importlib.import_module(f"mlx_lm.models.{SHAPES[shape]['model_type']}")

    mx.random.seed(0)
    model = module.Model(module.ModelArgs.from_dict(_config(shape, layers)))
    model.set_dtype(dtype)
    for layer in model.layers:  # one by one, because weights are drawn in float32, twice the size
        mx.eval(layer.parameters())
    mx.eval(model.parameters())
    mx.clear_cache()
    return model


def tokens(shape: str, count: int, seed: int) -> list[int]:
    """Return random tokens of a shape's vocabulary."""
    drawn = mx.random.randint(0, SHAPES[shape]["vocab_size"], (count,), key=mx.random.key(seed))
    found: list[int] = drawn.tolist()  # type: ignore[assignment]
    return found


def _config(shape: str, layers: int | None) -> dict[str, Any]:
    return SHAPES[shape] | ({} if layers is None else {"num_hidden_layers": layers})


def write(shape: str, dtype: mx.Dtype, folder: Path, layers: int | None = None) -> None:
    """Write the model for servers into a new folder, with the embedded model's tokenizer.

    The embeddings of tokens that the tokenizer does not have are zeros.
    """
    folder.mkdir(parents=True)
    model = build(shape, dtype, layers)
    weights = dict(tree_flatten(model.parameters()))
    known = json.loads((demo.path() / "config.json").read_text())["vocab_size"]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in weights:
            rows = mx.arange(weights[name].shape[0])[:, None]
            weights[name] = mx.where(rows < known, weights[name], 0).astype(dtype)
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    architecture = f"{SHAPES[shape]['model_type'].capitalize()}ForCausalLM"
    config = {**_config(shape, layers), "architectures": [architecture], "eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.path() / name, folder / name)
