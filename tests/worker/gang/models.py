"""Model folders with random weights in real architectures, whose heads can be divided."""

from __future__ import annotations

import json

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.worker.architectures.zoo import ZOO, build
from tests.worker.text.tokenizers_zoo import byte_level, wrap

VOCABULARY = 512

CHANGES = {
    "llama": {},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128},
    "qwen3": {},
    "qwen3_moe": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    # Its head is divided too.
    "qwen3_5": {"text_config": ZOO["qwen3_5"].config["text_config"] | {"vocab_size": VOCABULARY}},
}
"""What differs from the zoo's configuration, by architecture."""


def save(folder, name, **changes):
    """Write a model of this architecture to ``folder``; return the folder."""
    config = ZOO[name].config | {"vocab_size": VOCABULARY} | CHANGES.get(name, {}) | changes
    model, config = build(name, config=config)
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config |= {"eos_token_id": [2], "num_hidden_layers": len(model.layers)}
    (folder / "config.json").write_text(json.dumps(config))
    wrap(byte_level())._tokenizer.save_pretrained(folder)
    return folder
