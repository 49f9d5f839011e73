"""What the kernels of one layer and step are given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

LevelPackings = Sequence[tuple[int, int, bool]]
"""For each level, bits, group, and whether groups run along the page's tokens."""


@dataclass(frozen=True, eq=False)
class Attention:
    """Newest tokens of rows attend to all that they see."""

    queries: mx.array
    """``[batch, q_heads, L, k_dim]``, of the newest tokens, all of them in the tails; rows first,
    then padding."""
    pages: mx.array
    """``[n, 3]`` int32: level, slot, position of the first token."""
    tail_keys: mx.array
    """``[tails, kv_heads, 128, k_dim]``."""
    tail_values: mx.array
    """``[tails, kv_heads, 128, v_dim]``."""
    rows: mx.array
    """``[rows, 8]`` int32: slot of the tail, tokens in it, position of its first token, first page,
    end page, the first position that the newest token sees beside the `keep` first ones (those
    before it see one more each), first split, end split."""
    splits: mx.array
    """``[n, 4]`` int32: row or -1, first page, end page, whether it is the tail."""
    pools: Sequence[mx.array]
    """The arrays of each level, packed as told."""
    key_packings: LevelPackings
    value_packings: LevelPackings
    schemes: tuple[LevelPackings, LevelPackings]
    """The same of keys and of values, of all levels that the layer has."""
    scale: float
    keep: int
    sinks: mx.array | None
    """``[q_heads]`` logits, or None."""


@dataclass(frozen=True, eq=False)
class Append:
    """Tails take a token of each row."""

    tail_keys: mx.array
    """``[tails, kv_heads, 128, k_dim]``."""
    tail_values: mx.array
    """``[tails, kv_heads, 128, v_dim]``."""
    keys: mx.array
    """``[rows or more, kv_heads, 1, k_dim]``."""
    values: mx.array
    """``[rows or more, kv_heads, 1, v_dim]``."""
    places: mx.array
    """``[tails]`` int32: where each takes a token, or -1; 128 more where what is behind the tail's
    first 64 tokens moves up before."""
    givers: mx.array | None
    """``[tails]``: from which row; None if the rows are the tails in their order."""


@dataclass(frozen=True)
class Rotation:
    """How a layer turns queries and keys by their positions."""

    dims: int
    """Channels that are turned, from the first on."""
    traditional: bool
    """Whether neighbours are pairs, and not halves."""
    normed: bool = False
    """Whether each head has an RMS norm before."""
    eps: float = 0.0


@dataclass(frozen=True, eq=False)
class Rotate:
    """Queries and keys are normed and turned; tails take keys and values of a token of each row."""

    rotation: Rotation
    qkv: mx.array
    """``[batch, ..., q_heads * k_dim + kv_heads * (k_dim + v_dim)]``: queries, keys and values as
    they leave their product."""
    q_heads: int
    offsets: mx.array
    """``[batch]`` int32: positions."""
    frequencies: mx.array
    """``[dims / 2]`` float32, radians a position."""
    weights: tuple[mx.array, mx.array] | None
    """Of the norms of queries and keys, ``[k_dim]``; None without."""
    tail_keys: mx.array
    """``[tails, kv_heads, 128, k_dim]``."""
    tail_values: mx.array
    """``[tails, kv_heads, 128, v_dim]``."""
    places: mx.array
    """``[tails]`` int32: where each takes a token, or -1."""
    givers: mx.array | None
    """``[tails]``: from which row; None if the rows are the tails in their order."""
