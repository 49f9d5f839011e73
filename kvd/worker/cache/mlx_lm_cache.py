"""mlx-lm's own caches, one set per sequence, for models that kvd's stores cannot serve.

`MlxLmCache` has the interface of `ModelCache`. Nothing is quantized, and each sequence takes a
forward pass of its own. The bytes that sequences take are measured, not computed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

import mlx.core as mx
from mlx.utils import tree_flatten

from kvd.worker.cache.scheme import PAGE_TOKENS, Scheme


@dataclass(eq=False)
class MlxLmRow:
    """One request's caches."""

    is_placed: ClassVar[bool] = True
    """Interface of `kvd.worker.cache.rows.SequenceRow`."""
    caches: list[Any]
    length: int = 0
    alive: bool = True


@dataclass(eq=False)
class MlxLmSnapshot(MlxLmRow):
    """A copy of one request's caches."""

    nbytes: int = 0


def state_arrays(caches: list[Any]) -> Iterator[mx.array]:
    """Yield the arrays of mlx-lm's caches."""
    for cache in caches:
        state: Any = []
        with suppress(AttributeError, TypeError):  # some caches raise before their first token
            state = cache.state
        for _, value in tree_flatten(state):
            if isinstance(value, mx.array):
                yield value


class MlxLmCosts:
    """Interface of `kvd.worker.cache.sequence_costs.SequenceCosts`: upper bounds of bytes."""

    def __init__(self, fixed_bytes: int, token_bytes: int) -> None:
        self.row_bytes = fixed_bytes
        self.token_bytes = token_bytes
        self.unit_bytes = max(1, PAGE_TOKENS * token_bytes, fixed_bytes)

    def pages_bytes(self, length: int, chunk: int = 0, level: int = 0) -> int:  # noqa: ARG002
        # mlx-lm's caches grow by copying, 256 tokens at a time, so they exist twice during a copy.
        return 2 * self.token_bytes * (length + max(256, chunk))

    def continued_bytes(self, _start: int, length: int, chunk: int = 0, level: int = 0) -> int:  # noqa: ARG002
        return self.pages_bytes(length, chunk)


@dataclass(frozen=True)
class MlxLmUsage:
    """Interface of `kvd.worker.cache.usage.CacheUsage`: counters; those of pages are 0."""

    arrays: Callable[[], list[mx.array]]
    flushes: int = 0
    pages_used: int = 0
    unbounded_pages_used: int = 0
    pool_growth_pages: int = 0
    pages_idle: int = 0
    pages_total: int = 0
    pages_bytes: int = 0
    used_bytes: int = 0
    level_bytes: tuple[int, ...] = ()

    @property
    def tails_bytes(self) -> int:
        return sum(array.nbytes for array in self.arrays())


