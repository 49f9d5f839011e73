"""The interface of attention backends: attention over pages as one operation per layer.

A store without a backend attends with plain operations (`kvd.worker.attention`). So does a store
whose backend declines the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.layer import LayerStore, PendingPages
from kvd.worker.cache.packed import Packed
from kvd.worker.cache.page_tables import EARLIER, PageList
from kvd.worker.cache.pool import PagePool
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import Packing
from kvd.worker.cache.steps import BackendPrefill, BackendStep, PrefillStep


class Backend(Protocol):
    """Attention that replaces the plain operations."""

    def decode(
        self, layers: Sequence[LayerStore], kind: Kind, rows: Sequence[Row], pages: PageList
    ) -> BackendStep | None:
        """Return the description of a decode step, or None to decline the step.

        The rows' lengths already count the new tokens.
        """

    def prefill(self, kind: Kind, step: PrefillStep) -> BackendPrefill | None:
        """Return the description of a chunk, or None to decline the chunk."""

    def pack_tails(
        self, layer: LayerStore, level: int, slots: Sequence[int]
    ) -> tuple[Packed, Packed] | None:
        """Quantize the first 64 tokens of these tails as pages of a level; None to decline."""

    def launched(self, more: int = 0) -> int:
        """Add ``more`` kernel launches by replayed compiled steps; return the total so far."""


def rows_of(kind: Kind, rows: Sequence[Row], pages: PageList) -> list[tuple[int, ...]]:
    """Return six integers for each row of a decode step. Lengths already count the new tokens.

    The tail: its slot, its length, and the position of its first token. Indices into ``pages``: of
    the row's first page, and after its last. The first position that the new token's query sees,
    apart from the first tokens that a window keeps.
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
    layer: LayerStore, pages: PageList, earlier: Sequence[PendingPages] = ()
) -> tuple[list[mx.array], LevelPackings, LevelPackings]:
    """Return the pool arrays of the levels in ``pages``, and how keys and values are packed.

    ``earlier``: the pages of levels from `EARLIER` on.
    """
    pools, arrays = [], []
    for level in pages.levels:
        if level < EARLIER:
            pools.append(layer.pools[level])
            arrays += pools[-1].arrays()
        else:
            filled = earlier[level - EARLIER]
            pools.append(layer.pools[filled.level])
            # Quantized pages are contiguous. Dense keys are transposed.
            dense = len(filled.keys) == 1 or len(filled.values) == 1
            earlier_arrays = (*filled.keys, *filled.values)
            arrays += map(mx.contiguous, earlier_arrays) if dense else earlier_arrays
    return arrays, *schemes_of(pools)


def schemes_of(pools: Sequence[PagePool]) -> tuple[LevelPackings, LevelPackings]:
    """Return how these pools pack keys and values."""
    return (
        [_level_packing(pool.key_packing) for pool in pools],
        [_level_packing(pool.value_packing) for pool in pools],
    )


def _level_packing(packing: Packing) -> tuple[int, int, bool]:
    return packing.bits, packing.group, not packing.per_token
