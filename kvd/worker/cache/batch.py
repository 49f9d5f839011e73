"""What a model sees as its cache of one attention layer, for the rows of the current step.

The interface is that of mlx-lm's caches, as far as a forward pass uses it, in two forms:

* `BatchQuantizedKVCache`: what `update_and_fetch` returns can only be attended to
  (`kvd.worker.serving.seam`); a model that does anything else with it is found out by the probe;
* `RectangleKVCache`: plain arrays, dequantized for this step, left-padded as mlx-lm's own batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvd.worker.cache.layer import Chunk, LayerStore
from kvd.worker.cache.prefill_group import PrefillGroup
from kvd.worker.cache.rectangle import (
    Rectangle,
    decode_rectangle,
    gathering_bytes,
    prefill_rectangle,
)
from kvd.worker.cache.rows import TAIL_TOKENS
from kvd.worker.cache.scheme import PAGE_TOKENS
from kvd.worker.cache.steps import DecodeStep, PrefillStep
from kvd.worker.cache.store import KVStore


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
class GroupHandle:
    """Stands for the keys and values of several rows' prefill in one layer."""

    store: KVStore
    step: PrefillGroup
    parts: tuple[PrefillHandle, ...]
    """One a row."""
    keys: mx.array
    """``[rows, heads, width, dim]``: the chunks' own, with the padding."""
    values: mx.array


KVHandle = DecodeHandle | PrefillHandle | GroupHandle


class BatchQuantizedKVCache:
    """One layer's cache for the rows of the store's current step.

    ``batched``: positions are arrays, one a row; else ints, for models that take one row a pass.
    """

    def __init__(self, store: KVStore, layer: int, *, batched: bool = True) -> None:
        self._store = store
        self._layer = store.layers[layer]
        self._batched = batched
        self._fetched: Any = None

    @property
    def step(self) -> DecodeStep | PrefillStep | PrefillGroup:
        """The forward pass that is under way."""
        if self._store.step is None:
            raise RuntimeError("begin a step before the forward pass")
        return self._store.step

    @property
    def layer(self) -> LayerStore:
        """The layer's part of the store."""
        return self._layer

    @property
    def offset(self) -> mx.array | int:
        """Position of the first new token: ``[batch]`` int32 where rows share a pass, else int."""
        step = self.step
        if isinstance(step, PrefillGroup):
            return step.offsets if len(step.steps) > 1 else step.steps[0].offset
        if isinstance(step, PrefillStep):
            return step.offset
        return step.offsets if self._batched else step.lengths[0] - 1

    @property
    def start_position(self) -> int:
        """Position from which a chunked model looks at tokens; for one row a pass."""
        step = self.step
        if isinstance(step, PrefillGroup):
            step = step.steps[0]
        position = step.offset if isinstance(step, PrefillStep) else step.lengths[0] - 1
        return max(0, self._store.kind.low(position))

    def maybe_trim_front(self) -> None:
        """Do nothing: pages fall out by themselves."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Take the new tokens' keys and values, ``[batch, heads, tokens, dim]``.

        Returns the same handle twice, in the places of keys and values.
        """
        step = self.step
        handle: KVHandle
        if isinstance(step, DecodeStep):
            self._layer.append(step, keys, values)
            handle = DecodeHandle(self._store, self._layer, step)
        elif isinstance(step, PrefillGroup):
            handle = GroupHandle(self._store, step, self._parts(step, keys, values), keys, values)
        else:
            chunk = self._layer.extend(step, keys, values)
            handle = PrefillHandle(self._store, self._layer, step, chunk)
        self._fetched = handle, handle
        return self._fetched

    def _parts(
        self, group: PrefillGroup, keys: mx.array, values: mx.array
    ) -> tuple[PrefillHandle, ...]:
        """Give each row the tokens that are its own."""
        parts = []
        for row, step in enumerate(group.steps):
            own = (slice(row, row + 1), slice(None), slice(step.count))
            chunk = self._layer.extend(step, keys[own], values[own])
            parts.append(PrefillHandle(self._store, self._layer, step, chunk))
        return tuple(parts)

    def forget(self) -> None:
        """Drop what the pass that is over has fetched: it holds pools that are to be written."""
        self._fetched = None

    def keys_and_values(self) -> Any:
        """Return what the step's `update_and_fetch` returned, for layers that share it."""
        return self._fetched

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> Any:
        """Return no mask: attention sees by itself what each row may see.

        Raises ``TypeError`` where the model wants to work on a mask of its own.
        """
        window = self._store.kind.window
        if window_size is not None and window_size != window:
            raise TypeError(f"the model asks for a window of {window_size} tokens, not {window}")
        if return_array and n > 1:
            raise TypeError("the model asks for a mask array")
        return None


