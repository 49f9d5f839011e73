"""Snapshots of one store's rows: pages by reference, and copies of tails.

Snapshots reference pages as running rows do, so code that moves, converts or counts pages treats
both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import mlx.core as mx

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.dense_start import DenseStart
from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.page_store import PageStore
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, full_pages
from kvd.worker.cache.steps import PrefillStep
from kvd.worker.device import on_cpu


@dataclass(eq=False)
class RowSnapshot(Row):
    """One row of one store, with a copy of its tail and nothing written ahead."""

    is_snapshot: ClassVar[bool] = True
    slot: int = -1
    nbytes: int = field(init=False)
    """Bytes of the tail in all layers, without the pages."""

    def __post_init__(self) -> None:
        self.nbytes = sum(array.nbytes for sides in self.tails for array in sides)


class RowSnapshots:
    """Takes and drops snapshots. `KVStore.restore` creates rows from them."""

    def __init__(
        self, layers: list[LayerStore], pages: PageStore, dense_start: DenseStart, kind: Kind
    ) -> None:
        self.all: list[RowSnapshot] = []
        self.nbytes = 0
        """Bytes of all tails."""
        self._layers = layers
        self._kind = kind
        self._pages = pages
        self._dense_start = dense_start
        self._lazy: list[tuple[mx.array, mx.array]] = []
        """Copies of kept tails that `evaluate` has not started yet."""
        self._kept: dict[tuple[Row, int], int] = {}
        """Rows and lengths whose tails the last pass has kept, and their numbers in
        `LayerStore.kept`."""

    @property
    def keeps_tails(self) -> bool:
        """Whether passes keep tails. They keep none if the cache has a window or a dense start."""
        return not (self._kind.bounded or self._dense_start.is_used)

    def keep(self, steps: Sequence[PrefillStep]) -> None:
        """Note which tails a pass has kept. Those of the pass before are forgotten."""
        kept = (step for step in steps if step.keeps_tail)
        self._kept = {
            (step.row, step.offset + step.count): number for number, step in enumerate(kept)
        }

    def forget_kept(self) -> None:
        """Free the tails that a pass has kept."""
        self._kept = {}
        for layer in self._layers:
            layer.kept = None

    def can_take(self, row: Row, tokens: int) -> bool:
        """Return whether `take` can snapshot a row in prefill as it was with ``tokens`` tokens.

        Unlike `can_cut`, this is about what the row holds now, kept tails included.
        """
        if not row.alive or tokens == row.length:
            return row.alive
        is_whole = row.is_placed and not row.trimmed
        return is_whole and ((row, tokens) in self._kept or self.can_cut(row.length, tokens))

    def can_cut(self, length: int, tokens: int) -> bool:
        """Return whether a row in prefill still holds what it held at an earlier length.

        ``length``: tokens of the row; ``tokens``: its earlier length. In between it must have
        filled no page, freed none and left no dense start: then only its tail has grown.
        """
        low, earlier = (max(0, self._kind.low(at)) // PAGE_TOKENS for at in (length, tokens))
        level, start = self._dense_start.level, full_pages(tokens)
        same = full_pages(length) == start and low == earlier and level(length) == level(tokens)
        return tokens <= length and same

    def take(self, row: Row, tokens: int | None = None) -> RowSnapshot:
        """Return a row's pages by reference and a copy of its tail, which may be lazy (`evaluate`).

        ``tokens``: take the row as it was at this length, if `can_take`; None: all of it. The
        device must be idle, except as in `SequenceSnapshots.take`. A row without a slot is taken
        whole, and its tail needs no copy. Full pages are never written again, so sharing them
        needs no copy either. A row that has outgrown the dense start leaves it first, as before a
        step.
        """
        length = row.length if tokens is None else tokens
        if not self.can_take(row, length):
            raise ValueError(f"a row of {row.length} tokens cannot be cut to {length}")
        self._dense_start.leave([row] if self._dense_start.outgrown(row) else [])
        # After a trim, a row can have such a length again. Then its own tail counts.
        kept = self._kept.get((row, length)) if length != row.length else None
        tails = list(row.tails)
        if row.is_placed:
            tails = [self._copy_tail(layer, row, length, kept) for layer in self._layers]
            if on_cpu():
                mx.eval(tails)
            elif kept is None:  # the next step writes into the row's own tail
                mx.async_eval(tails)  # type: ignore[no-untyped-call]
            else:
                self._lazy += tails
        snapshot = RowSnapshot(tails=tails)
        snapshot.copy_from(row)
        snapshot.length = length
        if kept is not None:
            del snapshot.pages[full_pages(length) :]
        self.add(snapshot)
        return snapshot

    def evaluate(self) -> None:
        """Start to copy the kept tails of snapshots.

        This takes milliseconds of host time, best while the device has other work.
        """
        if self._lazy:
            lazy, self._lazy = self._lazy, []
            mx.async_eval(lazy)  # type: ignore[no-untyped-call]

    def _copy_tail(
        self, layer: LayerStore, row: Row, length: int, kept: int | None
    ) -> tuple[mx.array, mx.array]:
        if kept is None:
            return layer.copy_tail(row.slot, length - row.tail_start)
        assert layer.kept is not None, "the pass has kept a tail in each layer"
        return layer.kept.copy(kept)

    def add(self, snapshot: RowSnapshot) -> None:
        self._pages.retain(snapshot.pages, snapshot=True)
        self.all.append(snapshot)
        self.nbytes += snapshot.nbytes

    def drop(self, snapshot: RowSnapshot) -> None:
        """Free a snapshot's pages and tail. No step reads a snapshot, so this is always safe."""
        if not snapshot.alive:
            raise ValueError("the snapshot is already dropped")
        snapshot.alive = False
        self._pages.release(snapshot.pages, snapshot=True)
        self.all.remove(snapshot)
        self.nbytes -= snapshot.nbytes
