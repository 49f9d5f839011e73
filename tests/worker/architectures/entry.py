"""One model of the zoo: a tiny configuration of one model file, and its peculiarities.

Knows nothing of MLX; the tables of configurations build on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Every model uses the keys it knows: `ModelArgs.from_dict` drops the others.
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
    """A configuration and the few numbers in which its model differs from the others.

    ``reach``: how many tokens back a changed token must still affect the last logits. ``gains``:
    factors of weights whose path contains the key, after the usual scaling. ``seed``: picks other
    weights. ``chunked``: bound of the relative difference between a sequence read in chunks and
    single tokens and one read at once. ``unread``: indices of the arrays of its caches that are
    never read. ``why``: the reason for every value that is not the default.
    """

    config: dict[str, Any]
    reach: int = 64
    gains: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    chunked: float = 1e-4
    unread: tuple[int, ...] = ()
    why: str = ""


def plain(**changes: Any) -> dict[str, Any]:
    """The common keys with ``changes``."""
    return COMMON | changes
