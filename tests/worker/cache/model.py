"""A model of a whole `ModelCache`: dense rows in numpy, with which the cache must agree.

A row has what attention sees: pages quantized and dequantized by MLX, then the dense tail. Pages
are objects, and references to them are counted again for every comparison. Contents, lengths,
levels, references, bytes and states are compared. Quantization itself is not checked: this model
also uses MLX's (`through_page`).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.recurrent_states import State
from kvd.worker.cache.row_snapshots import RowSnapshot
from kvd.worker.cache.rows import Row, SequenceRow
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Packing, full_pages
from kvd.worker.cache.sequence_snapshots import SequenceSnapshot
from kvd.worker.cache.store import KVStore
from tests.worker.cache.helpers import through_page
from tests.worker.cache.invariants import check_cache, check_store

Sides = tuple[np.ndarray, np.ndarray]
"""Keys and values, ``[heads, tokens, dim]``."""
TAIL = 2 * PAGE_TOKENS
STATE_BYTES = 4 * (3 + 2 * 4)
"""Bytes of one sequence's state in one layer."""
NOWHERE = 1e3
"""Value in place of pages that left a window: if attention reads it, results are wrong."""


def packed(dense: np.ndarray, packing: Packing) -> np.ndarray:
    return np.array(through_page(mx.array(dense), packing))


def oldest_seen(kind: Kind, position: int) -> int:
    """Return what `Kind.low` should: the first position that a query sees after the kept tokens."""
    if kind.chunk is not None:
        return position - position % kind.chunk
    # The kept tokens and the query's own token are part of the window.
    return 0 if kind.window is None else position + 1 - (kind.window - kind.keep)


@dataclass(eq=False)
class Page:
    """64 tokens in all layers of one attention kind. Rows that share a page share this object."""

    level: int
    start: int
    layers: list[Sides]


@dataclass(eq=False)
class DenseRow:
    """One row in the layers of one attention kind."""

    tail: list[Sides]
    level: int = 0
    length: int = 0
    pages: list[Page] = field(default_factory=list)
    paged: int = 0
    """Pages committed so far, including those that left a window."""

    @property
    def tail_start(self) -> int:
        return PAGE_TOKENS * self.paged


def bytes_of_page(geometry: LayerGeometry, side: int, packing: Packing) -> int:
    elements = geometry.kv_heads * (geometry.k_dim, geometry.v_dim)[side] * PAGE_TOKENS
    if packing.bits == 16:
        return 4 * elements
    scales = elements // packing.group * 2
    return elements * packing.bits // 8 + 4 * scales


