"""What a model sees as its cache: one `BatchQuantizedKVCache` per layer.

The interface is that of mlx-lm's caches, as far as a forward pass uses it. What
`update_and_fetch` returns can only be attended to (`kvd.worker.seam`); a model that does anything
else with its keys and values fails at load, in the self-check, and never gives wrong output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvd.worker.cache.layer import Chunk, LayerStore
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


KVHandle = DecodeHandle | PrefillHandle


class BatchQuantizedKVCache:
    """One layer's cache for the rows of the store's current step."""

    def __init__(self, store: KVStore, layer: int) -> None:
        self._store = store
        self._layer = store.layers[layer]

    @property
    def offset(self) -> mx.array | int:
        """Position of the first new token: ``[batch]`` int32 in decode, an int in prefill."""
        step = self._store.step
        if isinstance(step, DecodeStep):
            return step.offsets
        if isinstance(step, PrefillStep):
            return step.offset
        raise RuntimeError("begin a step before the forward pass")

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[KVHandle, KVHandle]:
        """Take the new tokens' keys and values, ``[batch, heads, tokens, dim]``.

        Returns the same handle twice, in the places of keys and values.
        """
        step = self._store.step
        handle: KVHandle
        if isinstance(step, DecodeStep):
            rows = len(step.rows)
            self._layer.append(step, keys[:rows], values[:rows])
            handle = DecodeHandle(self._store, self._layer, step)
        elif isinstance(step, PrefillStep):
            chunk = self._layer.extend(step, keys, values)
            handle = PrefillHandle(self._store, self._layer, step, chunk)
        else:
            raise RuntimeError("begin a step before the forward pass")  # noqa: TRY004 - a state
        return handle, handle

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> None:
        """Return no mask: attention is causal by itself, over what each row has.

        Raises ``TypeError`` where the model wants to work on a mask of its own.
        """
        if return_array or window_size is not None:
            raise TypeError(f"the model asks for a mask array (window {window_size}, {n} tokens)")


def make_caches(store: KVStore) -> list[BatchQuantizedKVCache]:
    """Return the caches to call a model with, one a layer."""
    return [BatchQuantizedKVCache(store, layer) for layer in range(len(store.layers))]
