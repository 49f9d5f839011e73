"""A packed prefill of one layer in few kernels, from its joined projection to its output.

Launching a kernel takes the host longer than most of a small model's kernels take the device. Plain
operations launch 60 to 75 in each layer. These kernels replace most of them::

    spread       norms of heads, RoPE; queries, keys and values to their places   `kernels.spread`
    pack         new pages, quantized, and tokens of new tails                    `kernels.pack`
    unpack       dense copies of rows that have earlier tokens                    `kernels.unpack`
    attention    MLX's dense kernel, once or more
    gather       its results as the batch                                         `kernels.copies`

The flush writes all new tails of a layer with one more kernel. `pass_layout` maps tokens to places.
Results are those of `kvd.worker.attention.packed`, except for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import mlx.core as mx

from kvd.worker.attention.fused import FusedBackend, Kernels, RotarySettings
from kvd.worker.attention.kernels.append import PIECE
from kvd.worker.attention.kernels.arguments import Pack, PassTokens, PutTails, Spread, Unpack
from kvd.worker.attention.pass_layout import (
    MOST_PARTS,
    TOGETHER,
    Call,
    DenseCopies,
    NewTailPlaces,
    PassLayout,
)
from kvd.worker.attention.prefill import is_fused_available
from kvd.worker.attention.tiles import MOST_SCORES, Work
from kvd.worker.cache.backend import schemes_of
from kvd.worker.cache.batch import BatchQuantizedKVCache
from kvd.worker.cache.layer import LayerStore, PendingPages
from kvd.worker.cache.padded_sizes import padded_width
from kvd.worker.cache.page_tables import EARLIER
from kvd.worker.cache.scheme import PAGE_TOKENS, LayerGeometry
from kvd.worker.cache.steps import PackedPrefill
from kvd.worker.cache.store import KVStore

OWN_BUFFERS = 8
"""Arrays that the `unpack` kernel reads or writes besides the pools."""
LEVEL_BUFFERS = 6
"""Arrays of the pages of one level, at most."""


@dataclass(frozen=True, eq=False)
class FusedTails:
    """The tails that a pass leaves in one layer. They are written into a copy of all tails."""

    in_place: ClassVar[bool] = False

    kernels: Kernels
    places: NewTailPlaces
    keys: mx.array
    """``[tokens, heads, dim]``, tail by tail."""
    values: mx.array

    def put(self, layer: LayerStore) -> None:
        """Write them; lazy."""
        given = PutTails(
            layer.tail_keys,
            layer.tail_values,
            self.keys,
            self.values,
            self.places.starts(layer.tail_keys.shape[0]),
        )
        layer.tail_keys, layer.tail_values = self.kernels.put_tails(given)


@dataclass(frozen=True, eq=False)
class FusedPass:
    """A packed prefill by kernels: what is the same in all layers."""

    kernels: Kernels
    store: KVStore
    step: PackedPrefill
    layout: PassLayout
    has_fused: bool
    """Whether MLX has a kernel for this attention that makes no matrix of scores."""

    @staticmethod
    def of(cache: BatchQuantizedKVCache, dtype: mx.Dtype, q_heads: int) -> FusedPass | None:
        """Return the current packed prefill, or None if these kernels do not fit it.

        ``dtype``: that of the layer's projections. ``q_heads``: query heads of each layer.
        """
        store, step = cache.store, cache.step
        if not isinstance(step, PackedPrefill) or not isinstance(store.backend, FusedBackend):
            return None
        if cache.layer.dtype != dtype:
            return None
        if "fused" not in step.shared:
            step.shared["fused"] = _pass_of(store, step, store.backend, q_heads)
        return cast("FusedPass | None", step.shared["fused"])

    def attend(
        self, cache: BatchQuantizedKVCache, qkv: mx.array, how: RotarySettings, scale: float
    ) -> mx.array:
        """Append a layer's keys and values, and attend; lazy as far as the scratch allows.

        ``qkv``: queries, keys and values side by side, ``[batch, outputs]``, as the layer's joined
        projection returns them. Returns ``[batch, q_heads * v_dim]``.
        """
        layer = cache.layer
        geometry = layer.geometry
        queries, keys, values = self.kernels.spread(
            Spread(
                how.rotation,
                qkv,
                self.layout.sources,
                how.q_heads,
                geometry.kv_heads,
                (geometry.k_dim, geometry.v_dim),
                self.step.positions,
                how.frequencies,
                how.weights,
            )
        )
        tokens = PassTokens(keys, values, layer.tail_keys, layer.tail_values)
        filled = self._pack(layer, tokens)
        cache.notify_appended()
        found, copied = list[mx.array](), -1
        for call in self.layout.calls:
            sides, lazy = (keys, values), [queries, keys, values, *found]
            if not self.has_fused:
                self._make_room(call.pairs * how.q_heads * qkv.dtype.size, lazy)
            if call.copies is not None:
                if call.copies != copied:
                    copied, copies = call.copies, self.layout.copies[call.copies]
                    self._make_room(geometry.dense_bytes(copies.tokens), lazy)
                    dense = self._unpack(layer, tokens, copies, filled)
                sides = dense
            found.append(_attended(call, queries, *sides, scale, has_fused=self.has_fused))
        return self._gathered(found)

    def _pack(self, layer: LayerStore, tokens: PassTokens) -> dict[int, list[mx.array]]:
        """Leave new pages and tails for the flush. Return the pages' arrays by level."""
        filled, tails = dict[int, list[mx.array]](), self.layout.tails
        kept = tails.tokens
        for number, level in enumerate(self.layout.pages or (None,)):
            pool = None if level is None else layer.pools[level]
            given = Pack(
                tokens,
                None if level is None else self.layout.pages[level],
                schemes_of([] if pool is None else [pool]),
                kept if number == 0 else kept[:1],  # kernels get no empty arrays
            )
            *packed, new_keys, new_values = self.kernels.pack(given)
            if number == 0:
                layer.new_tails.append(FusedTails(self.kernels, tails, new_keys, new_values))
            if pool is not None and level is not None:
                ends = len(pool.keys)
                pages = PendingPages(level, tuple(packed[:ends]), tuple(packed[ends:]))
                layer.pending.append(pages)
                filled[level] = packed
        return filled

    def _make_room(self, nbytes: int, lazy: Sequence[mx.array]) -> None:
        """Evaluate ``lazy`` if ``nbytes`` more would exceed the scratch."""
        if self.store.scratch.add(nbytes):
            mx.eval(*lazy)
            self.store.scratch.add(nbytes)

    def _unpack(
        self,
        layer: LayerStore,
        tokens: PassTokens,
        copies: DenseCopies,
        filled: dict[int, list[mx.array]],
    ) -> tuple[mx.array, mx.array]:
        pools = [layer.pools[level % EARLIER] for level in copies.levels]
        arrays = [
            array
            for level, pool in zip(copies.levels, pools, strict=True)
            for array in (pool.arrays() if level < EARLIER else filled[level - EARLIER])
        ]
        given = Unpack(
            tokens, copies.tokens, copies.paged, arrays, *schemes_of(pools), copies.copied
        )
        return self.kernels.unpack(given)

    def _gathered(self, found: list[mx.array]) -> mx.array:
        """Return the results of all calls as the batch. Kernels are compiled for powers of two."""
        rows = self.layout.rows
        if rows is None:
            return found[0]
        if len(found) > MOST_PARTS:
            found = [mx.concatenate(found)]
        count = 1 << (len(found) - 1).bit_length()
        return self.kernels.gather(found + found[:1] * (count - len(found)), rows)


