"""Rectangles: pages and tails gathered into dense arrays ``[rows, most]``.

Rectangles are for models that compute with keys and values as plain arrays. ``most`` is the number
of tokens of the longest row. Others are padded on the left, like mlx-lm's batches, so that the
newest tokens are at the end. The layout is computed once per step, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.packed import unpacking_bytes
from kvd.worker.cache.page_tables import LevelTable
from kvd.worker.cache.rows import SequenceRow
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.steps import DecodeStep, PrefillStep
from kvd.worker.cache.store import KVStore
from kvd.worker.lean_imports import np
from protocol.pages import TAIL_TOKENS


@dataclass(frozen=True)
class Rectangle:
    """An index into all tokens of a step: pages table by table, then tails or a chunk."""

    index: mx.array
    """``[rows, most]`` uint32. Entries of the padding point to one place after the last token."""
    positions: np.ndarray
    """``[rows, most]``, -1 in the padding."""

    def gather(self, parts: Sequence[mx.array]) -> mx.array:
        """Lay out ``[blocks, heads, tokens, dim]`` arrays as ``[rows, heads, most, dim]``; lazy."""
        flat = [part.swapaxes(1, 2).flatten(0, 1) for part in parts]
        padding = mx.zeros((1, *flat[0].shape[1:]), flat[0].dtype)
        return mx.concatenate([*flat, padding])[self.index].swapaxes(1, 2)


def gathering_bytes(layers: Sequence[LayerStore], paged: int, loose: int, cells: int) -> int:
    """Return the most bytes that one of these layers takes while its rectangle is gathered.

    These are a rectangle of ``cells`` tokens, including padding, and temporary copies. The
    ``paged`` tokens and the ``loose`` ones (of tails or a chunk) are copied three times:
    dequantized or taken from the tails, transposed, and concatenated. Measured peaks never exceed
    the sum, and are often a tenth lower.
    """
    return max(
        layer.geometry.dense_bytes(1) * (3 * (paged + loose) + cells) + paged * _unpacking(layer)
        for layer in layers
    )


def _unpacking(layer: LayerStore) -> int:
    g, itemsize = layer.geometry, layer.dtype.size
    return g.kv_heads * max(
        g.k_dim * unpacking_bytes(pool.key_packing.bits, itemsize)
        + g.v_dim * unpacking_bytes(pool.value_packing.bits, itemsize)
        for pool in layer.pools
    )


def rectangle_of(step: DecodeStep | PrefillStep, kind: Kind) -> Rectangle:
    """Lay out, for each row, the tokens that at least one of its queries sees, and new tokens."""
    if isinstance(step, PrefillStep):
        tokens = _Tokens()
        base = _add_pages([tokens], step.tables)
        count = step.tail_length + step.count
        tokens.add(base, step.tail_start, count)
        return _rectangle([tokens], [kind.low(step.offset)], kind, base + count)
    rows = [_Tokens() for _ in step.rows]
    base = _add_pages(rows, step.tables)
    for number, (row, tokens) in enumerate(zip(step.rows, rows, strict=True)):
        tokens.add(base + TAIL_TOKENS * number, row.tail_start, row.tail_length)
    lows = [kind.low(length - 1) for length in step.lengths]
    return _rectangle(rows, lows, kind, base + TAIL_TOKENS * len(rows))


class _Tokens:
    """One row's tokens: index and position of each."""

    def __init__(self) -> None:
        self._index: list[np.ndarray] = []
        self._positions: list[np.ndarray] = []

    def add(self, index: int, position: int, count: int) -> None:
        self._index.append(np.arange(index, index + count))
        self._positions.append(np.arange(position, position + count))

    def seen(self, low: int, keep: int) -> tuple[np.ndarray, np.ndarray]:
        index, positions = np.concatenate(self._index), np.concatenate(self._positions)
        order = np.argsort(positions)  # pages were added by level
        index, positions = index[order], positions[order]
        visible = (positions >= low) | (positions < keep)
        return index[visible], positions[visible]


def _add_pages(rows: list[_Tokens], tables: list[LevelTable]) -> int:
    base = 0
    for table in tables:
        for owner, start in zip(table.owners, table.starts, strict=True):
            rows[owner].add(base, start, PAGE_TOKENS)
            base += PAGE_TOKENS
    return base


def _rectangle(rows: list[_Tokens], lows: list[int], kind: Kind, padding: int) -> Rectangle:
    seen = [tokens.seen(low, kind.keep) for tokens, low in zip(rows, lows, strict=True)]
    most = max(len(index) for index, _ in seen)
    index = np.full((len(rows), most), padding, np.uint32)
    positions = np.full((len(rows), most), -1)
    for number, (places, where) in enumerate(seen):
        index[number, most - len(places) :] = places
        positions[number, most - len(where) :] = where
    return Rectangle(mx.array(index), positions)


class RectangleScratch:
    """Decides what fits the scratch of stores that are read as rectangles.

    ``stores``: by their index in the model's cache.
    """

    def __init__(self, stores: dict[int, KVStore]) -> None:
        self.stores = stores

    def excess_bytes(self, length: int, chunk: int = 0) -> int:
        """Return by how many bytes a sequence's rectangle of one layer exceeds the scratch."""
        most = 0
        for store in self.stores.values():
            paged = PAGE_TOKENS * store.kind.max_pages(length, chunk)
            loose = TAIL_TOKENS + chunk
            nbytes = gathering_bytes(store.layers, paged, loose, paged + loose)
            most = max(most, nbytes - store.scratch.limit)
        return most

    def passes(self, sequences: Sequence[SequenceRow]) -> list[list[int]]:
        """Return the passes in which sequences decode, as lists of indices of sequences.

        There is one pass, unless the rectangles would exceed the scratch. Then sequences of similar
        length share a pass: they are sorted by length, and each pass is filled before the next one.
        """
        indices = list(range(len(sequences)))
        if not self.stores or self._fits(sequences):
            return [indices]
        groups: list[list[int]] = [[]]
        for index in sorted(indices, key=lambda index: sequences[index].length):
            group = [*groups[-1], index]
            if groups[-1] and not self._fits([sequences[member] for member in group]):
                group = [index]
                groups.append(group)
            groups[-1] = group
        return [sorted(group) for group in groups]

    def _fits(self, sequences: Sequence[SequenceRow]) -> bool:
        for number, store in self.stores.items():
            rows = [sequence.rows[number] for sequence in sequences]
            paged = [PAGE_TOKENS * (len(row.pages) + row.commits_next) for row in rows]
            most = max(
                tokens + row.tail_length + 1 for tokens, row in zip(paged, rows, strict=True)
            )
            loose = TAIL_TOKENS * len(rows)
            nbytes = gathering_bytes(store.layers, sum(paged), loose, len(rows) * most)
            if nbytes > store.scratch.limit:
                return False
        return True
