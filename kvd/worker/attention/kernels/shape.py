"""What the two attention kernels are compiled for, and how work is divided among threads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.unpacking import Run, dense_run, packed_run
from kvd.worker.cache.scheme import PAGE_TOKENS

LANES = 32
"""Threads of a warp (CUDA) or simdgroup (Metal)."""
WARPS = 4
"""Usual warps per block. More tiles need more warps; scarce shared memory allows fewer."""
MOST_WARPS = 8
"""Most warps per block: 256 threads can use 255 registers each, CUDA's maximum. A larger block is
silently not run if its threads use too many registers (480 threads with 186 each were too many)."""
FLOATS = 4 * 72
"""Minimum floats of shared memory per warp: room for the weights of four vectors in `matrix`."""


@dataclass(frozen=True)
class Side:
    """How a level packs keys or values."""

    bits: int
    group: int
    along_tokens: bool
    """Whether groups run along the page's tokens, so that each channel has its own scale."""

    @property
    def packed(self) -> bool:
        return self.bits < 16

    def groups(self, dim: int) -> int:
        return (PAGE_TOKENS if self.along_tokens else dim) // self.group

    def run(self, dtype: mx.Dtype) -> Run:
        return packed_run(self.bits) if self.packed else dense_run(dtype)


@dataclass(frozen=True)
class Shape:
    """Everything that the kernels' text depends on."""

    dtype: mx.Dtype
    """Dtype of queries, tails, scales and biases."""
    k_dim: int
    v_dim: int
    kv_heads: int
    repeats: int
    """Query heads per KV head."""
    queries: int
    """Newest tokens of a row that attend, each to itself and the tokens before it."""
    keys: tuple[Side, ...]
    values: tuple[Side, ...]
    scale: float
    keep: int = 0
    """First tokens that every query sees, whatever its window."""
    sinks: bool = False
    schemes: tuple[tuple[Side, Side], ...] = ()
    """How keys and values are packed on all levels that the layer has. How work is divided depends
    on these instead of the levels that occur in the batch, so that a row gets the same numbers
    whatever rows share its batch."""

    @cached_property
    def every_level(self) -> tuple[tuple[Side, Side], ...]:
        """`schemes`, or the levels that occur in the batch if `schemes` is empty."""
        return self.schemes or tuple(zip(self.keys, self.values, strict=True))

    @property
    def vectors(self) -> int:
        return self.repeats * self.queries

    @cached_property
    def by_channel(self) -> bool:
        """Whether values of some level are quantized per channel."""
        return any(side.packed and side.along_tokens for _, side in self.every_level)

    @property
    def by_token(self) -> list[tuple[int, Side]]:
        """Levels that occur in the batch and whose values are quantized per token."""
        return [(n, s) for n, s in enumerate(self.values) if s.packed and not s.along_tokens]

    @cached_property
    def tile(self) -> int:
        """Query vectors that a warp processes at once: 1, 2 or 4."""
        if self.vectors == 1:
            return 1
        # Sums per channel take many registers. Three tiles of two are better than two tiles of four
        # that are partly empty.
        return 2 if self.by_channel or self.vectors in {2, 5, 6} else 4

    @property
    def tiles(self) -> int:
        return -(-self.vectors // self.tile)

    @cached_property
    def region(self) -> int:
        """Entries of shared memory per warp, each a vector of the tile's size."""
        keys = [side.groups(self.k_dim) * self.k_dim for side, _ in self.every_level if side.packed]
        weights = [
            PAGE_TOKENS * side.groups(self.v_dim)
            for _, side in self.every_level
            if side.packed and not side.along_tokens
        ]
        fewest = -(-FLOATS // self.tile)
        return max([self.v_dim, PAGE_TOKENS, fewest, *keys, *weights])

    def shared_bytes(self, tiles: int, warps: int) -> int:
        return 4 * self.tile * (tiles * self.k_dim + warps * (self.region + 2))

    def plan(self, language: Language) -> tuple[int, int]:
        """Return the tiles and warps of a block. Raises ``ValueError`` if no block fits."""
        tiles = self.tiles
        while tiles > MOST_WARPS:
            tiles = -(-tiles // 2)
        warps = tiles * max(1, WARPS // tiles)
        while self.shared_bytes(tiles, warps) > language.most_shared:
            if warps > tiles:
                warps -= tiles
            elif tiles > 1:
                tiles = warps = -(-tiles // 2)
            else:
                raise ValueError(
                    f"heads of {self.k_dim} and {self.v_dim} channels do not fit into shared memory"
                )
        return tiles, warps
