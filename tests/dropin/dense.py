"""The dense truth of a drop-in cache: rows, each with all keys and values that it was given."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from kvd.worker.attention.dense import dense_attention
from kvd.worker.cache.dropin import BatchQuantizedKVCache
from kvd.worker.seam import scaled_dot_product_attention

HEADS, QUERY_HEADS, K_DIM, V_DIM = 2, 4, 32, 64


@dataclass
class Sequence:
    keys: np.ndarray = field(default_factory=lambda: np.zeros((HEADS, 0, K_DIM), np.float32))
    values: np.ndarray = field(default_factory=lambda: np.zeros((HEADS, 0, V_DIM), np.float32))

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        self.keys = np.concatenate([self.keys, keys], axis=1)
        self.values = np.concatenate([self.values, values], axis=1)

    def trim(self, count: int) -> None:
        left = max(0, self.length - count)
        self.keys, self.values = self.keys[:, :left], self.values[:, :left]


@dataclass
class Twin:
    """A cache and what it should hold."""

    cache: BatchQuantizedKVCache
    rows: list[Sequence]
    tolerance: float = 2e-5

    def update(self, counts: list[int], rng: np.random.Generator, *, left: bool = False) -> None:
        """Append ``counts`` tokens to the rows, padded to a rectangle, and attend to all."""
        tokens = max(counts)
        padding = [tokens - count for count in counts]
        if left:
            self.cache.prepare(left_padding=padding)
        elif any(padding):
            self.cache.prepare(lengths=counts, right_padding=padding)
        offsets = np.array(self.cache.offset).reshape(-1)
        starts = padding if left else [0] * len(counts)
        wanted = [row.length - start for row, start in zip(self.rows, starts, strict=True)]
        assert offsets.tolist() == wanted[: len(offsets)]
        # Padding is junk of the worst kind: it must never be read.
        batch = len(counts)
        keys = np.full((batch, HEADS, tokens, K_DIM), np.nan, np.float32)
        values = np.full((batch, HEADS, tokens, V_DIM), np.nan, np.float32)
        queries = np.full((batch, QUERY_HEADS, tokens, K_DIM), np.nan, np.float32)
        spans = []
        for index, (count, start) in enumerate(zip(counts, starts, strict=True)):
            span = slice(start, start + count)
            spans.append(span)
            keys[index, :, span] = rng.normal(size=(HEADS, count, K_DIM))
            values[index, :, span] = rng.normal(size=(HEADS, count, V_DIM))
            queries[index, :, span] = rng.normal(size=(QUERY_HEADS, count, K_DIM))
            self.rows[index].append(keys[index, :, span], values[index, :, span])
        reading = self.cache.update_and_fetch(mx.array(keys), mx.array(values))
        output = np.array(
            scaled_dot_product_attention(
                mx.array(queries), *reading, cache=self.cache, scale=0.2, mask=None
            )
        )
        assert np.isfinite(output).all()
        for index, (row, span) in enumerate(zip(self.rows, spans, strict=True)):
            if not counts[index]:
                assert not output[index].any()
                continue
            true = dense_attention(
                mx.array(queries[index, :, span]),
                mx.array(row.keys),
                mx.array(row.values),
                0.2,
                kind=self.cache.kind,
            )
            np.testing.assert_allclose(output[index, :, span], np.array(true), atol=self.tolerance)
        if left or any(padding):
            self.cache.finalize()

    def trim(self, count: int) -> int:
        taken = self.cache.trim(count)
        for row in self.rows:
            row.trim(count)
        return taken

    def check(self) -> None:
        assert self.cache.lengths == [row.length for row in self.rows]
        assert self.cache.empty() == (not any(self.cache.lengths))
        for index, row in enumerate(self.rows):
            if not row.length:
                continue
            keys, values = (np.array(side) for side in self.cache.dense(index))
            assert np.isfinite(keys).all()
            assert np.isfinite(values).all()
            positions = self.cache.shared.rows.positions(self.cache.rows[index].row)
            seen = self.cache.kind.visible(mx.array([row.length]), mx.arange(row.length))
            assert set(np.flatnonzero(np.array(seen))) <= set(positions)
            atol = 10 * self.tolerance if self.tolerance > 1e-3 else 0
            np.testing.assert_allclose(keys, row.keys[:, positions], atol=atol)
            np.testing.assert_allclose(values, row.values[:, positions], atol=atol)

    def like(self, cache: Any, rows: list[Sequence] | None = None) -> Twin:
        """A twin of a cache that was made from this one."""
        copies = [copy.deepcopy(row) for row in (self.rows if rows is None else rows)]
        return Twin(cache, copies, self.tolerance)
