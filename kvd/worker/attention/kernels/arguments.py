"""Arguments of the kernels of one layer and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvd.worker.cache.backend import LevelPackings


@dataclass(frozen=True, eq=False)
class Attention:
    """Arguments of decode attention."""

    queries: mx.array
    """``[batch, q_heads, L, k_dim]`` of the newest tokens, which are all in the tails; rows first,
    then padding."""
    pages: mx.array
    """``[n, 3]`` int32: level, slot, position of the first token."""
    tail_keys: mx.array
    """``[tails, kv_heads, 128, k_dim]``."""
    tail_values: mx.array
    """``[tails, kv_heads, 128, v_dim]``."""
    rows: mx.array
    """``[rows, 8]`` int32: tail slot, tokens in the tail, position of its first token, first page,
    end page, first visible position of the newest token besides the first `keep` ones (each earlier
    query sees one more), first split, end split."""
    splits: mx.array
    """``[n, 4]`` int32: row or -1, first page, end page, whether it is the tail."""
    pools: Sequence[mx.array]
    """The arrays of each level, packed as ``key_packings`` and ``value_packings`` describe."""
    key_packings: LevelPackings
    value_packings: LevelPackings
    schemes: tuple[LevelPackings, LevelPackings]
    """Packings of keys and of values on all levels that the layer has."""
    scale: float
    keep: int
    sinks: mx.array | None


@dataclass(frozen=True, eq=False)
class Append:
    """Arguments of appending one token of each row to its tail (shapes: `Attention`)."""

    tail_keys: mx.array
    tail_values: mx.array
    keys: mx.array
    """``[rows or more, kv_heads, 1, k_dim]``."""
    values: mx.array
    """``[rows or more, kv_heads, 1, v_dim]``."""
    token_places: mx.array
    """``[tails]`` int32: the place of each tail's new token, or -1. 128 is added if the tokens
    after the tail's first 64 move to the front before."""
    token_rows: mx.array | None
    """``[tails]``: the row that each tail's token comes from; None if rows are the tails in their
    order."""


@dataclass(frozen=True)
class Rotation:
    """RoPE and norms of a layer's queries and keys."""

    dims: int
    """Rotated channels, from the first."""
    traditional: bool
    """Whether pairs are neighbours, instead of one channel from each half."""
    normed: bool = False
    eps: float = 0.0


@dataclass(frozen=True, eq=False)
class Rotate:
    """Arguments of norm and RoPE of queries and keys, and of appending a token of each row."""

    rotation: Rotation
    qkv: mx.array
    """``[batch, ..., q_heads * k_dim + kv_heads * (k_dim + v_dim)]``: queries, keys and values as
    the layer's first product returns them."""
    q_heads: int
    offsets: mx.array
    """``[batch]`` int32: positions."""
    frequencies: mx.array
    """``[dims / 2]`` float32, radians per position."""
    weights: tuple[mx.array, mx.array] | None
    """Norm weights of queries and keys, ``[k_dim]`` each; None without norms."""
    tail_keys: mx.array
    tail_values: mx.array
    token_places: mx.array
    """Tails as in `Attention`, places as in `Append`."""
    token_rows: mx.array | None
