"""What a pair of kernels is made for, and how its work is shared out among threads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx

from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.text import RUN
from kvd.worker.attention.kernels.unpacking import Run, dense_run, packed_run
from kvd.worker.cache.scheme import PAGE_TOKENS

LANES = 32
"""Threads of a warp (CUDA), or simdgroup (Metal)."""
WARPS = 4
"""Of a block; more where there are more tiles, fewer where shared memory is short."""
MOST_WARPS = 8
"""256 threads can start with 255 registers each, CUDA's most. A block of more is silently
not run there if its threads use many (480 with 186 were too many)."""
FLOATS = 4 * 72
"""That a warp has in shared memory at least: weights of four vectors, see `matrix`."""


@dataclass(frozen=True)
class Side:
    """How a level packs keys or values."""

    bits: int
    group: int
    along_tokens: bool
    """Whether groups run along the page's tokens, so that a channel has its own scale."""

    @property
    def packed(self) -> bool:
        """Whether there are scales and biases."""
        return self.bits < 16

    def groups(self, dim: int) -> int:
        """Return how many groups a channel has, or a token of ``dim`` channels."""
        return (PAGE_TOKENS if self.along_tokens else dim) // self.group

    def run(self, dtype: mx.Dtype) -> Run:
        """Return how eight elements are read."""
        return packed_run(self.bits) if self.packed else dense_run(dtype)


@dataclass(frozen=True)
class Shape:
    """All that the kernels' text depends on."""

    dtype: mx.Dtype
    """Of queries, tails, scales and biases."""
    k_dim: int
    v_dim: int
    kv_heads: int
    repeats: int
    """Query heads to a KV head."""
    queries: int
    """Newest tokens of a row that attend, each to what is before it."""
    keys: tuple[Side, ...]
    """By level."""
    values: tuple[Side, ...]
    scale: float
    keep: int = 0
    """First tokens that every query sees, whatever its window."""
    sinks: bool = False
    schemes: tuple[tuple[Side, Side], ...] = ()
    """Keys and values of all levels that the layer has. How work is shared out follows from these
    and not from the levels that occur, so that a row gets the same numbers in any company."""

    @cached_property
    def every_level(self) -> tuple[tuple[Side, Side], ...]:
        """The ladder, or the levels that occur where nothing is said of others."""
        return self.schemes or tuple(zip(self.keys, self.values, strict=True))

    @property
    def vectors(self) -> int:
        """Query vectors to a KV head."""
        return self.repeats * self.queries

    @cached_property
    def by_channel(self) -> bool:
        """Whether values of some level are quantized per channel."""
        return any(side.packed and side.along_tokens for _, side in self.every_level)

    @property
    def by_token(self) -> list[tuple[int, Side]]:
        """Levels that occur and whose values are quantized per token."""
        return [(n, s) for n, s in enumerate(self.values) if s.packed and not s.along_tokens]

    @cached_property
    def tile(self) -> int:
        """Query vectors that a warp attends with at once: 1, 2 or 4."""
        if self.vectors == 1:
            return 1
        # Sums by channel take many registers; and rather three tiles of two than two of four that
        # are half empty.
        return 2 if self.by_channel or self.vectors in {2, 5, 6} else 4

    @property
    def tiles(self) -> int:
        """How many tiles there are."""
        return -(-self.vectors // self.tile)

    @cached_property
    def region(self) -> int:
        """Entries of shared memory that each warp has for itself: vectors of the tile's size."""
        keys = [one.groups(self.k_dim) * self.k_dim for one, _ in self.every_level if one.packed]
        weights = [
            PAGE_TOKENS * one.groups(self.v_dim)
            for _, one in self.every_level
            if one.packed and not one.along_tokens
        ]
        fewest = -(-FLOATS // self.tile)
        return max([self.v_dim, PAGE_TOKENS, fewest, *keys, *weights])

    def shared_bytes(self, tiles: int, warps: int) -> int:
        """Return the shared memory of a block."""
        return 4 * self.tile * (tiles * self.k_dim + warps * (self.region + 2))

    def plan(self, language: Language) -> tuple[int, int]:
        """Return the tiles and warps of a block. Raises ``ValueError`` if none fits."""
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
                raise ValueError(f"heads of {self.k_dim} and {self.v_dim} exceed shared memory")
        return tiles, warps

    @property
    def buffers(self) -> int:
        """How many arrays the larger kernel takes and makes."""
        return 7 + sum(3 if side.packed else 1 for side in (*self.keys, *self.values))


def fits(shape: Shape, language: Language) -> bool:
    """Return whether there are kernels for this."""
    if shape.k_dim % RUN or shape.v_dim % RUN or not 0 < shape.v_dim <= RUN * LANES:
        return False
    try:
        shape.plan(language)
    except ValueError:
        return False
    return shape.buffers <= language.most_buffers
