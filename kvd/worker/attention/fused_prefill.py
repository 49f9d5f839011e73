"""A packed prefill of one layer in few kernels, from its joined projection to its output (CUDA).

The host takes longer to launch a kernel than the device takes to run most kernels of a small model.
MLX's operations need 60 to 75 launches in each layer. These kernels replace most of them::

    spread       norms of heads, RoPE; queries, keys and values            `kernels.spread`
    pack         new pages of one level, quantized; tokens of new tails    `kernels.pack`
    unpack       dense copies of pages and tails of one part               `kernels.unpack`
    attend       the chunks of one part                                    `kernels.attend`
    combine      the splits of short chunks after many keys                `kernels.decode`

The flush writes all new tails of a layer with one more kernel. `pass_layout` says which keys each
chunk sees. Results are those of `kvd.worker.attention.packed`, except for rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, cast

import mlx.core as mx

from kvd.worker.attention.fused import FusedBackend, Kernels, RotarySettings
from kvd.worker.attention.kernels import attend
from kvd.worker.attention.kernels.append import PIECE
from kvd.worker.attention.kernels.arguments import (
    Attend,
    Heads,
    Pack,
    PassTokens,
    PutTails,
    Spread,
    Unpack,
)
from kvd.worker.attention.pass_layout import CopyPlan, NewTailPlaces, PassLayout, Room
from kvd.worker.cache.backend import schemes_of
from kvd.worker.cache.batch import BatchQuantizedKVCache
from kvd.worker.cache.layer import KeptTails, LayerStore, PendingPages
from kvd.worker.cache.page_tables import EARLIER
from kvd.worker.cache.steps import PackedPrefill
from kvd.worker.cache.store import KVStore
from protocol.memory_bounds import PARTS_ALIVE

OWN_BUFFERS = 10
"""Arrays that the `unpack` kernel reads or writes besides the pools."""
MOST_ELEMENTS = (1 << 31) - 1
"""Most elements of an array that kernels index with 32 bits."""
LEVEL_BUFFERS = 6
"""Arrays of the pages of one level, at most."""


@dataclass(frozen=True, eq=False)
class FusedTails:
    """The tails that a pass leaves in one layer. They are written into a copy of all tails."""

    in_place: ClassVar[bool] = False

    kernels: Kernels
    places: NewTailPlaces
    keys: mx.array
    """``[tokens, heads, dim]``: new tails, then kept tails."""
    values: mx.array

    def put(self, layer: LayerStore) -> None:
        """Write them; lazy."""
        if self.places.kept:
            layer.kept = KeptTails(self.keys, self.values, self.places.kept)
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
    heads: Heads
    positions: mx.array
    """Positions of the tokens, ``[batch]`` int32."""
    layout: PassLayout
    copies: tuple[mx.array, mx.array] | None
    """Dense keys and values of the current layer and part, ``[copies, kv_heads, dim]``; None: no
    chunk reads any."""

    @staticmethod
    def of(
        cache: BatchQuantizedKVCache, dtype: mx.Dtype, q_heads: int, scale: float
    ) -> FusedPass | None:
        """Return the current packed prefill, or None if these kernels do not fit it.

        ``dtype``: that of the layer's projections. All layers that use it must have the same
        ``q_heads`` and ``scale``.
        """
        store, step = cache.store, cache.step
        if not isinstance(step, PackedPrefill) or not isinstance(store.backend, FusedBackend):
            return None
        geometry = cache.layer.geometry
        sizes = q_heads, geometry.kv_heads, geometry.k_dim, geometry.v_dim
        heads = Heads(cache.layer.dtype, *sizes, scale)
        if "fused" not in step.shared:
            step.shared["fused"] = _pass_of(store, step, store.backend, heads)
        found = cast("FusedPass | None", step.shared["fused"])
        return None if found is None or heads.dtype != dtype or found.heads != heads else found

    def attend(self, cache: BatchQuantizedKVCache, qkv: mx.array, how: RotarySettings) -> mx.array:
        """Append a layer's keys and values, and attend; lazy.

        ``qkv``: queries, keys and values side by side, ``[batch, outputs]``, as the layer's joined
        projection returns them. Returns ``[batch, q_heads * v_dim]``.
        """
        layer = cache.layer
        geometry = layer.geometry
        queries, keys, values = self.kernels.spread(
            Spread(
                how.rotation,
                qkv,
                how.q_heads,
                geometry.kv_heads,
                (geometry.k_dim, geometry.v_dim),
                self.positions,
                how.frequencies,
                how.weights,
            )
        )
        tokens = PassTokens(keys, values, layer.tail_keys, layer.tail_values)
        filled = self._pack(layer, tokens)
        cache.notify_appended()
        found, last_read = list[mx.array](), keys
        for part in self.layout.parts:
            dense, ready = (keys, values), part.tiles
            if part.copies is not None and self.copies is not None:
                dense = self.copies
                ready = self._unpack(layer, tokens, part.copies, filled, last_read)
            given = Attend(
                queries, keys, values, *dense, ready, part.tiles, part.splits, part.tokens,
                self.heads.scale, self.layout.tiling.warpgroups,
            )  # fmt: skip
            found.append(self.kernels.attend(given))
            if part.copies is not None:
                last_read = found[-1]
        return found[0] if len(found) == 1 else mx.concatenate(found)

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

    def _unpack(
        self,
        layer: LayerStore,
        tokens: PassTokens,
        copies: CopyPlan,
        filled: dict[int, list[mx.array]],
        after: mx.array,
    ) -> mx.array:
        pools = [layer.pools[level % EARLIER] for level in copies.levels]
        arrays = [
            array
            for level, pool in zip(copies.levels, pools, strict=True)
            for array in (pool.arrays() if level < EARLIER else filled[level - EARLIER])
        ]
        assert self.copies is not None
        return self.kernels.unpack(
            Unpack(
                tokens,
                *self.copies,
                after,
                copies.paged,
                arrays,
                *schemes_of(pools),
                copies.copied,
            )
        )


def _pass_of(
    store: KVStore, step: PackedPrefill, backend: FusedBackend, heads: Heads
) -> FusedPass | None:
    geometry = store.layers[0].geometry
    if store.kind.bounded or any(layer.geometry != geometry for layer in store.layers):
        return None
    dims = heads.k_dim, heads.v_dim
    if any(not dim or dim * store.dtype.size % PIECE for dim in dims):
        return None
    tiling = backend.kernels.tiling(heads)
    if tiling is None:
        return None
    most_copied = min(
        store.scratch.limit // geometry.dense_bytes(1),
        MOST_ELEMENTS // (heads.kv_heads * max(dims)),
    )
    # Several layers' results exist at once, as in decode steps.
    entry_bytes = PARTS_ALIVE * 4 * heads.q_heads * attend.vector_floats(heads)
    room = Room(most_copied, -(-entry_bytes // geometry.dense_bytes(1)))
    layout = PassLayout.of(step, room, replace(tiling, split_keys=backend.split_keys))
    if layout is None:
        return None
    levels = max((len(part.copies.levels) for part in layout.parts if part.copies), default=0)
    if OWN_BUFFERS + LEVEL_BUFFERS * levels > backend.most_buffers:
        return None
    copies = None
    if layout.copy_tokens:
        shape = layout.copy_tokens, heads.kv_heads
        keys, values = (mx.zeros((*shape, dim), store.dtype) for dim in dims)
        copies = keys, values
        store.scratch.hold(geometry.dense_bytes(layout.room_tokens))
    return FusedPass(backend.kernels, heads, step.positions, layout, copies)
