"""Times one layer's decode attention on this device, in kernels and in plain operations.

On CUDA, MLX compiles most of the plain operations when they first run, one after another, about
five seconds each. So kernels within `DENSE_LIMIT` of dense attention are not compared there: plain
operations read the same pages, and take several times as long as dense attention (2 to 6 times on
an H200).

The step has the layer's own heads, and four rows of a few thousand keys, in pages of zeros. Several
calls are evaluated at once, and each depends on the one before it.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

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
DENSE_LIMIT = 4.0
"""Kernels that take less than so many times as long as dense attention are not compared with plain
operations on CUDA. They have two launches, dense attention has one, plain operations a dozen. Above
2, plain operations might be faster; to find out, MLX would compile two modules for 10 s."""

_Attend = Callable[[mx.array], mx.array]
"""Attention of queries ``[ROWS, q_heads, 1, k_dim]``, lazy."""


@dataclass(frozen=True)
class Times:
    """Seconds of a layer's attention, on average over the layers."""

    fused_s: float
    reference_s: float | None
    """None if plain operations were not timed: the kernels are faster, or used anyway."""
    keys: int
    """Keys of each of the `ROWS` rows; a window may hide some of them."""


def compare(
    stores: Sequence[KVStore],
    backend: FusedBackend,
    variants: Collection[KernelVariant],
    check_plain: Callable[[], object] | None,
) -> Times | None:
    """Time kernels and plain operations for these layers; None if no variant fits any layer.

    ``variants``: the kernels that the model has requested. ``check_plain``: checks the plain
    operations if they have to be timed; it may change the stores' products. Without it, they are
    not timed. Uses at most half of the stores' scratch.
    """
    fused = dense = reference = 0.0
    layers, keys = 0, KEYS
    for step in _steps(stores, backend, variants):
        fused += step.layers * _seconds(step.attend, step.variant)
        if mx.cuda.is_available():
            dense += step.layers * _seconds(step.attend_densely(), step.variant)
        layers, keys = layers + step.layers, min(keys, step.keys)
    if not layers:
        return None
    if check_plain is None or fused < DENSE_LIMIT * dense:
        return Times(fused / layers, None, keys)
    check_plain()
    for step in _steps(stores, None, variants):
        reference += step.layers * _seconds(step.attend, step.variant)
    return Times(fused / layers, reference / layers, keys)


@dataclass(frozen=True, eq=False)
class _Step:
    """A decode step over one of several equal layers."""

    handle: DecodeHandle
    variant: KernelVariant
    layers: int
    keys: int

    def attend(self, queries: mx.array) -> mx.array:
        return decode_attention(queries, self.handle, self.variant.scale, self._sinks)

    def attend_densely(self) -> _Attend:
        """Return MLX's attention to as many dense keys."""
        layer, step = self.handle.layer, self.handle.step
        count = min(self.keys, PAGE_TOKENS * len(step.rows[0].pages)) + TAIL
        sizes = layer.geometry.k_dim, layer.geometry.v_dim
        shape = ROWS, layer.geometry.kv_heads, count
        keys, values = (mx.zeros((*shape, dim), self.variant.dtype) for dim in sizes)
        mx.eval(keys, values)
        return partial(
            mx.fast.scaled_dot_product_attention,
            k=keys, v=values, scale=self.variant.scale, sinks=self._sinks,
        )  # fmt: skip

    @property
    def _sinks(self) -> mx.array | None:
        dtype = self.variant.sinks
        return None if dtype is None else mx.zeros((self.variant.q_heads,), dtype)


def _steps(
    stores: Sequence[KVStore], backend: FusedBackend | None, variants: Collection[KernelVariant]
) -> Iterator[_Step]:
    """Yield a step for each kind of layer that a variant fits; keep none of them."""
    for store in stores:
        level = 1 if store.quantized_start else 0
        kinds = Counter((layer.geometry, layer.pools[level].scheme) for layer in store.layers)
        for (geometry, scheme), count in kinds.items():
            fitting = (candidate for candidate in variants if _is_for(candidate, geometry))
            if (variant := next(fitting, None)) is not None:
                handle, keys = _handle(geometry, scheme, store, backend)
                yield _Step(handle, variant, count, keys)


def _is_for(variant: KernelVariant, geometry: LayerGeometry) -> bool:
    sizes = (geometry.kv_heads, geometry.k_dim, geometry.v_dim)
    return sizes == (variant.kv_heads, variant.k_dim, variant.v_dim)


def _handle(
    geometry: LayerGeometry, scheme: Scheme, like: KVStore, backend: FusedBackend | None
) -> tuple[DecodeHandle, int]:
    """Return a decode step over one layer, and the number of keys of its rows."""
    store = KVStore([geometry], scheme, like.dtype, kind=like.kind)
    store.page_product, store.backend = like.page_product, backend
    store.pages.spare = lambda: 0  # the pools must not grow further
    # Half of the scratch may be used. Growing copies a pool, so pages may take half of that, and
    # dense keys and values the other half.
    page_bytes = max(store.pages.page_bytes(), geometry.dense_bytes(PAGE_TOKENS))
    fitting = like.scratch.limit // 4 // (ROWS * page_bytes)
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


def _seconds(attend: _Attend, variant: KernelVariant) -> float:
    queries = mx.zeros((ROWS, variant.q_heads, 1, variant.k_dim), variant.dtype)

    def chain() -> mx.array:
        found = chained = queries
        for _ in range(CALLS):
            found = attend(chained)
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
