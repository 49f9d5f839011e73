"""Prompts of the chats, as token ids."""

from __future__ import annotations

import json
import random
from pathlib import Path

from kvd import demo

TURN_TOKENS = 160
"""Tokens that the second turn adds: the answer and the next question."""
_IDS = range(300, 4000)
"""Tokens that the embedded model's tokenizer has; models with random weights use it too."""


def tokens(count: int, *, seed: int) -> list[int]:
    """Return random tokens; other seeds give other beginnings."""
    return random.Random(seed).choices(_IDS, k=count)


def fp16_bytes_per_token(model: str) -> int:
    """Return the bytes of one token's keys and values in fp16, in all layers of a model folder."""
    folder = demo.path() if model == "demo" else Path(model)
    config = json.loads((folder / "config.json").read_text())
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    sides = 2 * config.get("num_key_value_heads", heads) * width
    return 2 * int(sides) * int(config["num_hidden_layers"])
