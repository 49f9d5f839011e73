"""Snapshots of rows and sequences: their pages by reference, and copies of their tails and states.

Snapshots reference pages as running rows do, so code that moves, converts or counts pages treats
both alike. They serve as checkpoints of the prefix cache (`kvd.worker.prefix.tree`), for preempted
requests, and for prompts with several choices.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import mlx.core as mx

from kvd.worker.cache.recurrent_states import State
from kvd.worker.cache.rows import Row

NO_SLOT = -1
"""Slot of a row without a place in the tail arrays."""


@dataclass(eq=False)
class RowSnapshot(Row):
    """One row of one store, with a copy of its tail and nothing written ahead."""

    is_snapshot: ClassVar[bool] = True
    slot: int = NO_SLOT
    tails: list[tuple[mx.array, mx.array]] = field(default_factory=list)
    """Keys and values of the tail in each layer, ``[heads, tail_length, dim]``."""

    nbytes: int = field(init=False)
    """Bytes of the tail in all layers, without the pages."""

    def __post_init__(self) -> None:
        self.nbytes = sum(array.nbytes for sides in self.tails for array in sides)


@dataclass(eq=False)
class SequenceSnapshot:
    """One sequence. It can be restored any number of times."""

    rows: list[RowSnapshot]
    """One per store."""
    state: State
    length: int
    alive: bool = True
    nbytes: int = field(init=False)
    """Bytes of tails and states, without the pages."""

    def __post_init__(self) -> None:
        states = [array for part in self.state for array in part if array is not None]
        self.nbytes = sum(row.nbytes for row in self.rows)
        self.nbytes += sum(array.nbytes for array in states)