class DenseStore:
    """The rows of one attention kind, and the store with which they are compared."""

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.kind: Kind = store.kind
        self.geometries = [layer.geometry for layer in store.layers]
        self.packings: list[list[tuple[Packing, Packing]]] = [
            [
                (one.geometry.keys(pool.scheme), one.geometry.values(pool.scheme))
                for pool in one.pools
            ]
            for one in store.layers
        ]
        self.rows: dict[Row, DenseRow] = {}

    # Operations.

    def add(self, row: Row) -> None:
        empty = [
            (
                np.zeros((g.kv_heads, 0, g.k_dim), np.float32),
                np.zeros((g.kv_heads, 0, g.v_dim), np.float32),
            )
            for g in self.geometries
        ]
        self.rows[row] = DenseRow(empty)

    def copy(self, row: Row, twin: Row) -> None:
        """Take or restore a snapshot: the copy has the same pages, and its own tail."""
        mine = self.rows[row]
        self.rows[twin] = DenseRow(
            list(mine.tail), mine.level, mine.length, list(mine.pages), mine.paged
        )

    def append(self, row: Row, new: list[Sides], *, chunk: bool) -> None:
        """Append tokens: a ``chunk`` of a prompt, or the single token of a decode step."""
        mine = self.rows[row]
        mine.tail = [
            (np.concatenate([k, more_k], axis=1), np.concatenate([v, more_v], axis=1))
            for (k, v), (more_k, more_v) in zip(mine.tail, new, strict=True)
        ]
        mine.length += new[0][0].shape[1]
        commits = mine.paged < full_pages(mine.length)
        while mine.paged < full_pages(mine.length):
            self._commit_page(mine)
        # Pages that no later query sees are freed after a commit or a chunk.
        if self.kind.bounded and (chunk or commits):
            low = oldest_seen(self.kind, mine.length - (not chunk))
            anchor = PAGE_TOKENS * -(-self.kind.keep // PAGE_TOKENS)
            mine.pages = [
                page for page in mine.pages if page.start < anchor or page.start + PAGE_TOKENS > low
            ]

    def _commit_page(self, mine: DenseRow) -> None:
        head = [
            tuple(
                packed(side[:, :PAGE_TOKENS], packing)
                for side, packing in zip(sides, packings[mine.level], strict=True)
            )
            for sides, packings in zip(mine.tail, self.packings, strict=True)
        ]
        mine.tail = [(k[:, PAGE_TOKENS:], v[:, PAGE_TOKENS:]) for k, v in mine.tail]
        mine.pages.append(Page(mine.level, mine.tail_start, head))
        mine.paged += 1

    def flush(self) -> None:
        self.leave_dense([row for row in self.rows if not row.is_snapshot])

    def leave_dense(self, rows: list[Row]) -> None:
        """Quantize the pages of rows that reached `quantized_start`; copy pages that are shared."""
        new: dict[Page, Page] = {}
        start = self.store.quantized_start
        for mine in [self.rows[row] for row in rows]:
            if mine.level or not 0 < start <= mine.length:
                continue
            mine.level = 1
            for index, page in enumerate(mine.pages):
                if page.level == 0:
                    if page not in new:
                        new[page] = Page(0, page.start, list(page.layers))
                        self.convert(new[page], 1)
                    mine.pages[index] = new[page]

    def convert(self, page: Page, level: int) -> None:
        """Convert a page to a lower level. A side with the same packing does not change."""
        if page.level >= level:
            return
        for layer, packings in enumerate(self.packings):
            page.layers[layer] = tuple(
                side if before == after else packed(side, after)
                for side, before, after in zip(
                    page.layers[layer], packings[page.level], packings[level], strict=True
                )
            )
        page.level = level

    def can_trim(self, row: Row, count: int) -> bool:
        """Return whether everything that the next query would see is still held."""
        mine = self.rows[row]
        length = mine.length - count
        held = {page.start // PAGE_TOKENS for page in mine.pages}
        low = max(0, oldest_seen(self.kind, length))
        seen = {*range(low, min(length, mine.tail_start)), *range(min(self.kind.keep, length))}
        return {at // PAGE_TOKENS for at in seen if at < mine.tail_start} <= held

    def trim(self, row: Row, count: int) -> None:
        mine = self.rows[row]
        mine.length -= count
        while mine.tail_start > mine.length:
            page = mine.pages.pop()
            mine.paged -= 1
            assert page.start == mine.tail_start
            mine.tail = list(page.layers)
        keep = mine.length - mine.tail_start
        mine.tail = [(k[:, :keep], v[:, :keep]) for k, v in mine.tail]

    def follow_step_down(self, level: int) -> int:
        """Convert the pages that a step-down has moved to ``level``. Returns how many."""
        changed = {
            page
            for row, mine in self.rows.items()
            for page, real in zip(mine.pages, row.pages, strict=True)
            if page.level != real.level
        }
        for page in changed:
            assert page.level < level
            self.convert(page, level)
        return len(changed)

    # Content.

    def dense(self, row: Row, layer: int) -> tuple[mx.array, mx.array]:
        """Return keys and values of all positions."""
        mine = self.rows[row]
        sides = []
        for side in (0, 1):
            tail = mine.tail[layer][side]
            out = np.full((tail.shape[0], mine.length, tail.shape[2]), NOWHERE, np.float32)
            for page in mine.pages:
                out[:, page.start : page.start + PAGE_TOKENS] = page.layers[layer][side]
            out[:, mine.tail_start :] = tail
            sides.append(mx.array(out))
        return sides[0], sides[1]

    # Comparison.

    def check(self) -> None:
        check_store(self.store)
        assert set(self.rows) == {*self.store.rows, *self.store.snapshots.all}
        real = self._check_rows()
        self._check_pages(real)
        self._check_tails()
        self._check_bytes()

    def _check_rows(self) -> dict[Page, PageId]:
        """Compare lengths, levels, positions and references. Returns where each page is stored."""
        places: dict[Page, PageId] = {}
        holders: Counter[Page] = Counter()
        for row, mine in self.rows.items():
            assert row.alive
            assert row.length == mine.length
            assert row.level == mine.level
            assert row.tail_start == mine.tail_start
            starts = [row.start(index) for index in range(len(row.pages))]
            assert starts == [page.start for page in mine.pages]
            for page, place in zip(mine.pages, row.pages, strict=True):
                assert places.setdefault(page, place) == place, (
                    "rows that share a page have different ones"
                )
                assert place.level == page.level
                holders[page] += 1
        assert len(set(places.values())) == len(places), "two pages in one place"
        for page, count in holders.items():
            place = places[page]
            assert self.store.pages.allocators[place.level].references[place.slot] == count
        seen = {
            page for row, mine in self.rows.items() if not row.is_snapshot for page in mine.pages
        }
        for allocator in self.store.pages.allocators:
            mine = [page for page in places if page.level == allocator.level]
            ahead = [page for row in self.rows for page in row.written_ahead]
            here = sum(page.level == allocator.level for page in ahead)
            assert allocator.used == len(mine) + here
            assert allocator.idle == sum(page not in seen for page in mine)
        return places

    def _check_pages(self, places: dict[Page, PageId]) -> None:
        compared: list[tuple[mx.array, np.ndarray]] = []
        for level in self.store.pages.levels:
            pages = [page for page in places if page.level == level]
            if not pages:
                continue
            slots = mx.array([places[page].slot for page in pages])
            for index, layer in enumerate(self.store.layers):
                for side, found in enumerate(layer.pools[level].read(slots)):
                    want = np.stack([page.layers[index][side] for page in pages])
                    compared.append((found, want))
        mx.eval([found for found, _ in compared])  # at once, which takes half the time
        for found, want in compared:
            agree(found, want)

    def _check_tails(self) -> None:
        for index, layer in enumerate(self.store.layers):
            for side, tails in enumerate((layer.tail_keys, layer.tail_values)):
                found = np.asarray(tails)  # without a copy
                for row, mine in self.rows.items():
                    want = mine.tail[index][side]
                    if isinstance(row, RowSnapshot):
                        agree(row.tails[index][side], want)
                    else:
                        agree(found[row.slot, :, : want.shape[1]], want)

    def _check_bytes(self) -> None:
        store = self.store
        rows = store.tails.count
        assert rows >= len(store.rows)
        total = 0
        for layer, geometry, packings in zip(
            store.layers, self.geometries, self.packings, strict=True
        ):
            want = rows * geometry.kv_heads * (geometry.k_dim + geometry.v_dim) * TAIL * 4
            for pool, both in zip(layer.pools, packings, strict=True):
                for side, packing in enumerate(both):
                    want += pool.capacities[side] * bytes_of_page(geometry, side, packing)
            assert sum(array.nbytes for array in layer.arrays()) == layer.nbytes == want
            tokens = sum(
                mine.tail[0][0].shape[1] for row, mine in self.rows.items() if row.is_snapshot
            )
            total += want + tokens * geometry.kv_heads * (geometry.k_dim + geometry.v_dim) * 4
        assert store.nbytes == total

    def read(self, row: Row) -> None:
        """Compare `KVStore.read` and `positions` of one row."""
        positions = self.store.positions(row)
        for layer in range(len(self.geometries)):
            for found, dense in zip(
                self.store.read(row, layer), self.dense(row, layer), strict=True
            ):
                agree(found, np.array(dense)[:, positions])


def agree(found: mx.array | np.ndarray, want: np.ndarray, tolerance: float = 1e-6) -> None:
    found = np.asarray(found)
    assert found.shape == want.shape
    # Also fails for NaN, because every comparison with NaN is False.
    assert found.size == 0 or np.abs(found - want).max() <= tolerance


@dataclass(eq=False)
class DenseSequence:
    """One sequence's recurrent state: the sum of its inputs, and the last two inputs."""

    total: np.ndarray
    """``[3]``."""
    last: np.ndarray
    """``[2, 4]``."""
    started: bool = False


class DenseModel:
    """The model of a `ModelCache`."""

    def __init__(self, cache: ModelCache) -> None:
        self.cache = cache
        self.stores = [DenseStore(store) for store in cache.stores]
        self.sequences: dict[SequenceRow, DenseSequence] = {}
        self.snapshots: dict[SequenceSnapshot, DenseSequence] = {}
        self.left = 0
        """Sequences freed since the last pass."""

    def add(self, sequence: SequenceRow) -> None:
        for store, row in zip(self.stores, sequence.rows, strict=True):
            store.add(row)
        self.sequences[sequence] = DenseSequence(
            np.zeros(3, np.float32), np.zeros((2, 4), np.float32)
        )

    def snapshot(self, sequence: SequenceRow, snapshot: SequenceSnapshot) -> None:
        for store, row in zip(self.stores, sequence.rows, strict=True):
            store.leave_dense([row])
        self._copy_rows(sequence, snapshot)
        mine = self.sequences[sequence]
        self.snapshots[snapshot] = DenseSequence(mine.total, mine.last, mine.started)

    def restore(self, snapshot: SequenceSnapshot, sequence: SequenceRow) -> None:
        self._copy_rows(snapshot, sequence)
        mine = self.snapshots[snapshot]
        self.sequences[sequence] = DenseSequence(mine.total, mine.last, mine.started)

    def _copy_rows(
        self, source: SequenceRow | SequenceSnapshot, target: SequenceRow | SequenceSnapshot
    ) -> None:
        for store, row, other in zip(self.stores, source.rows, target.rows, strict=True):
            store.copy(row, other)

    def drop(self, snapshot: SequenceSnapshot) -> None:
        for store, row in zip(self.stores, snapshot.rows, strict=True):
            del store.rows[row]
        del self.snapshots[snapshot]

    def free(self, sequence: SequenceRow) -> None:
        for store, row in zip(self.stores, sequence.rows, strict=True):
            del store.rows[row]
        del self.sequences[sequence]
        self.left += 1

    def step(self, sequences: list[SequenceRow], inputs: list[np.ndarray]) -> None:
        """Add each sequence's inputs, ``[tokens, 4]``, to its state."""
        self.left = 0
        for sequence, tokens in zip(sequences, inputs, strict=True):
            mine = self.sequences[sequence]
            mine.total = mine.total + tokens[:, :3].sum(axis=0)
            mine.last = np.concatenate([mine.last, tokens])[-2:]
            mine.started = True

    def flush(self) -> None:
        for store in self.stores:
            store.flush()

    def check(self) -> None:
        check_cache(self.cache)
        assert set(self.cache.sequences) == set(self.sequences)
        assert set(self.cache.snapshots.all) == set(self.snapshots)
        for store in self.stores:
            store.check()
        self._check_states()
        for snapshot, mine in self.snapshots.items():
            self._check_state(mine, snapshot.state)
        arrays = [
            array for store in self.cache.stores for one in store.layers for array in one.arrays()
        ]
        tails = [
            side
            for snapshot in self.snapshots
            for row in snapshot.rows
            for sides in row.tails
            for side in sides
        ]
        states = [
            array
            for snapshot in self.snapshots
            for part in snapshot.state
            for array in part
            if array is not None
        ]
        held = [*arrays, *self.cache.states.arrays(), *tails, *states]
        assert self.cache.nbytes == sum(array.nbytes for array in held)
        assert self.cache.snapshots.nbytes == sum(array.nbytes for array in [*tails, *states])

    def _check_states(self) -> None:
        states = self.cache.states
        if not states.parts:
            return
        count = sum(mine.started for mine in self.sequences.values())
        held, odd = divmod(states.nbytes, STATE_BYTES * len(states.parts))
        assert not odd, "states have padding, or are incomplete"
        # A removed sequence keeps its place in a block until the next pass.
        assert count <= held <= count + self.left
        for sequence, mine in self.sequences.items():
            self._check_state(mine, states.state_of(sequence))

    def _check_state(self, mine: DenseSequence, state: State) -> None:
        for total, last in state:
            if mine.started:
                agree(total[0], mine.total)
                agree(last[0], mine.last)
            else:
                assert total is None
                assert last is None

    def check_state(self, sequence: SequenceRow) -> None:
        """Compare the result of `StateStore.state_of`."""
        self._check_state(self.sequences[sequence], self.cache.states.state_of(sequence))
