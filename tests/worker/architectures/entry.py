"""`Entry`: a tiny configuration of one of mlx-lm's model files, and how its tests differ.

The tables of configurations (`plain.py`, `experts.py`, ...) build on it. Does not import MLX.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Every model uses the keys that it knows: `ModelArgs.from_dict` drops the others.
COMMON: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True)
class Entry:
    """A model's configuration, and the numbers in which its tests differ from those of others.

    ``reach``: how many tokens back a changed token must still affect the last logits. ``gains``:
    factors for weights whose path contains the key, applied after the usual scaling. ``seed``:
    selects different random weights. ``chunked``: largest relative difference between the logits of
    a sequence read in chunks and single tokens, and of the same sequence read at once. ``unread``:
    indices of the cache arrays that the model never reads. ``why``: the reason for every value that
    is not the default.
    """

    config: dict[str, Any]
    reach: int = 64
    gains: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    chunked: float = 1e-4
    unread: tuple[int, ...] = ()
    why: str = ""


def plain(**changes: Any) -> dict[str, Any]:
    """Return `COMMON` with ``changes``."""
    return COMMON | changes