class MlxLmSnapshots:
    """Interface of `kvd.worker.cache.sequence_snapshots.SequenceSnapshots`, with whole copies."""

    def __init__(self) -> None:
        self.all: list[MlxLmSnapshot] = []

    def can_cut(self, length: int, tokens: int) -> bool:
        return length == tokens

    def keeps_tails(self, _chunk: int) -> bool:
        return False

    def can_take(self, row: MlxLmRow, tokens: int) -> bool:
        return tokens == row.length

    def evaluate(self) -> None:
        """Do nothing: snapshots are evaluated copies."""

    def take(self, row: MlxLmRow, tokens: int | None = None) -> MlxLmSnapshot:
        if tokens not in (None, row.length):
            raise ValueError(f"a row of {row.length} tokens cannot be cut to {tokens}")
        snapshot = MlxLmSnapshot(copy.deepcopy(row.caches), row.length)
        snapshot.nbytes = sum(array.nbytes for array in state_arrays(snapshot.caches))
        self.all.append(snapshot)
        return snapshot

    def drop(self, snapshot: MlxLmSnapshot) -> None:
        snapshot.alive = False
        self.all.remove(snapshot)

    def unlowered(self, snapshot: MlxLmSnapshot) -> bool:  # noqa: ARG002 - interface
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the snapshots, including arrays that they still share with running sequences."""
        return sum(snapshot.nbytes for snapshot in self.all)

    def held_bytes(self, snapshots: Collection[MlxLmSnapshot]) -> int:
        return sum(snapshot.nbytes for snapshot in snapshots)

    freed_bytes = held_bytes

    def charge_of(self, snapshot: MlxLmSnapshot) -> int:
        return snapshot.nbytes


class MlxLmCache:
    """Sequences with mlx-lm's caches. Each takes ``fixed_bytes``, and ``token_bytes`` per token."""

    batched = False
    scheme = Scheme(16, 16)
    levels = 1
    charged_bytes = 0

    def __init__(
        self, make_caches: Callable[[], list[Any]], *, fixed_bytes: int, token_bytes: int
    ) -> None:
        self.new_caches = make_caches
        self.costs = MlxLmCosts(fixed_bytes, token_bytes)
        self.row_bytes = fixed_bytes
        self.sequences: list[MlxLmRow] = []
        self.snapshots = MlxLmSnapshots()
        self.limit_bytes: int | None = None
        self._prefilling: tuple[MlxLmRow, int] | None = None

    def views(self, sequences: Sequence[MlxLmRow]) -> list[Any]:
        (sequence,) = sequences
        return sequence.caches

    @property
    def usage(self) -> MlxLmUsage:
        return MlxLmUsage(self.arrays)

    @property
    def tail_slots(self) -> int:
        return len(self.sequences)

    @property
    def snapshot_charge(self) -> int:
        return self.snapshots.nbytes

    @property
    def nbytes(self) -> int:
        return self.usage.tails_bytes + self.snapshots.nbytes

    # Sequences.

    def new_row(self, level: int = 0, coming: int = 1) -> MlxLmRow:  # noqa: ARG002 - interface
        row = MlxLmRow(self.new_caches())
        self.sequences.append(row)
        return row

    def restore(self, snapshot: MlxLmSnapshot, coming: int = 1) -> MlxLmRow:  # noqa: ARG002
        """Return a new sequence with a snapshot's content. The snapshot stays."""
        if not snapshot.alive:
            raise ValueError("the snapshot was dropped")
        row = MlxLmRow(copy.deepcopy(snapshot.caches), snapshot.length)
        self.sequences.append(row)
        return row

    def free(self, row: MlxLmRow, *, clean: bool = True) -> None:  # noqa: ARG002 - interface
        row.alive = False
        self.sequences.remove(row)

    def discard(self) -> None:
        """Free all running sequences after a failed step. Snapshots stay."""
        for row in self.sequences:
            row.alive = False
        self.sequences = []
        self._prefilling = None

    # Steps.

    def begin_decode(self, sequences: list[MlxLmRow], batch: int | None = None) -> None:  # noqa: ARG002
        for sequence in sequences:
            sequence.length += 1

    def begin_prefill(self, sequence: MlxLmRow, count: int) -> None:
        self._prefilling = sequence, count

    def end_pass(self) -> None:
        """Do nothing: mlx-lm's caches already have the new tokens."""

    def finish_prefill(self, *, waits: bool = True) -> None:  # noqa: ARG002 - interface
        if self._prefilling is None:
            raise RuntimeError("no prefill step is under way")
        (sequence, count), self._prefilling = self._prefilling, None
        mx.eval(list(state_arrays(sequence.caches)))
        sequence.length += count

    def wait(self) -> None:
        """Do nothing: `finish_prefill` has waited."""

    def undo_prefill(self) -> bool:
        return False

    def needs_flush(self, _sequences: list[MlxLmRow], _steps: int = 1) -> bool:
        return False

    def arrays(self, share: float = 1.0) -> list[mx.array]:
        """Return all arrays; none if ``share`` is below 1, because one needs a whole step."""
        rows = self.sequences if share >= 1 else ()
        return [array for row in rows for array in state_arrays(row.caches)]

    def flush(self) -> None:
        """Do nothing."""

    # Giving memory back: nothing to do, because sequences that end free everything that they held.

    def compact(self, pages: int = 0) -> int:  # noqa: ARG002 - interface
        return 0

    def lacks_room(self, idle_pages: int | None = None) -> bool:  # noqa: ARG002 - interface
        return False

    def cut_tails(self) -> None:
        """Do nothing."""

    def shrink(self, pages: int = 0) -> None:
        """Do nothing."""
