"""What a model sees as its cache of one attention layer, for the rows of the current step.

`BatchQuantizedKVCache` returns handles, on which only kvd's attention can compute.
`RectangleKVCache` returns dense arrays. Both have the interface of mlx-lm's caches, as far as a
forward pass uses it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.layer import Chunk, LayerStore
from kvd.worker.cache.rectangle import Rectangle, gathering_bytes, rectangle_of
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.steps import DecodeStep, PackedPrefill, PrefillStep
from kvd.worker.cache.store import KVStore
from kvd.worker.lean_imports import np
from protocol.pages import TAIL_TOKENS


@dataclass(frozen=True, eq=False)
class DecodeHandle:
    """Stands for the keys and values of a decode step's rows in one layer."""

    store: KVStore
    layer: LayerStore
    step: DecodeStep


@dataclass(frozen=True, eq=False)
class PrefillHandle:
    """Stands for the keys and values of a prefill step's row in one layer."""

    store: KVStore
    layer: LayerStore
    step: PrefillStep
    chunk: Chunk


@dataclass(frozen=True, eq=False)
class PackedHandle:
    """Stands for the keys and values of a packed prefill in one layer."""

    store: KVStore
    step: PackedPrefill
    parts: tuple[PrefillHandle, ...]
    keys: mx.array
    """``[batch, heads, 1, k_dim]``."""
    values: mx.array


KVHandle = DecodeHandle | PrefillHandle | PackedHandle


class OpaqueKV(ABC):
    """Keys and values of one forward pass of the drop-in's caches.

    `kvd.worker.serving.seam` calls `attend` instead of mlx-lm's attention.
    """

    kind: Kind

    @abstractmethod
    def attend(self, queries: mx.array, scale: float, sinks: mx.array | None) -> mx.array:
        """Attend queries ``[batch, q_heads, tokens, k_dim]`` causally.

        Returns ``[batch, q_heads, tokens, v_dim]``.
        """


class BatchQuantizedKVCache:
    """A cache that returns handles which only attention can use (`kvd.worker.serving.seam`).

    The probe detects models that use handles in any other way. ``batched``: positions are arrays
    with one entry per row. Otherwise they are ints, for models that take one row per pass.
    """

    def __init__(self, store: KVStore, layer: int, *, batched: bool = True) -> None:
        self.store = store
        self.layer = store.layers[layer]
        self._batched = batched
        self._fetched: Any = None
        self._is_reused = False
        """Whether layers of the model read what another layer has fetched."""

    @property
    def step(self) -> DecodeStep | PrefillStep | PackedPrefill:
        if self.store.step is None:
            raise RuntimeError("no step has begun: call begin_decode or begin_prefill first")
        return self.store.step

    @property
    def offset(self) -> mx.array | int:
        """Position of each sequence's first new token: ``[batch]`` int32.

        In a pass of the shape ``[1, tokens]``, and if not ``batched``, it is an int.
        """
        step = self.step
        if isinstance(step, PackedPrefill):
            return step.positions
        if isinstance(step, PrefillStep):
            return step.offset
        return step.offsets if self._batched else step.lengths[0] - 1

    @property
    def start_position(self) -> int:
        """First position that the pass's first query sees; read by models with chunked attention.

        Such models take one row per pass.
        """
        step = self.step
        assert not isinstance(step, PackedPrefill), "such models take no packed prefill"
        position = step.offset if isinstance(step, PrefillStep) else step.lengths[0] - 1
        return max(0, self.store.kind.low(position))

    def maybe_trim_front(self) -> None:
        """Do nothing: the store frees pages that leave a window."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append ``[batch, heads, tokens, dim]``; return one handle in place of keys and values."""
        step = self.step
        handle: KVHandle
        if isinstance(step, DecodeStep):
            step.append(self.layer, keys, values)
            handle = DecodeHandle(self.store, self.layer, step)
        elif isinstance(step, PackedPrefill):
            chunks = step.append(self.layer, keys, values)
            parts = tuple(
                PrefillHandle(self.store, self.layer, part, chunk)
                for part, chunk in zip(step.steps, chunks, strict=True)
            )
            handle = PackedHandle(self.store, step, parts, keys, values)
        else:
            chunk = step.append(self.layer, keys, values)
            handle = PrefillHandle(self.store, self.layer, step, chunk)
        self._fetched = fetched = handle, handle
        if not isinstance(step, DecodeStep):
            self.notify_appended()
        return fetched

    def notify_appended(self) -> None:
        """Report that the layer has got the keys and values of a prefill pass, which are lazy."""
        if self.store.on_chunk is not None:
            self.store.on_chunk(self.layer)

    def forget(self) -> None:
        """Drop what the finished pass fetched.

        It may reference pools, and a flush writes these in place only if nothing else does.
        """
        self._fetched = None

    def set_aside(self) -> Any:
        """Drop what the pass fetched, and return what later layers read, for `put_back`."""
        fetched = self._fetched if self._is_reused else None
        self._fetched = None
        return fetched

    def put_back(self, fetched: Any) -> None:
        self._fetched = fetched

    def keys_and_values(self) -> Any:
        """Return the step's keys and values again, for layers that reuse them."""
        self._is_reused = True
        return self._fetched

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        """Return no mask. Raises ``TypeError`` if the model needs an array or another window."""
        window = self.store.kind.window
        if window_size is not None and window_size != window:
            raise TypeError(f"the model asks for a window of {window_size} tokens, not {window}")
        if return_array and n > 1:
            raise TypeError("the model asks for a mask array")
        return None


