"""Arguments of the kernels of one layer and step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvd.worker.cache.backend import LevelPackings

_BLOCKS = 128
"""Blocks that occupy a large GPU: an H200 has 132 multiprocessors."""
SPLIT_KEYS = 2048
"""Fewest keys of a chunk's split. An estimate: combining takes one more launch per layer."""


@dataclass(frozen=True, eq=False)
class Attention:
    """Arguments of decode attention."""

    queries: mx.array
    """``[batch, q_heads, L, k_dim]`` of each row's ``L`` newest tokens, which are all in its tail.
    The batch consists of the rows, then padding."""
    pages: mx.array
    """``[n, 3]`` int32: level, slot, position of the first token."""
    tail_keys: mx.array
    """``[tails, kv_heads, 128, k_dim]``."""
    tail_values: mx.array
    """``[tails, kv_heads, 128, v_dim]``."""
    rows: mx.array
    """``[rows, 8]`` int32. The tail: its slot, its length, and the position of its first token.
    Indices into ``pages``: of the row's first page, and after its last. The first position that the
    newest query sees, apart from the first ``keep`` tokens; for each earlier query it is one lower.
    Indices into ``splits``: of the row's first split, and after its last."""
    splits: mx.array
    """``[n, 4]`` int32: row (-1: padding), indices of the first page and after the last, and 1 if
    the split is the row's tail."""
    pools: Sequence[mx.array]
    """The pool arrays of the levels that occur in ``pages``, packed as ``key_packings`` and
    ``value_packings`` describe."""
    key_packings: LevelPackings
    value_packings: LevelPackings
    schemes: tuple[LevelPackings, LevelPackings]
    """Packings of keys and of values on all levels that the layer has."""
    scale: float
    keep: int
    sinks: mx.array | None


@dataclass(frozen=True, eq=False)
class Append:
    """Arguments of appending one token of each row to its tail. Tails are as in `Attention`."""

    tail_keys: mx.array
    tail_values: mx.array
    keys: mx.array
    """``[rows or more, kv_heads, 1, k_dim]``."""
    values: mx.array
    """``[rows or more, kv_heads, 1, v_dim]``."""
    token_places: mx.array
    """``[tails]`` int32: index at which each tail takes its new token, or -1. If the tail's first
    64 tokens become a page in this step, 128 is added: the tokens after them move to the front
    first."""
    token_rows: mx.array | None
    """``[tails]``: index of the batch row whose token each tail takes; None if the rows are exactly
    the tails, in order."""


@dataclass(frozen=True)
class Rotation:
    """RoPE and norms of a layer's queries and keys."""

    dims: int
    """Number of channels that are rotated, from the first on."""
    traditional: bool
    """Whether adjacent channels form pairs, instead of one channel from each half."""
    normed: bool = False
    eps: float = 0.0


@dataclass(frozen=True, eq=False)
class Rotate:
    """Arguments of the kernel that applies norms and RoPE, and appends one token of each row."""

    rotation: Rotation
    qkv: mx.array
    """``[batch, ..., q_heads * k_dim + kv_heads * (k_dim + v_dim)]``: queries, keys and values side
    by side, as the layer's joined projection returns them."""
    q_heads: int
    offsets: mx.array
    """``[batch]`` int32: positions of the new tokens."""
    frequencies: mx.array
    """``[dims / 2]`` float32, radians per position."""
    weights: tuple[mx.array, mx.array] | None
    """Norm weights of queries and keys, ``[k_dim]`` each; None without norms."""
    tail_keys: mx.array
    tail_values: mx.array
    token_places: mx.array
    token_rows: mx.array | None
    """Tails are as in `Attention`, ``token_places`` and ``token_rows`` as in `Append`."""


# Arguments of the kernels of a prefill pass. Places are as in `kernels.pack`.


@dataclass(frozen=True, eq=False)
class Spread:
    """Arguments of `spread`: apply norms and RoPE; separate queries, keys and values."""

    rotation: Rotation
    qkv: mx.array
    """``[batch, q_heads * k_dim + kv_heads * (k_dim + v_dim)]``, as in `Rotate`."""
    q_heads: int
    kv_heads: int
    dims: tuple[int, int]
    """``k_dim`` and ``v_dim``."""
    offsets: mx.array
    """``[batch]`` int32: positions of the tokens."""
    frequencies: mx.array
    weights: tuple[mx.array, mx.array] | None
    """As in `Rotate`."""


@dataclass(frozen=True, eq=False)
class PassTokens:
    """Keys and values that a pass reads: its own, and the tails of all rows."""

    keys: mx.array
    """``[batch, kv_heads, k_dim]``."""
    values: mx.array
    tail_keys: mx.array
    """As in `Attention`."""
    tail_values: mx.array


