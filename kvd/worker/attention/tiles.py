"""Cuts prefill attention into parts that fit the scratch. Integers only, no tensors.

The first of these ways that fits is taken:

1. One call of the dense kernel for everything.
2. If the dense kernel works without a matrix of scores: some KV heads per call, with all keys.
   Heads are independent of each other.
3. Otherwise tiles: one KV head and some keys. If a tile of few keys is still too large with all
   queries, it also takes only some of the queries.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.worker.cache.scheme import PAGE_TOKENS

MOST_SCORES = 1 << 32
"""Most query-key pairs in one call of a fused kernel.

Metal kills commands that run for seconds, such as attention of 2048 queries to 65K keys with many
heads. MLX leaves it to callers to split such work (mlx#3302)."""
TILE_SCORES = 1 << 22
"""Most query-key pairs in a tile. Larger tiles exceed the CPU's caches and are slower."""
FEW_KEYS = 4 * PAGE_TOKENS
"""Keys that a tile should have at least. If fewer fit, the tile gets fewer queries instead."""

DENSE_COPIES = 4
"""Copies of keys and values for the dense kernel: packed, unpacked, by head, concatenated."""
TILE_COPIES = 3
"""Copies of keys and values in a tile: packed, unpacked, concatenated."""
MASK_BYTES = 4
"""Bytes that a mask and its intermediate arrays take per query-key pair."""


@dataclass(frozen=True)
class Work:
    """The attention of a chunk in one layer."""

    kv_heads: int
    repeats: int
    """Query heads per KV head."""
    queries: int
    keys: int
    """Tokens attended to, including the chunk's own."""
    k_dim: int
    v_dim: int
    itemsize: int
    unpacking: int = 0
    """Bytes per element that dequantizing takes, besides its input and output."""
    masked: bool = False
    """Whether earlier tokens are hidden too (window or chunk), so that the mask is an array."""
    sinks: bool = False
    fused: bool = False
    """Whether the dense kernel works without a matrix of scores."""

    def _key_bytes(self, copies: int) -> int:
        return (self.k_dim + self.v_dim) * (copies * self.itemsize + self.unpacking)

    def dense_bytes(self, heads: int) -> int:
        """Return an upper bound of the dense kernel's memory for some KV heads, without output."""
        queries = heads * self.repeats * self.queries
        # With sinks: the scores, the scores with sinks appended, and their softmax.
        scores = 0 if self.fused else queries * self.itemsize * (3 if self.sinks else 1)
        masked = self.masked or not self.fused
        mask = self.queries * (MASK_BYTES + self.itemsize) if masked else 0
        key = heads * self._key_bytes(DENSE_COPIES) + scores + mask
        return key * self.keys + queries * self.k_dim * self.itemsize

    def tile_bytes(self, queries: int, keys: int) -> int:
        """Return an upper bound of a tile's memory for one KV head, without the output."""
        return self._fixed_bytes(queries) + self._bytes_per_key(queries) * keys

    def tile_keys(self, queries: int, scratch: int) -> int:
        """Return the most keys of a tile with this many queries, in whole pages; 0 if none fits."""
        page = PAGE_TOKENS * self._bytes_per_key(queries)
        pages = min(
            (scratch - self._fixed_bytes(queries)) // page,
            max(1, TILE_SCORES // (queries * self.repeats * PAGE_TOKENS)),
            -(-self.keys // PAGE_TOKENS),
        )
        return PAGE_TOKENS * max(0, pages)

    def _fixed_bytes(self, queries: int) -> int:
        # Scaled queries; the output before and after the tile, and what is added; maximum and sum.
        return 4 * queries * self.repeats * (2 * self.k_dim + 4 * self.v_dim + 8)

    def _bytes_per_key(self, queries: int) -> int:
        converted = 0 if self.itemsize == 4 else 4 * (self.k_dim + self.v_dim)
        scores = 3 * 4 * queries * self.repeats  # raw, masked, as weights
        return self._key_bytes(TILE_COPIES) + converted + scores + MASK_BYTES * queries


@dataclass(frozen=True)
class Plan:
    """Size of the parts of the work: of one call of the dense kernel, or of one tile."""

    heads: int
    queries: int
    keys: int | None
    """Keys of a tile, a multiple of 64; None: all keys, in the dense kernel."""
    nbytes: int
    """Upper bound of the memory in use at once, without the output."""


def plan(work: Work, scratch: int) -> Plan:
    """Cut ``work`` so that at most ``scratch`` bytes are in use at once.

    If even one query with a tile of 64 keys needs more, that tile is the plan.
    """
    if heads := _heads(work, scratch):
        return Plan(heads, work.queries, None, work.dense_bytes(heads))
    queries = work.queries
    few = min(FEW_KEYS, work.tile_keys(1, 1 << 62))
    while queries > 1 and work.tile_keys(queries, scratch) < few:
        queries = -(-queries // 2)
    keys = max(PAGE_TOKENS, work.tile_keys(queries, scratch))
    return Plan(1, queries, keys, work.tile_bytes(queries, keys))


def _heads(work: Work, scratch: int) -> int:
    """Return the KV heads per call of the dense kernel, spread evenly over calls; 0: none fit."""
    if not work.fused:  # tiles are at least as fast as some heads at a time
        return work.kv_heads if work.dense_bytes(work.kv_heads) <= scratch else 0
    scores = work.repeats * work.queries * work.keys
    fitting = [
        heads
        for heads in range(1, work.kv_heads + 1)
        if work.dense_bytes(heads) <= scratch and heads * scores <= MOST_SCORES
    ]
    if not fitting:
        return 0
    calls = -(-work.kv_heads // fitting[-1])
    return -(-work.kv_heads // calls)
