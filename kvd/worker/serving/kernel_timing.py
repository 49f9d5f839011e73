"""Times one layer's decode attention on this device, in kernels and in plain operations.

The step has the layer's own heads, and four rows of a few thousand keys, in pages of zeros. Several
calls are evaluated at once, and each depends on the one before it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx

from kvd.worker.attention.decode import decode_attention
from kvd.worker.attention.fused import FusedBackend
from kvd.worker.cache.batch import DecodeHandle
from kvd.worker.cache.rows import Row
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry, Scheme
from kvd.worker.cache.store import KVStore
from kvd.worker.serving.timed_kernels import KernelVariant

ROWS = 4
KEYS = 4096
TAIL = 70
CALLS = 8
REPEATS = 5


@dataclass(frozen=True)
class Times:
    """Seconds of a layer's attention, on average over the layers."""

    fused_s: float
    reference_s: float
    keys: int
    """Keys of each of the `ROWS` rows; a window may hide some of them."""


def compare(
    stores: Sequence[KVStore], backend: FusedBackend, variants: Collection[KernelVariant]
) -> Times | None:
    """Time kernels and plain operations for these layers; None if no variant fits any layer.

    ``variants``: the kernels that the model has requested. Uses at most half of the stores'
    scratch.
    """
    fused = reference = 0.0
    layers, keys = 0, KEYS
    for store in stores:
        level = 1 if store.quantized_start else 0
        kinds = Counter((layer.geometry, layer.pools[level].scheme) for layer in store.layers)
        for (geometry, scheme), count in kinds.items():
            fitting = (candidate for candidate in variants if _is_for(candidate, geometry))
            if (variant := next(fitting, None)) is None:
                continue
            handle, its_keys = _handle(geometry, scheme, store, backend)
            plain = replace(handle, step=replace(handle.step, backend=None))
            fused += count * _seconds(handle, variant)
            reference += count * _seconds(plain, variant)
            layers, keys = layers + count, min(keys, its_keys)
    return Times(fused / layers, reference / layers, keys) if layers else None


def _is_for(variant: KernelVariant, geometry: LayerGeometry) -> bool:
    sizes = (geometry.kv_heads, geometry.k_dim, geometry.v_dim)
    return sizes == (variant.kv_heads, variant.k_dim, variant.v_dim)


def _handle(
    geometry: LayerGeometry, scheme: Scheme, like: KVStore, backend: FusedBackend
) -> tuple[DecodeHandle, int]:
    """Return a decode step over one layer, and the number of keys of its rows."""
    store = KVStore([geometry], scheme, like.dtype, kind=like.kind)
    store.page_product, store.backend = like.page_product, backend
    store.pages.spare = lambda: 0  # the pools must not grow further
    # Half of the scratch may be used. Growing copies a pool, so pages may take half of that.
    fitting = like.scratch.limit // 4 // (ROWS * store.pages.page_bytes())
    length = PAGE_TOKENS * max(1, min(KEYS // PAGE_TOKENS, fitting))
    count = length // PAGE_TOKENS
    if like.kind.bounded:
        count = min(count, like.kind.max_pages(length))
    rows: list[Row] = [store.new_row() for _ in range(ROWS)]
    pages = store.pages.take(0, ROWS * count)
    for index, row in enumerate(rows):
        # As in serving, the slots of the rows are interleaved.
        row.pages = pages[index::ROWS]
        row.skipped = length // PAGE_TOKENS - count
        row.length = length + TAIL
    return DecodeHandle(store, store.layers[0], store.begin_decode(rows)), length


def _seconds(handle: DecodeHandle, variant: KernelVariant) -> float:
    queries = mx.zeros((ROWS, variant.q_heads, 1, variant.k_dim), variant.dtype)
    sinks = None if variant.sinks is None else mx.zeros((variant.q_heads,), variant.sinks)

    def chain() -> mx.array:
        found = chained = queries
        for _ in range(CALLS):
            found = decode_attention(chained, handle, variant.scale, sinks)
            (chained,) = mx.depends([queries], [found])
        return found

    mx.eval(queries, chain())
    times = []
    for _ in range(REPEATS):
        lazy = chain()  # not timed: serving builds the graph once and compiles it
        start = time.perf_counter()
        mx.eval(lazy)
        times.append(time.perf_counter() - start)
    return statistics.median(times) / CALLS
