"""Write a checkpoint of train.py as the float16 model folder that mlx-lm and transformers load.

    python -m demo_training.export --checkpoint run --out kvd/demo

Larger models have a few key channels that are much larger than the rest. They are the reason why
4-bit keys per token are inaccurate. A model as small as this one has no such channels, so the
export creates them: it multiplies the key scales of the slowest RoPE pair by OUTLIER and divides
the query scales by it. OUTLIER is a power of two, so nothing is rounded, and the products of
queries and keys stay the same.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from demo_training.model import Config

END_OF_TEXT, END_OF_TURN = 0, 2  # ids of <|endoftext|> and <|im_end|>
OUTLIER = 16


def raise_key_channels(tensors: dict[str, torch.Tensor], config: Config) -> None:
    """Give the keys one pair of outlier channels; the two halves of a RoPE pair must agree."""
    pair = [config.head_dim // 2 - 1, config.head_dim - 1]
    for layer in range(config.layers):
        name = f"model.layers.{layer}.self_attn."
        tensors[name + "k_norm.weight"][pair] *= OUTLIER
        tensors[name + "q_norm.weight"][pair] /= OUTLIER


def lower_key_channels(tensors: dict[str, torch.Tensor], config: Config) -> None:
    """Undo `raise_key_channels`, to train an exported model."""
    pair = [config.head_dim // 2 - 1, config.head_dim - 1]
    for layer in range(config.layers):
        name = f"model.layers.{layer}.self_attn."
        tensors[name + "k_norm.weight"][pair] /= OUTLIER
        tensors[name + "q_norm.weight"][pair] *= OUTLIER


def main() -> None:
    """Write model.safetensors, config.json and generation_config.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    config = Config(**json.loads((args.checkpoint / "config.json").read_text()))
    tensors = load_file(args.checkpoint / "checkpoint.safetensors")
    raise_key_channels(tensors, config)
    half = {name: tensor.to(torch.float16) for name, tensor in tensors.items()}
    for name, tensor in half.items():
        assert torch.isfinite(tensor).all(), name
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(half, args.out / "model.safetensors", metadata={"format": "pt"})
    stops = [END_OF_TURN, END_OF_TEXT]
    described = config.as_qwen3() | {"dtype": "float16", "eos_token_id": stops}
    (args.out / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    generation = {"eos_token_id": stops, "pad_token_id": END_OF_TEXT}
    (args.out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


if __name__ == "__main__":
    main()
