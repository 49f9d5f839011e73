"""A tiny random Qwen3 with a real tokenizer, saved as a model folder."""

from __future__ import annotations

import json

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten

from kvd.worker.serving import seam
from tests.worker.architectures import zoo
from tests.worker.text.tokenizers_zoo import byte_level, wrap

CONFIG = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "eos_token_id": [2, 7],
}


def save(folder, *, dtype=mx.bfloat16, shards=1, quantized=False):
    """Write the model to ``folder``; return the folder."""
    seam.install()  # must precede the first import of a model module in the process
    from mlx_lm.models import qwen3

    folder.mkdir(parents=True, exist_ok=True)
    config = dict(CONFIG)
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(dtype)
    if quantized:
        config["quantization"] = {"group_size": 64, "bits": 4}
        nn.quantize(model, group_size=64, bits=4)
    weights = tree_flatten(model.parameters())
    size = -(-len(weights) // shards)
    names = {}
    for shard in range(shards):
        name = "model" if shards == 1 else f"model-{shard + 1:05d}-of-{shards:05d}"
        part = dict(weights[shard * size : (shard + 1) * size])
        mx.save_safetensors(str(folder / f"{name}.safetensors"), part, metadata={"format": "mlx"})
        names |= dict.fromkeys(part, f"{name}.safetensors")
    if shards > 1:
        index = {"metadata": {}, "weight_map": names}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return save_files(folder, config)


def save_zoo(folder, name, **changes):
    """Write a model of the architectures' zoo, with a changed configuration; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    changes |= {"vocab_size": CONFIG["vocab_size"], "eos_token_id": CONFIG["eos_token_id"]}
    model, config = zoo.build(name, config=zoo.ZOO[name].config | changes)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    # transformers warns of some keys even if they have no value
    return save_files(folder, {key: value for key, value in config.items() if value is not None})


def save_files(folder, config):
    """Write what a folder has besides weights; return it."""
    (folder / "config.json").write_text(json.dumps(config))
    wrap(byte_level())._tokenizer.save_pretrained(folder)
    return folder