class RectangleKVCache(BatchQuantizedKVCache):
    """The same, for models that work on keys and values as arrays: dequantize on read."""

    def __init__(self, store: KVStore, layer: int, *, batched: bool = True) -> None:
        super().__init__(store, layer, batched=batched)
        self._taken = False
        self._chunk: Chunk | None = None

    @property
    def step(self) -> DecodeStep | PrefillStep:
        """The forward pass that is under way: rectangles take one row's prefill at a time."""
        step = super().step
        assert not isinstance(step, PrefillGroup), "`ModelCache.can_group` says no"
        return step

    def forget(self) -> None:
        """Drop the arrays of the pass that is over."""
        super().forget()
        self._taken = False
        self._chunk = None

    @property
    def keys(self) -> mx.array | None:
        """What the model works on in this pass, gathered anew if anybody needs it: lazy.

        Kept, the arrays of all layers would be there until the pass is over. What a model puts
        here, for its own caches' sake, is dropped.
        """
        return self._gathered()[0] if self._taken else None

    @keys.setter
    def keys(self, _: mx.array) -> None: ...

    @property
    def values(self) -> mx.array | None:
        """The same of values."""
        return self._gathered()[1] if self._taken else None

    @values.setter
    def values(self, _: mx.array) -> None: ...

    @property
    def start_position(self) -> int:
        """Position of the first token of the arrays."""
        return int(self._rectangle().positions.min())

    def _rectangle(self) -> Rectangle:
        """Return where the pass's tokens are; the same for all layers of the store."""
        step, kind = self.step, self._store.kind
        if "rectangle" not in step.shared:
            step.shared["rectangle"] = (
                decode_rectangle(step, kind)
                if isinstance(step, DecodeStep)
                else prefill_rectangle(step, kind)
            )
        found: Rectangle = step.shared["rectangle"]
        return found

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Take the new tokens' keys and values; return all, ``[batch, heads, most, dim]``."""
        step, geometry = self.step, self._layer.geometry
        if values.shape[-1] != geometry.v_dim:  # nobody reads them
            values = mx.zeros((*keys.shape[:-1], geometry.v_dim), keys.dtype)
        self._make_room(keys, values)
        self._taken = True
        if isinstance(step, DecodeStep):
            self._layer.append(step, keys, values)
        else:
            self._chunk = self._layer.extend(step, keys, values)
        return self._gathered()

    def keys_and_values(self) -> Any:
        """Return what the step's `update_and_fetch` returned; kept from now on in this pass."""
        if self._fetched is None:
            self._make_room()
            self._fetched = self._gathered()
        return self._fetched

    def _make_room(self, *lazy: mx.array) -> None:
        """Evaluate what comes before, if this layer's copies beside its pass the scratch."""
        step = self.step
        paged = PAGE_TOKENS * sum(len(table.starts) for table in step.tables)
        loose = (
            TAIL_TOKENS * len(step.rows)
            if isinstance(step, DecodeStep)
            else step.tail_length + step.count
        )
        cells = self._rectangle().positions.size
        if self._store.claim_scratch(gathering_bytes([self._layer], paged, loose, cells)):
            mx.eval(*lazy)

    def _gathered(self) -> tuple[mx.array, mx.array]:
        step, rectangle = self.step, self._rectangle()
        if isinstance(step, DecodeStep):
            newest = self._layer.tails(step)
        else:
            assert self._chunk is not None, "a prefill step's chunk was not taken"
            newest = self._chunk.keys[None], self._chunk.values[None]
        paged = [self._layer.pools[table.level].read(table.slots) for table in step.tables]
        keys, values = (
            rectangle.gather([*(part[side] for part in paged), newest[side]]) for side in (0, 1)
        )
        return keys, values

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> mx.array | str | None:
        """Return the mask that mlx-lm's own caches would: None, ``causal``, or a bool array.

        ``[batch, 1, 1, most]`` in a batched decode, else ``[n, most]``.
        """
        step, kind = self.step, self._store.kind
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
        kind, positions = self._store.kind, self._rectangle().positions
        seen: np.ndarray = (positions >= 0) & (positions <= queries)
        if window_size is not None:
            # As mlx-lm's caches: what the model says counts, over what the cache still has.
            return seen & ((positions > queries - window_size) | (positions < kind.keep))
        if kind.bounded:
            lows = np.vectorize(kind.low)(queries)
            seen &= (positions >= lows) | (positions < kind.keep)
        return seen


def make_caches(store: KVStore) -> list[BatchQuantizedKVCache]:
    """Return the caches of a model whose layers are all of the store's kind, one a layer."""
    return [BatchQuantizedKVCache(store, layer) for layer in range(len(store.layers))]
