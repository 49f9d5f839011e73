"""The reference for a model: its own forward pass over dense copies of a sequence's cache."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

from kvd.worker.cache.attention_kind import Kind
from kvd.worker.cache.layout import AttentionPart, StatePart
from kvd.worker.cache.model_cache import ModelCache
from kvd.worker.cache.packed import entries
from kvd.worker.cache.recurrent_states import State
from kvd.worker.cache.rows import SequenceRow


class DenseKVCache:
    """One sequence's keys and values of one layer, dense, with the interface of mlx-lm's caches.

    ``keys`` and ``values``: ``[1, heads, tokens, dim]`` of the tokens at ``positions``.
    """

    def __init__(
        self, keys: mx.array, values: mx.array, positions: list[int], offset: int, kind: Kind
    ) -> None:
        self.keys = keys
        self.values = values
        self.offset = offset
        self._kind = kind
        self._positions = positions

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        self.keys = mx.concatenate([self.keys, keys], axis=2)
        if values.shape[-1] != self.values.shape[-1]:  # values that the model never reads
            values = mx.zeros((*keys.shape[:-1], self.values.shape[-1]), keys.dtype)
        self.values = mx.concatenate([self.values, values], axis=2)
        end = self.offset + keys.shape[2]
        self._positions = [*self._positions, *range(self.offset, end)]
        self.offset = end
        return self.keys, self.values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys, self.values

    @property
    def start_position(self) -> int:
        return self._positions[0] if self._positions else self.offset

    def maybe_trim_front(self) -> None:
        """Do nothing: only visible tokens are held."""

    def make_mask(
        self, n: int, *, return_array: bool = False, window_size: int | None = None, **_: Any
    ) -> mx.array | str | None:
        """Return the attention mask, in the form of mlx-lm's own caches."""
        bounded = self._kind.bounded or window_size is not None
        if not bounded and n == 1:
            return None
        if not bounded and not return_array:
            return "causal"
        queries = mx.arange(self.offset, self.offset + n)[:, None]
        keys = mx.array([*self._positions, *range(self.offset, self.offset + n)])
        kind = self._kind
        # Like mlx-lm's caches: the model's window applies to the tokens that the cache still has.
        if window_size is not None:
            kind = Kind(window_size + kind.keep, kind.keep)
        return kind.visible(queries, keys)


def dense_caches(
    cache: ModelCache, sequence: SequenceRow, states: State, *, without_newest: int = 0
) -> list[Any]:
    """Return caches of what a sequence attends to, except the last ``without_newest`` tokens.

    ``states``: recurrent states from before these tokens (`StateStore.state_of`).
    """
    layers_used = dict.fromkeys(cache.layout.kinds, 0)
    found = iter(states)
    caches: list[Any] = []
    for entry in cache.layout.entries:
        parts: list[Any] = []
        for part in entry.parts:
            if isinstance(part, AttentionPart):
                kind, layer = part.kind, layers_used[part.kind]
                parts.append(_dense_cache(cache, sequence, kind, layer, without_newest))
                layers_used[kind] += 1
            elif isinstance(part, StatePart):
                arrays = ArraysCache(len(part.shapes))
                arrays.cache = list(next(found))
                parts.append(arrays)
            else:
                parts.append(KVCache())
        caches.append(CacheList(*parts) if entry.composed else parts[0])
    return caches


def _dense_cache(
    cache: ModelCache, sequence: SequenceRow, kind: Kind, layer: int, without_newest: int
) -> DenseKVCache:
    index = cache.layout.kinds.index(kind)
    store, row = cache.stores[index], sequence.rows[index]
    offset = row.length - without_newest
    low = store.kind.low(offset)
    keys, values = store.read(row, layer)
    positions = store.positions(row)
    held = [
        place
        for place, position in enumerate(positions)
        if position < offset and (position >= low or position < store.kind.keep)
    ]
    sides = entries(keys, held, 1)[None], entries(values, held, 1)[None]
    return DenseKVCache(*sides, [positions[place] for place in held], offset, store.kind)
