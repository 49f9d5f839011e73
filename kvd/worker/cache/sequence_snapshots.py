"""Snapshots of sequences: for the prefix cache, preempted requests, and a request's choices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from kvd.worker.cache.pages import PageId
from kvd.worker.cache.recurrent_states import State, StateStore
from kvd.worker.cache.row_snapshots import RowSnapshot
from kvd.worker.cache.rows import SequenceRow
from kvd.worker.cache.store import KVStore
from protocol.memory_bounds import KEPT_FROM


@dataclass(eq=False)
class SequenceSnapshot:
    """A snapshot of one sequence. It can be restored any number of times."""

    rows: list[RowSnapshot]
    state: State
    length: int
    alive: bool = True
    nbytes: int = field(init=False)
    """Bytes of tails and states, without the pages."""

    def __post_init__(self) -> None:
        states = [array for part in self.state for array in part if array is not None]
        self.nbytes = sum(row.nbytes for row in self.rows)
        self.nbytes += sum(array.nbytes for array in states)


class SequenceSnapshots:
    """Takes and drops snapshots. `ModelCache.restore` creates sequences from them."""

    def __init__(self, stores: Sequence[KVStore], states: StateStore) -> None:
        self.all: list[SequenceSnapshot] = []
        self.nbytes = 0
        """Bytes of all tails and states. A total, because each step reads it several times."""
        self._stores = stores
        self._states = states

    def can_cut(self, length: int, tokens: int) -> bool:
        """Return whether a sequence of ``length`` tokens can be taken as it was at ``tokens``.

        See `RowSnapshots.can_cut`. A recurrent state exists only for the full length.
        """
        if length == tokens:
            return True
        cut = (store.snapshots.can_cut(length, tokens) for store in self._stores)
        return not self._states.parts and all(cut)

    def keeps_tails(self, chunk: int) -> bool:
        """Return whether snapshots can be taken at the ends of chunks inside a pass.

        ``chunk``: tokens of these chunks, at least `KEPT_FROM`.
        """
        keep = all(store.snapshots.keeps_tails for store in self._stores)
        return chunk >= KEPT_FROM and not self._states.parts and keep

    def can_take(self, sequence: SequenceRow, tokens: int) -> bool:
        """Return whether `take` can snapshot a sequence as it was with ``tokens`` tokens."""
        if not sequence.alive or tokens == sequence.length:
            return sequence.alive
        pairs = zip(self._stores, sequence.rows, strict=True)
        can_take = all(store.snapshots.can_take(row, tokens) for store, row in pairs)
        return not self._states.parts and can_take

    def evaluate(self) -> None:
        """Start to copy the kept tails of snapshots (`RowSnapshots.evaluate`)."""
        for store in self._stores:
            store.snapshots.evaluate()

    def take(self, sequence: SequenceRow, tokens: int | None = None) -> SequenceSnapshot:
        """Return a snapshot: pages and states by reference, tails as copies.

        ``tokens``: take the sequence as it was at this length, if `can_take`; None: all of it. The
        device must be idle, unless the last pass has kept the tails, the sequence has no slots
        (`unplaced_rows`), or kernels write the flush of a pass: then copies run behind them.
        """
        length = sequence.length if tokens is None else tokens
        rows = []
        with ExitStack() as undo:  # if one store's part fails, the other parts are dropped
            for store, row in zip(self._stores, sequence.rows, strict=True):
                rows.append(store.snapshots.take(row, length))
                undo.callback(store.snapshots.drop, rows[-1])
            state = sequence.state
            if state is None:
                state = self._states.snapshot(sequence)
            snapshot = SequenceSnapshot(rows, state, length)
            undo.pop_all()
        return self._kept(snapshot)

    def add(self, snapshot: SequenceSnapshot) -> SequenceSnapshot:
        """Add a snapshot that was read from bytes; it references its pages from now on."""
        for store, row in zip(self._stores, snapshot.rows, strict=True):
            store.snapshots.add(row)
        return self._kept(snapshot)

    def _kept(self, snapshot: SequenceSnapshot) -> SequenceSnapshot:
        self.all.append(snapshot)
        self.nbytes += snapshot.nbytes
        return snapshot

    def drop(self, snapshot: SequenceSnapshot) -> None:
        snapshot.alive = False
        for store, row in zip(self._stores, snapshot.rows, strict=True):
            store.snapshots.drop(row)
        self.all.remove(snapshot)
        self.nbytes -= snapshot.nbytes

    def unlowered(self, snapshot: SequenceSnapshot) -> bool:
        """Return whether all pages are as prefill left them: none was stepped down."""
        return all(
            store.dense_start.unlowered(row)
            for store, row in zip(self._stores, snapshot.rows, strict=True)
        )

    @property
    def charge(self) -> int:
        """Bytes that only snapshots hold: tails, states, and pages as `PageStore.charge`."""
        return self.nbytes + sum(store.pages.idle_charge for store in self._stores)

    def charge_of(self, snapshot: SequenceSnapshot) -> int:
        """Return all bytes that a snapshot references, its pages as `PageStore.charge`."""
        pages = sum(
            store.pages.charge(page.level)
            for store, row in zip(self._stores, snapshot.rows, strict=True)
            for page in row.pages
        )
        return pages + snapshot.nbytes

    def held_bytes(self, snapshots: Collection[SequenceSnapshot]) -> int:
        """Return the bytes that these snapshots reference; pages that they share count once.

        The prefix cache asks for nearly all snapshots at each change. They hold all pages in
        snapshots, minus those that only the other snapshots hold.
        """
        chosen = set(snapshots)
        others = [one for one in self.all if one not in chosen]
        held = sum(snapshot.nbytes for snapshot in snapshots)
        for index, store in enumerate(self._stores):
            if len(others) < len(chosen):
                held += store.pages.snapshot_bytes
                held -= _bytes_of(store, _only_in(others, index, store, rows_count=False))
            else:
                held += _bytes_of(store, (level for level, _ in set(_pages_of(chosen, index))))
        return held

    def freed_bytes(self, snapshots: Collection[SequenceSnapshot]) -> int:
        """Return the bytes that are freed if all these snapshots are dropped."""
        freed = sum(snapshot.nbytes for snapshot in snapshots)
        for index, store in enumerate(self._stores):
            freed += _bytes_of(store, _only_in(snapshots, index, store))
        return freed


def _pages_of(snapshots: Iterable[SequenceSnapshot], store: int) -> Iterator[PageId]:
    return (page for one in snapshots for page in one.rows[store].pages)


def _only_in(
    some: Collection[SequenceSnapshot], index: int, store: KVStore, *, rows_count: bool = True
) -> list[int]:
    """Return the level of each page that only ``some`` snapshots, which are alive, reference.

    ``rows_count``: whether running rows may not reference it either.
    """
    references = [
        one.references if rows_count else one.snapshot_references for one in store.pages.allocators
    ]
    if len(some) == 1:
        # A row has each page once. An eviction compares all checkpoints in this way, one by one.
        return [level for level, slot in _pages_of(some, index) if references[level][slot] == 1]
    counts = Counter(_pages_of(some, index))
    return [level for (level, slot), count in counts.items() if references[level][slot] == count]


def _bytes_of(store: KVStore, levels: Iterable[int]) -> int:
    """Return the bytes of pages of these levels."""
    counts = Counter(levels)
    return sum(count * store.pages.page_bytes(level) for level, count in counts.items())