def _pass_of(
    store: KVStore, step: PackedPrefill, backend: FusedBackend, q_heads: int
) -> FusedPass | None:
    geometries = [layer.geometry for layer in store.layers]
    if store.kind.bounded or any(one.v_dim == 0 for one in geometries):
        return None
    if any(dim * one.itemsize % PIECE for one in geometries for dim in (one.k_dim, one.v_dim)):
        return None
    has_fused = all(_is_fused(one, q_heads, store.dtype) for one in geometries)
    row_bytes = max(one.dense_bytes(1) for one in geometries)
    pairs = q_heads * max(padded_width(one.count) for one in step.steps)
    if not has_fused:
        row_bytes += TOGETHER * pairs * store.dtype.size
    most_tokens = min(store.scratch.limit // row_bytes, MOST_SCORES // pairs)
    layout = PassLayout.of(step, most_tokens)
    if layout is None:
        return None
    levels = max((len(copies.levels) for copies in layout.copies), default=0)
    if OWN_BUFFERS + LEVEL_BUFFERS * levels > backend.most_buffers:
        return None
    return FusedPass(backend.kernels, store, step, layout, has_fused)


def _is_fused(geometry: LayerGeometry, q_heads: int, dtype: mx.Dtype) -> bool:
    work = Work(
        geometry.kv_heads,
        q_heads // geometry.kv_heads,
        PAGE_TOKENS,
        PAGE_TOKENS,
        geometry.k_dim,
        geometry.v_dim,
        dtype.size,
    )
    return is_fused_available(work, dtype, None, mx.default_device().type)


def _attended(
    call: Call,
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    *,
    has_fused: bool,
) -> mx.array:
    """Attend the chunks of a call. Return ``[chunks * width, q_heads * v_dim]``."""
    chunks, places = len(call.chunks), call.places
    read = call.tokens or places
    q, k, v = (
        mx.unflatten(side[some], 0, (chunks, -1)).swapaxes(1, 2)
        for side, some in ((queries, places), (keys, read), (values, read))
    )
    found: mx.array = mx.fast.scaled_dot_product_attention(
        q, k, v, scale=scale, mask="causal", force_fused=has_fused
    )
    return found.swapaxes(1, 2).flatten(0, 1).flatten(1)
