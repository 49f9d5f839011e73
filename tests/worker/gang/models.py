"""Model folders with random weights in real architectures, whose heads can be divided."""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from tests.worker.architectures.zoo import ZOO, build
from tests.worker.text.tokenizers_zoo import byte_level, wrap

VOCABULARY = 512
VOCABULARIES = {2: VOCABULARY, 3: 513}
"""Vocabulary by the number of ranks; qwen3_5 divides its head too."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
UNDIVIDED = {
    "deepseek_v41": "it has its own cache class, so it is refused over several ranks",
    "muse_spark": "its module needs Metal",
}
"""Architectures with a `shard` in mlx-lm that no gang serves here, and why."""
FAMILIES = (
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "exaone_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt_oss",
    "iquestloopcoder",
    "kimi_k25",
    "kimi_k3",
    "llama",
    "longcat_flash",
    "longcat_flash_ngram",
    "minimax",
    "minimax_m3_vl",
    "ministral3",
    "mistral4",
    "prism_hadamard_qwen35",
    "qwen2",
    "qwen3",
    "qwen3_5",
    "qwen3_5_moe",
    "qwen3_moe",
    "solar_open",
    "step3p5",
)
"""All other architectures with a `shard`."""
NOT_IN_THIRDS = ("prism_hadamard_qwen35",)
"""Architectures that three ranks cannot divide: widths must be multiples of 128."""
CHANGES: dict[str, dict[str, Any]] = {
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 128},
}
"""What differs from the zoo's configuration, by architecture."""
THIRDS: dict[str, dict[int, int]] = {
    "expert_ffn_hidden_size": {32: 48},
    "hidden_size": {64: 96, 128: 192},
    "index_n_heads": {2: 3, 4: 6},
    "linear_num_key_heads": {2: 3},
    "linear_num_value_heads": {4: 6},
    "moe_intermediate_size": {32: 48},
    "num_attention_groups": {2: 3},
    "num_attention_heads": {4: 6, 8: 6},
    "num_heads": {4: 6},
    "num_key_value_heads": {2: 3, 4: 6},
    "share_expert_dim": {32: 48},
    "shared_expert_intermediate_size": {32: 48},
    "shared_intermediate_size": {32: 48},
}
"""Values of a configuration in place of others, so that three ranks can divide it."""


def save(folder, name, *, ranks=2, **changes):
    """Write a model that 2 or 3 ranks can divide to ``folder``; return the folder."""
    vocabulary = VOCABULARIES[ranks]
    config = ZOO[name].config | CHANGES.get(name, {})
    if ranks == 3:
        config = in_thirds(config)
    if "text_config" in config:
        config["text_config"] = config["text_config"] | {"vocab_size": vocabulary}
    model, config = build(name, config=config | {"vocab_size": vocabulary} | changes)
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config |= {"eos_token_id": [2], "num_hidden_layers": len(model.layers)}
    (folder / "config.json").write_text(json.dumps(config))
    wrap(byte_level(), template=TEMPLATE)._tokenizer.save_pretrained(folder)
    return folder


def in_thirds(config: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the values of `THIRDS`, also in nested ones."""
    return {
        key: in_thirds(value)
        if isinstance(value, dict)
        else THIRDS[key].get(value, value)
        if key in THIRDS
        else value
        for key, value in config.items()
    }
