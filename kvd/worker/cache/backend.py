"""Attention over pages that is one operation a layer: what a step needs of it, and it of a step.

A store without a backend attends with plain operations (`kvd.worker.attention`), and so do the
steps that a backend leaves to them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import mlx.core as mx

from kvd.worker.cache.page_list import PageList

if TYPE_CHECKING:
    from kvd.worker.cache.attention_kind import Kind
    from kvd.worker.cache.layer import Chunk, LayerStore
    from kvd.worker.cache.rows import Row
    from kvd.worker.cache.scheme import Packing
    from kvd.worker.cache.steps import DecodeStep
    from kvd.worker.cache.store import KVStore


class BackendStep(Protocol):
    """One decode step."""

    @property
    def moves_tails(self) -> bool:
        """Whether `append` moves up what is behind a page that a row reads from now on."""

    @property
    def pages(self) -> PageList:
        """The pages that the rows see."""

    def append(self, layer: LayerStore, step: DecodeStep, keys: mx.array, values: mx.array) -> None:
        """Write one token for each row into its tail, ``[rows or more, heads, 1, dim]``; lazy."""

    def attend(
        self, queries: mx.array, layer: LayerStore, scale: float, sinks: mx.array | None
    ) -> mx.array:
        """Attend one query a row: as `kvd.worker.attention.decode.decode_attention`."""

    # Compiled steps (`kvd.worker.serving.compiled`).

    def padded(self) -> BackendStep:
        """Return the same step with its lists at one of few lengths."""

    def shapes(self, step: DecodeStep) -> tuple[Any, ...]:
        """Return what gives `arrays` their shapes, beside the number of rows and the levels."""

    def arrays(self, step: DecodeStep) -> list[mx.array]:
        """Return what this and the step read, beside tails and pools."""

    def with_arrays(self, step: DecodeStep, given: Iterator[mx.array]) -> DecodeStep:
        """Return the step over other `arrays`."""


class BackendPrefill(Protocol):
    """A chunk of one row's prompt."""

    def attend(
        self,
        queries: mx.array,
        layer: LayerStore,
        chunk: Chunk,
        scale: float,
        sinks: mx.array | None,
    ) -> mx.array:
        """Attend a chunk: as `kvd.worker.attention.prefill.prefill_attention`."""


class Backend(Protocol):
    """Attends in the place of plain operations."""

    def decode(
        self, layers: Sequence[LayerStore], kind: Kind, rows: Sequence[Row], pages: PageList
    ) -> BackendStep | None:
        """Describe a step, lengths counting the new tokens; None leaves it to plain operations."""

    def prefill(self, kind: Kind, row: Row, count: int) -> BackendPrefill | None:
        """Describe a chunk that the row's length does not count yet, or leave it likewise."""

    def launched(self, more: int = 0) -> int:
        """Count kernels that were launched without a call; return how many there were so far."""


class OpaqueKV(ABC):
    """Keys and values of one forward pass that only attention can read.

    mlx-lm's models pass it from their cache to attention, where `kvd.worker.serving.seam` calls
    `attend`.
    """

    store: KVStore

    @abstractmethod
    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attend ``[batch, query heads, tokens, key size]`` causally; same shape, value size."""


def rows_of(kind: Kind, rows: Sequence[Row], pages: PageList) -> list[tuple[int, ...]]:
    """Return what is told of each row of a decode step, in its lengths the new token.

    Slot of its tail, tokens in it, position of its first token, first page and the one behind the
    last, and the first position that is seen beside the kept ones.
    """
    return [
        (
            row.slot,
            row.tail_length,
            row.tail_start,
            pages.ends[place - 1] if place else 0,
            pages.ends[place],
            kind.low(row.length - 1),
        )
        for place, row in enumerate(rows)
    ]


LevelPackings = list[tuple[int, int, bool]]
"""Bits, group size, and whether groups run along the page's tokens, for each level."""


def pools_of(
    layer: LayerStore, pages: PageList
) -> tuple[list[mx.array], LevelPackings, LevelPackings]:
    """Return the arrays of the levels that occur, and how keys and values are packed."""
    pools = [layer.pools[level] for level in pages.levels]
    return (
        [array for pool in pools for array in pool.arrays()],
        [_level_packing(pool.key_packing) for pool in pools],
        [_level_packing(pool.value_packing) for pool in pools],
    )


def schemes_of(layer: LayerStore) -> tuple[LevelPackings, LevelPackings]:
    """Return how all levels of a layer pack keys and values."""
    return (
        [_level_packing(pool.key_packing) for pool in layer.pools],
        [_level_packing(pool.value_packing) for pool in layer.pools],
    )


def _level_packing(packing: Packing) -> tuple[int, int, bool]:
    return packing.bits, packing.group, not packing.per_token
