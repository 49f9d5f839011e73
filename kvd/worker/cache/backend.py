"""The interface of attention backends: attention over pages as one operation per layer.

A store without a backend attends with plain operations (`kvd.worker.attention`). Steps that a
backend declines do so too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.page_tables import PageList
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import Packing
from kvd.worker.cache.steps import BackendPrefill, BackendStep


class Backend(Protocol):
    """Attention that replaces the plain operations."""

    def decode(
        self, layers: Sequence[LayerStore], kind: Kind, rows: Sequence[Row], pages: PageList
    ) -> BackendStep | None:
        """Describe a step whose new tokens the lengths already count, or return None to decline."""

    def prefill(self, kind: Kind, row: Row, count: int) -> BackendPrefill | None:
        """Describe a chunk that the row's length does not count yet, or return None to decline."""

    def launched(self, more: int = 0) -> int:
        """Add kernel launches that happened without a call; return the total so far."""


def rows_of(kind: Kind, rows: Sequence[Row], pages: PageList) -> list[tuple[int, ...]]:
    """Return six integers for each row of a decode step, whose length counts the new token.

    The slot, length and start of its tail. The first and end index of its pages in the list. The
    first position that the query sees apart from the kept ones.
    """
    return [
        (
            row.slot,
            row.tail_length,
            row.tail_start,
            pages.ends[index - 1] if index else 0,
            pages.ends[index],
            kind.low(row.length - 1),
        )
        for index, row in enumerate(rows)
    ]


LevelPackings = list[tuple[int, int, bool]]
"""For each level: bits, group size, and whether groups run along the page's tokens."""


def pools_of(
    layer: LayerStore, pages: PageList
) -> tuple[list[mx.array], LevelPackings, LevelPackings]:
    """Return the pool arrays of the levels in a list, and how keys and values are packed."""
    pools = [layer.pools[level] for level in pages.levels]
    return [array for pool in pools for array in pool.arrays()], *schemes_of(pools)


def schemes_of(pools: Sequence[PagePool]) -> tuple[LevelPackings, LevelPackings]:
    """Return how these pools pack keys and values."""
    return (
        [_level_packing(pool.key_packing) for pool in pools],
        [_level_packing(pool.value_packing) for pool in pools],
    )


def _level_packing(packing: Packing) -> tuple[int, int, bool]:
    return packing.bits, packing.group, not packing.per_token