class RectangleKVCache(BatchQuantizedKVCache):
    """A cache that returns arrays, dequantized for one step and left-padded as in mlx-lm."""

    def __init__(self, store: KVStore, layer: int, *, batched: bool = True) -> None:
        super().__init__(store, layer, batched=batched)
        self._taken = False
        self._chunk: Chunk | None = None

    @property
    def step(self) -> DecodeStep | PrefillStep:
        step = super().step
        assert not isinstance(step, PackedPrefill), "rectangles take no packed prefill"
        return step

    def forget(self) -> None:
        super().forget()
        self._taken = False
        self._chunk = None

    @property
    def keys(self) -> mx.array | None:
        """Keys of this pass, gathered at each access; lazy.

        If they were kept, the arrays of all layers would stay alive until the end of the pass. Some
        models assign to this attribute of mlx-lm's caches. Here, the assigned value is dropped.
        """
        return self._gathered()[0] if self._taken else None

    @keys.setter
    def keys(self, _: mx.array) -> None: ...

    @property
    def values(self) -> mx.array | None:
        return self._gathered()[1] if self._taken else None

    @values.setter
    def values(self, _: mx.array) -> None: ...

    @property
    def start_position(self) -> int:
        return int(self._rectangle().positions.min())

    def _rectangle(self) -> Rectangle:
        """Return the layout of the pass's tokens, which all layers of the store share."""
        step, kind = self.step, self.store.kind
        if "rectangle" not in step.shared:
            step.shared["rectangle"] = rectangle_of(step, kind)
        return cast("Rectangle", step.shared["rectangle"])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Append the new tokens; return all keys and values, ``[batch, heads, most, dim]``.

        ``most`` is the number of tokens in the row that has the most.
        """
        step, geometry = self.step, self.layer.geometry
        if values.shape[-1] != geometry.v_dim:  # the model reads no values (`probe`)
            values = mx.zeros((*keys.shape[:-1], geometry.v_dim), keys.dtype)
        self._make_room(keys, values)
        self._taken = True
        if isinstance(step, DecodeStep):
            step.append(self.layer, keys, values)
        else:
            self._chunk = step.append(self.layer, keys, values)
        return self._gathered()

    def keys_and_values(self) -> Any:
        """Return the result of the step's `update_and_fetch`, kept for the rest of the pass."""
        if self._fetched is None:
            self._make_room()
            self._fetched = self._gathered()
        return self._fetched

    def _make_room(self, *lazy: mx.array) -> None:
        """Evaluate earlier layers if their copies and this layer's would exceed the scratch."""
        step = self.step
        paged = PAGE_TOKENS * sum(len(table.starts) for table in step.tables)
        loose = (
            TAIL_TOKENS * len(step.rows)
            if isinstance(step, DecodeStep)
            else step.tail_length + step.count
        )
        cells = self._rectangle().positions.size
        if self.store.scratch.reserve(gathering_bytes([self.layer], paged, loose, cells)):
            mx.eval(*lazy)

    def _gathered(self) -> tuple[mx.array, mx.array]:
        step, rectangle = self.step, self._rectangle()
        if isinstance(step, DecodeStep):
            newest = step.tails(self.layer)
        else:
            assert self._chunk is not None, "a prefill step's chunk was not appended"
            newest = self._chunk.keys[None], self._chunk.values[None]
        paged = [self.layer.pools[table.level].read(table.host_slots) for table in step.tables]
        keys, values = (
            rectangle.gather([*(part[side] for part in paged), newest[side]]) for side in (0, 1)
        )
        return keys, values

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> mx.array | str | None:
        """Return mlx-lm's mask: None, ``causal``, bool ``[batch, 1, 1, most]`` or ``[n, most]``."""
        step, kind = self.step, self.store.kind
        if isinstance(step, DecodeStep) and self._batched:
            queries = np.array(step.lengths)[:, None] - 1
            return mx.array(self._sees(queries, window_size)[:, None, None])
        narrower = window_size is not None and window_size != kind.window
        if n == 1 and not narrower:
            return None
        if not (kind.bounded or narrower or return_array):
            return "causal"
        first = step.offset if isinstance(step, PrefillStep) else step.lengths[0] - 1
        return mx.array(self._sees(np.arange(first, first + n)[:, None], window_size))

    def _sees(self, queries: np.ndarray, window_size: int | None) -> np.ndarray:
        kind, positions = self.store.kind, self._rectangle().positions
        seen: np.ndarray = (positions >= 0) & (positions <= queries)
        if window_size is not None:
            # As in mlx-lm, the window that the model asks for applies to what the cache still has.
            return seen & ((positions > queries - window_size) | (positions < kind.keep))
        if kind.bounded:
            lows = np.vectorize(kind.low)(queries)
            seen &= (positions >= lows) | (positions < kind.keep)
        return seen


def make_caches(store: KVStore) -> list[BatchQuantizedKVCache]:
    """Return one cache per layer, for a model whose layers are all of the store's kind."""
    return [BatchQuantizedKVCache(store, layer) for layer in range(len(store.layers))]