@dataclass(frozen=True, eq=False)
class Pack:
    """Arguments of quantizing pages and copying tokens of new tails."""

    tokens: PassTokens
    paged: mx.array | None
    """``[pages * 64]`` int32: the places of the pages' tokens; None: no pages."""
    packings: tuple[LevelPackings, LevelPackings]
    """How the pages' level packs keys and values."""
    kept: mx.array
    """``[tokens]`` int32: the places of the tokens of new tails, tail by tail."""


@dataclass(frozen=True, eq=False)
class Unpack:
    """Arguments of the kernel that writes dense keys and values into existing arrays."""

    tokens: PassTokens
    dense_keys: mx.array
    """``[copies, kv_heads, k_dim]``, which the kernel writes."""
    dense_values: mx.array
    after: mx.array
    """An array that depends on the kernel that last read the copies: its result, or keys of the
    next layer. Any array before the first use."""
    paged: mx.array | None
    """``[pages, 3]`` int32: index of the level, slot, and the index of the page's first token in
    the copies; None: no pages."""
    pools: Sequence[mx.array]
    key_packings: LevelPackings
    value_packings: LevelPackings
    """``pools`` and packings are as in `Attention`."""
    copied: mx.array
    """``[tokens, 2]`` int32: place, and index in the copies."""


@dataclass(frozen=True, eq=False)
class Attend:
    """Arguments of attending chunks of a pass."""

    queries: mx.array
    """``[batch, q_heads, k_dim]``."""
    keys: mx.array
    """``[batch, kv_heads, k_dim]``: of the pass."""
    values: mx.array
    dense_keys: mx.array
    """``[copies, kv_heads, k_dim]``: copies of pages, with those that earlier chunks of the pass
    fill, and of tails. Any keys if no tile has a run."""
    dense_values: mx.array
    ready: mx.array
    """The result of the kernel that wrote the copies; any array of int32 if there are none."""
    tiles: mx.array
    """``[tiles, 11]`` int32. For each tile:

    0 to 2: index of its first token in the batch, index of that token in the result, and number of
    its tokens. 3, 4: number of the batch's keys that the first token sees, with its own, and index
    of the first of these keys. Token ``i`` of the tile sees ``i`` more; a negative number is none.
    5, 6: first index and number of keys in the copies, of pages. 7, 8: the same, of a tail.
    9: index of its first token's entry in the results of splits; -1: none, the tile writes the
    result. 10: distance to the next token's entry."""
    splits: TileSplits | None
    """None: each tile reads all keys of its tokens."""
    tokens: int
    """Number of tokens of the result."""
    scale: float
    warpgroups: bool
    """As `Tiling.warpgroups`, for which the tiles were made."""


@dataclass(frozen=True, eq=False)
class TileSplits:
    """Where tiles that read some keys of their tokens write what they found."""

    entries: int
    """Number of entries: one for each token and each of its splits."""
    rows: mx.array
    """``[tokens, 8]`` int32, of which `decode.combine_source` reads the last two: indices of the
    token's first entry, and after its last."""


@dataclass(frozen=True)
class Heads:
    """A layer's heads, and what they are scaled by."""

    dtype: mx.Dtype
    q_heads: int
    kv_heads: int
    k_dim: int
    v_dim: int
    scale: float


@dataclass(frozen=True)
class Tiling:
    """How `attend` divides chunks."""

    tokens: int
    """Most tokens of a tile."""
    warpgroups: bool
    """Whether four warps multiply together (`kernels.group_products`)."""
    kv_heads: int
    split_keys: int = SPLIT_KEYS
    """Fewest keys of a split."""

    def splits(self, tokens: int, keys: int) -> int:
        """Return the number of splits of a chunk with ``keys`` tokens in pages before it.

        Each tile and KV head is a block. A short chunk after many keys has too few of them for a
        large GPU. The number does not depend on other rows of the pass, so that a row's numbers do
        not either, unless `PassLayout.of` leaves out all splits because memory is short.
        """
        blocks = -(-tokens // self.tokens) * self.kv_heads
        return max(1, min(_BLOCKS // blocks, keys // self.split_keys))


@dataclass(frozen=True, eq=False)
class PutTails:
    """Arguments of writing new tails."""

    tail_keys: mx.array
    tail_values: mx.array
    """As in `Attention`."""
    kept_keys: mx.array
    """``[tokens, kv_heads, dim]``."""
    kept_values: mx.array
    starts: mx.array
    """``[tails, 2]`` int32: index of each tail's first new token, and how many it gets."""
