"""Rows and sequences that stand still: what they were, kept without a place in the tails.

Frozen rows are holders of pages like running ones, so whatever moves, converts or counts pages
knows of them (`kvd.worker.cache.store`). They serve as checkpoints of prompts
(`kvd.worker.prefix.tree`), for rows that are parked, and where one prompt has several answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import mlx.core as mx

from kvd.worker.cache.pages import PageId
from kvd.worker.cache.recurrent_states import State
from kvd.worker.cache.rows import Row

if TYPE_CHECKING:
    from kvd.worker.cache.store import KVStore

NOWHERE = -1
"""The slot of a row that has no place in the tails."""


@dataclass(eq=False)
class RowSnapshot(Row):
    """A row of one store as it was when it was frozen: nothing early, its tail beside it."""

    is_snapshot: ClassVar[bool] = True
    slot: int = NOWHERE
    tails: list[tuple[mx.array, mx.array]] = field(default_factory=list)
    """Keys and values of the tail's tokens in each layer, ``[heads, tail_length, dim]``."""

    nbytes: int = field(init=False)
    """Bytes of the tail in all layers; pages are counted where they are."""

    def __post_init__(self) -> None:
        self.nbytes = sum(array.nbytes for sides in self.tails for array in sides)


@dataclass(eq=False)
class SequenceSnapshot:
    """A sequence as it was when it was frozen; it can be thawed any number of times."""

    rows: list[RowSnapshot]
    """One in each store."""
    state: State
    length: int
    alive: bool = True
    nbytes: int = field(init=False)
    """Bytes of tails and states: what it holds beside its pages."""

    def __post_init__(self) -> None:
        states = [array for part in self.state for array in part if array is not None]
        self.nbytes = sum(row.nbytes for row in self.rows)
        self.nbytes += sum(array.nbytes for array in states)


def held_bytes(stores: list[KVStore], snapshot: Collection[SequenceSnapshot]) -> int:
    """Return the bytes of all that these hold; pages that they share count once."""
    pages = sum(
        _bytes_of(store, {page for one in snapshot for page in one.rows[index].pages})
        for index, store in enumerate(stores)
    )
    return pages + sum(one.nbytes for one in snapshot)


def charge_of(stores: list[KVStore], snapshot: SequenceSnapshot) -> int:
    """Return the bytes of all that one holds, its pages as the stores charge them."""
    pages = sum(
        store.charge(page.level)
        for store, row in zip(stores, snapshot.rows, strict=True)
        for page in row.pages
    )
    return pages + snapshot.nbytes


def freed_bytes(stores: list[KVStore], snapshot: Collection[SequenceSnapshot]) -> int:
    """Return the bytes that would come free if all of these were dropped, and nobody else."""
    freed = sum(one.nbytes for one in snapshot)
    for index, store in enumerate(stores):
        holds = Counter(page for one in snapshot for page in one.rows[index].pages)
        freed += _bytes_of(
            store,
            [
                page
                for page, count in holds.items()
                if store.allocators[page.level].references(page) == count
            ],
        )
    return freed


def _bytes_of(store: KVStore, pages: Collection[PageId]) -> int:
    levels = Counter(page.level for page in pages)
    return sum(count * store.page_bytes(level) for level, count in levels.items())
