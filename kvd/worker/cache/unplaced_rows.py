"""Sequences without slots in the tail arrays: their tails and states are arrays of their own.

Every step's operations use the arrays of all slots. Assigning a slot, or writing to one, therefore
waits for the step in flight. A sequence that is read from disk has no slots until its first own
step.
"""

from __future__ import annotations

from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.row_snapshots import RowSnapshot
from kvd.worker.cache.rows import SequenceRow
from kvd.worker.cache.sequence_snapshots import SequenceSnapshot


def unplaced_row(
    cache: ModelCache, snapshot: SequenceSnapshot | None = None, level: int = 0
) -> SequenceRow:
    """Return a sequence without slots: an empty one at a level, or one with a snapshot's content.

    Steps may be in flight.
    """
    if snapshot is not None and not snapshot.alive:
        raise ValueError("the snapshot was dropped")
    start = cache.settings.store_level(level)
    given: list[RowSnapshot] | list[None] = [None] * len(cache.stores)
    length, state = 0, cache.states.empty()
    if snapshot is not None:
        given, length, state = snapshot.rows, snapshot.length, snapshot.state
    rows = [store.unplaced_row(row, start) for store, row in zip(cache.stores, given, strict=True)]
    sequence = SequenceRow(rows, length, state=state)
    cache.sequences.append(sequence)
    return sequence


def place(cache: ModelCache, sequence: SequenceRow) -> None:
    """Give a sequence slots for its tails and states, if it has none. The device must be idle.

    May be repeated after an error, such as a lack of memory.
    """
    if sequence.state is None:
        return
    for store, row in zip(cache.stores, sequence.rows, strict=True):
        if not row.is_placed:
            store.place(row)
    cache.states.restore(sequence, sequence.state)
    sequence.state = None
