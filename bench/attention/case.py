"""A decode step over random pages, built with the engine's own store and caches.

Pages are quantized from normal noise and scattered over the pools. There are several layers, each
with its own pools, in one step, as in a model. Calls cycle through the layers, so that a small
layer does not stay in the GPU's cache.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from kvd.worker.cache.batch import DecodeHandle, make_caches
from kvd.worker.cache.layer import LayerStore
from kvd.worker.cache.pages import PageId
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme, full_pages
from kvd.worker.cache.store import KVStore

CALLS = 20
"""Calls in one evaluation. Each has its own queries, and its result is kept."""
COLD_BYTES = 192 << 20
"""Least bytes of all layers together, several times any GPU's L2 cache.

There are never more than `CALLS` layers, so the total is less if layers are very small.
"""
WRITTEN_AT_ONCE = 256
"""Pages that are quantized at once: few, so that their dense form stays small."""


@dataclass(frozen=True)
class Shape:
    """Rows and heads of a decode step."""

    lengths: tuple[int, ...]
    """Keys of each row, not counting the step's new one."""
    q_heads: int = 32
    kv_heads: int = 8
    dim: int = 128

    @property
    def name(self) -> str:
        """The case in words, such as ``8 x 32768, 32/8 heads of 128``."""
        counts = {length: self.lengths.count(length) for length in self.lengths}
        rows = " + ".join(f"{count} x {length}" for length, count in counts.items())
        return f"{rows}, {self.q_heads}/{self.kv_heads} heads of {self.dim}"

    @property
    def scale(self) -> float:
        """Factor by which attention scores are multiplied."""
        return float(self.dim**-0.5)

    def dense_bytes(self, itemsize: int) -> int:
        """Return the bytes that unquantized keys and values take, without padding."""
        tokens = sum(length + 1 for length in self.lengths)
        return tokens * self.kv_heads * 2 * self.dim * itemsize


def layers_for(nbytes: int) -> int:
    """Return how many layers of ``nbytes`` calls must cycle through to miss the GPU's cache."""
    return max(1, min(CALLS, -(-COLD_BYTES // nbytes)))


class Case:
    """A decode step of rows whose pages have one scheme. Creating it evaluates its arrays."""

    def __init__(self, shape: Shape, scheme: Scheme, dtype: mx.Dtype, *, seed: int = 0) -> None:
        mx.random.seed(seed)
        self.shape, self.scheme, self.dtype = shape, scheme, dtype
        geometry = LayerGeometry(shape.kv_heads, shape.dim, shape.dim, dtype.size)
        pages = sum(map(full_pages, shape.lengths))
        paged = pages * geometry.page_bytes(scheme)
        tails = sum(length + 1 - PAGE_TOKENS * full_pages(length) for length in shape.lengths)
        self.nbytes = paged + geometry.dense_bytes(tails)
        """Bytes that a call reads: one layer's pages and tails, including the new tokens."""
        self.store = KVStore([geometry] * layers_for(self.nbytes), scheme, dtype)
        self.rows = [self.store.new_row() for _ in shape.lengths]
        self._fill(self._take(pages, seed))
        self.queries = mx.random.normal((CALLS, len(self.rows), shape.q_heads, 1, shape.dim))
        self.queries = self.queries.astype(dtype)
        mx.eval(self.queries)
        self.step = self.store.begin_decode(self.rows)
        self.handles = [self._append(cache) for cache in make_caches(self.store)]
        mx.eval(self.store.arrays())

    @property
    def is_cold(self) -> bool:
        """Whether a call finds little of its bytes in the GPU's own cache."""
        return len(self.handles) * self.nbytes >= COLD_BYTES

    def handle(self, call: int) -> DecodeHandle:
        """Return what a call attends to."""
        return self.handles[call % len(self.handles)]

    def _take(self, pages: int, seed: int) -> list[PageId]:
        allocator = self.store.pages.allocators[0]
        for layer in self.store.layers:
            layer.pools[0].grow(pages)
        allocator.grow(pages)
        taken = allocator.take(pages)
        random.Random(seed).shuffle(taken)
        return taken

    def _fill(self, pages: list[PageId]) -> None:
        left = iter(pages)
        for row, length in zip(self.rows, self.shape.lengths, strict=True):
            row.pages = [next(left) for _ in range(full_pages(length))]
            row.length = length
        for layer in self.store.layers:
            _write_noise(layer, len(pages), self.dtype)
            for row in self.rows:
                layer.fill_tail(row.slot, *_noise(layer, row.tail_length, self.dtype))
        self.store.tables.invalidate()

    def _append(self, cache: object) -> DecodeHandle:
        layer = self.store.layers[0]
        keys, values = (
            mx.stack([_noise(layer, 1, self.dtype)[side] for _ in self.rows]) for side in (0, 1)
        )
        handle, _ = cache.update_and_fetch(keys, values)  # type: ignore[attr-defined]
        assert isinstance(handle, DecodeHandle)
        return handle


def _noise(layer: LayerStore, tokens: int, dtype: mx.Dtype) -> tuple[mx.array, mx.array]:
    shape = (layer.geometry.kv_heads, tokens, layer.geometry.k_dim)
    return mx.random.normal(shape).astype(dtype), mx.random.normal(shape).astype(dtype)


def _write_noise(layer: LayerStore, pages: int, dtype: mx.Dtype) -> None:
    g, pool = layer.geometry, layer.pools[0]
    for first in range(0, pages, WRITTEN_AT_ONCE):
        count = min(WRITTEN_AT_ONCE, pages - first)
        shape = (count, g.kv_heads, PAGE_TOKENS, g.k_dim)
        keys, values = (mx.random.normal(shape).astype(dtype) for _ in range(2))
        layer.write(0, list(range(first, first + count)), *pool.pack(keys, values))


def dense_copy(row: Row, handle: DecodeHandle) -> tuple[mx.array, mx.array]:
    """Return a row's keys and values, ``[heads, tokens, dim]``, dequantized in float32."""
    layer = handle.layer
    tail = slice(row.tail_length)
    keys = layer.tail_keys[row.slot, :, tail].astype(mx.float32)
    values = layer.tail_values[row.slot, :, tail].astype(mx.float32)
    if not row.pages:
        return keys, values
    pool, slots = layer.pools[0], mx.array([page.slot for page in row.pages])
    packed_keys, packed_values = pool.copy(slots)
    paged = pool.unpack(_widened(packed_keys), _widened(packed_values))
    k, v = (side.swapaxes(0, 1).flatten(1, 2).astype(mx.float32) for side in paged)
    return mx.concatenate([k, keys], axis=1), mx.concatenate([v, values], axis=1)


def _widened(packed: Sequence[mx.array]) -> tuple[mx.array, ...]:
    """Return packed pages with float32 scales and biases, so that they unpack to float32."""
    words, *scales = packed
    return (words, *(one.astype(mx.float32) for one in scales))
