"""How prefill attention is cut so that it fits its scratch: integers only, no tensors.

1. All of it in one call of the dense kernel, where that fits.
2. Where the dense kernel does without a matrix of scores: some KV heads a call, with all keys.
   Heads know nothing of each other.
3. Else tiles: one KV head, some keys; and some queries, where few keys beside all of them are
   still too much.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvd.worker.cache.scheme import PAGE_TOKENS

MOST_SCORES = 1 << 32
"""Query-key pairs of one call of a fused kernel.

Metal kills a command that runs for seconds, as 65K keys and 2048 queries of many heads do, and MLX
leaves it to its callers to cut them (mlx#3302).
"""
TILE_SCORES = 1 << 22
"""Query-key pairs of a tile: more are slower on the CPU, whose caches they pass."""
FEW_KEYS = 4 * PAGE_TOKENS
"""Rather than to fewer keys in a tile, it is cut to fewer queries."""

DENSE_COPIES = 4
"""Of keys and values for the dense kernel: packed, unpacked, head by head, in one piece."""
TILE_COPIES = 3
"""Of keys and values in a tile: packed, unpacked, in one piece."""
MASK_BYTES = 4
"""For each query and key: a mask, and what it is made of."""


@dataclass(frozen=True)
class Work:
    """A chunk's attention in one layer."""

    kv_heads: int
    repeats: int
    """Query heads to a KV head."""
    queries: int
    keys: int
    """Tokens attended to, the chunk's own included."""
    k_dim: int
    v_dim: int
    itemsize: int
    """Bytes of one dense element."""
    unpacking: int = 0
    """Bytes that unpacking takes for one element, beside what goes in and comes out."""
    masked: bool = False
    """Whether more than the future is hidden, so that the mask is an array everywhere."""
    sinks: bool = False
    fused: bool = False
    """Whether the dense kernel does without a matrix of scores."""

    def _key_bytes(self, copies: int) -> int:
        return (self.k_dim + self.v_dim) * (copies * self.itemsize + self.unpacking)

    def dense_bytes(self, heads: int) -> int:
        """Bound what the dense kernel takes for so many KV heads, beside its output."""
        queries = heads * self.repeats * self.queries
        # With sinks: the scores, the same with the sinks beside them, and their softmax.
        scores = 0 if self.fused else queries * self.itemsize * (3 if self.sinks else 1)
        masked = self.masked or not self.fused
        mask = self.queries * (MASK_BYTES + self.itemsize) if masked else 0
        key = heads * self._key_bytes(DENSE_COPIES) + scores + mask
        return key * self.keys + queries * self.k_dim * self.itemsize

    def tile_bytes(self, queries: int, keys: int) -> int:
        """Bound what a tile of one KV head takes, beside the output; float32 whatever comes in."""
        return self._beside_keys(queries) + self._one_key(queries) * keys

    def tile_keys(self, queries: int, scratch: int) -> int:
        """Return the most keys of a tile with so many queries, whole pages of them; 0 if none."""
        page = PAGE_TOKENS * self._one_key(queries)
        pages = min(
            (scratch - self._beside_keys(queries)) // page,
            max(1, TILE_SCORES // (queries * self.repeats * PAGE_TOKENS)),
            -(-self.keys // PAGE_TOKENS),
        )
        return PAGE_TOKENS * max(0, pages)

    def _beside_keys(self, queries: int) -> int:
        # The queries, scaled; the output before and after, and what is added; maximum and sum.
        return 4 * queries * self.repeats * (2 * self.k_dim + 4 * self.v_dim + 8)

    def _one_key(self, queries: int) -> int:
        converted = 0 if self.itemsize == 4 else 4 * (self.k_dim + self.v_dim)
        scores = 3 * 4 * queries * self.repeats  # as they come, masked, as weights
        return self._key_bytes(TILE_COPIES) + converted + scores + MASK_BYTES * queries


@dataclass(frozen=True)
class Plan:
    """How much at once."""

    heads: int
    """KV heads."""
    queries: int
    keys: int | None
    """Of a tile, a multiple of 64; None: all of them, in the dense kernel."""
    nbytes: int
    """Bound of what is alive at once, beside the output."""


def plan(work: Work, scratch: int) -> Plan:
    """Cut ``work`` so that what is alive at once takes at most ``scratch`` bytes.

    If even one query's tile of 64 keys takes more, that is the plan.
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
    """Return how many KV heads go into one call of the dense kernel, in even shares; 0: none."""
    if not work.fused:  # in parts, tiles are at least as fast
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
