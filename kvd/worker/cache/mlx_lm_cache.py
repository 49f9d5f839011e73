"""mlx-lm's own caches, one set a sequence: for models that no store of ours can serve.

The interface of `kvd.worker.cache.model_cache.ModelCache`. Nothing is quantized, and every sequence
takes a forward pass of its own; what it costs is measured, not computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from kvd.worker.cache.scheme import Scheme


@dataclass(eq=False)
class MlxLmRow:
    """One request's caches."""

    caches: list[Any]
    length: int = 0
    alive: bool = True


@dataclass(eq=False)
class MlxLmSnapshot:
    """One request's caches as they were when it was frozen."""

    caches: list[Any]
    length: int
    nbytes: int
    alive: bool = True


def _arrays(caches: list[Any]) -> Iterator[mx.array]:
    for cache in caches:
        for _, value in tree_flatten(_state(cache)):
            if isinstance(value, mx.array):
                yield value


def _state(cache: Any) -> Any:
    # A cache that nothing was written to may not know its state.
    try:
        return cache.state
    except (AttributeError, TypeError):
        return []


class MlxLmCache:
    """All that a model keeps for its sequences, as mlx-lm keeps it.

    ``make_caches`` returns a new sequence's; ``fixed_bytes`` and ``token_bytes`` say what it costs.
    """

    batched = False
    scheme = Scheme(16, 16)
    flushes = 0
    pages_used = 0
    pages_total = 0
    pages_bytes = 0
    used_bytes = 0
    level_bytes: tuple[int, ...] = ()
    charged_bytes = 0

    def __init__(
        self, make_caches: Callable[[], list[Any]], *, fixed_bytes: int, token_bytes: int
    ) -> None:
        self.new_caches = make_caches
        self.row_bytes = fixed_bytes
        self.token_bytes = token_bytes
        self.sequences: list[MlxLmRow] = []
        self.snapshots: list[MlxLmSnapshot] = []
        self.limit_bytes: int | None = None
        self._prefilling: tuple[MlxLmRow, int] | None = None

    def views(self, sequences: Sequence[MlxLmRow]) -> list[Any]:
        """Return the caches of the one sequence that the pass is for."""
        (sequence,) = sequences
        return sequence.caches

    levels = 1
    """There is no ladder."""

    def pages_bytes_for(self, length: int, chunk: int = 0, level: int = 0) -> int:  # noqa: ARG002
        """Return the most bytes that a sequence takes on its way to ``length`` tokens.

        mlx-lm's caches grow by copying, 256 tokens at a time: for a moment, twice the size.
        """
        return 2 * self.token_bytes * (length + max(256, chunk))

    def own_bytes_for(self, _start: int, length: int, chunk: int = 0, level: int = 0) -> int:  # noqa: ARG002
        """Return the most bytes of one more sequence that goes on from another: a whole copy."""
        return self.pages_bytes_for(length, chunk)

    @property
    def tail_slots(self) -> int:
        """Sequences that are there."""
        return len(self.sequences)

    @property
    def tails_bytes(self) -> int:
        """Bytes of all caches that run."""
        return sum(array.nbytes for array in self.arrays())

    @property
    def snapshot_bytes(self) -> int:
        """Bytes of the frozen caches; until somebody writes to them, copies share them."""
        return sum(one.nbytes for one in self.snapshots)

    snapshot_charge = snapshot_bytes

    @property
    def nbytes(self) -> int:
        """Bytes of all caches."""
        return self.tails_bytes + self.snapshot_bytes

    def new_row(self, level: int = 0) -> MlxLmRow:  # noqa: ARG002 - as the other cache
        """Return an empty sequence."""
        row = MlxLmRow(self.new_caches())
        self.sequences.append(row)
        return row

    def free(self, row: MlxLmRow, *, clean: bool = True) -> None:  # noqa: ARG002 - as the other cache
        """Drop a sequence."""
        row.alive = False
        self.sequences.remove(row)

    def discard(self) -> None:
        """Drop all sequences but the frozen ones, after a step that failed."""
        for row in self.sequences:
            row.alive = False
        self.sequences = []
        self._prefilling = None

    # Sequences that stand still: whole copies, of which no two share anything for long.

    can_freeze = True

    def snapshot(self, row: MlxLmRow) -> MlxLmSnapshot:
        """Return what a sequence is now; the device must be idle."""
        snapshot = MlxLmSnapshot(copy.deepcopy(row.caches), row.length, 0)
        snapshot.nbytes = sum(array.nbytes for array in _arrays(snapshot.caches))
        self.snapshots.append(snapshot)
        return snapshot

    def restore(self, snapshot: MlxLmSnapshot) -> MlxLmRow:
        """Return a new sequence with the content of a frozen one, which stays as it is."""
        if not snapshot.alive:
            raise ValueError("the frozen sequence was dropped")
        row = MlxLmRow(copy.deepcopy(snapshot.caches), snapshot.length)
        self.sequences.append(row)
        return row

    def drop(self, snapshot: MlxLmSnapshot) -> None:
        """Drop a frozen sequence."""
        snapshot.alive = False
        self.snapshots.remove(snapshot)

    def unlowered(self, snapshot: MlxLmSnapshot) -> bool:  # noqa: ARG002 - as the other cache
        """Return True: nothing is ever stepped down."""
        return True

    def held_bytes(self, snapshot: Collection[MlxLmSnapshot]) -> int:
        """Return the bytes of all that these hold."""
        return sum(one.nbytes for one in snapshot)

    freed_bytes = held_bytes

    def charge_of(self, snapshot: MlxLmSnapshot) -> int:
        """Return the bytes that one holds."""
        return snapshot.nbytes

    def begin_decode(self, sequences: list[MlxLmRow], batch: int | None = None) -> None:  # noqa: ARG002
        """Start a forward pass of one token of one sequence."""
        for sequence in sequences:
            sequence.length += 1

    def begin_prefill(self, sequence: MlxLmRow, count: int) -> None:
        """Start a forward pass of ``count`` tokens."""
        self._prefilling = sequence, count

    def end_pass(self) -> None:
        """Do nothing: the caches have taken what they need."""

    def finish_prefill(self) -> None:
        """Evaluate the chunk."""
        if self._prefilling is None:
            raise RuntimeError("no prefill step is under way")
        (sequence, count), self._prefilling = self._prefilling, None
        mx.eval(list(_arrays(sequence.caches)))
        sequence.length += count

    def undo_prefill(self) -> bool:
        """Return False: what the caches have taken they do not give back."""
        return False

    def needs_flush(self, _sequences: list[MlxLmRow]) -> bool:
        """Return False: there is nothing to flush."""
        return False

    def arrays(self) -> list[mx.array]:
        """Everything that steps leave lazy."""
        return [array for row in self.sequences for array in _arrays(row.caches)]

    def flush(self) -> None:
        """Do nothing."""

    pages_idle = 0
    lacks_room = False
    """There are no pools."""

    @property
    def unit_bytes(self) -> int:
        """What memory is counted in where it is reserved: 64 tokens."""
        return max(1, 64 * self.token_bytes, self.row_bytes)

    def compact(self, pages: int = 0) -> int:  # noqa: ARG002 - as the other cache
        """Return 0: nothing is held that is not in use."""
        return 0

    def cut_tails(self) -> None:
        """Do nothing: what a sequence held went with it."""

    def shrink(self, pages: int = 0) -> None:
        """Do nothing: nobody is left."""

    def check(self) -> None:
        """Assert that all sequences are alive."""
        assert all(row.alive for row in self.sequences)
        assert all(one.alive for one in self.snapshots)
