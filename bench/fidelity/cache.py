"""A cache of dense arrays whose sealed pages hold what remains after a recipe's quantization.

It has those parts of the interface of mlx-lm's `KVCache` that a forward pass uses.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache, make_prompt_cache

from bench.fidelity.recipes import PAGE, Recipe


class FakeQuantizedCache:
    """One layer's keys and values, ``[rows, heads, length, dim]``; all rows are equally long."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._sealed = recipe.sinks
        self.keys: mx.array | None = None
        self.values: mx.array | None = None
        self.offset = 0
        self._sizes: mx.array | None = None
        """Mean absolute values of the key channels, ``[1, heads, 1, dim]``."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Seal the pages that are due, append the new tokens, and return all tokens."""
        self._seal(self._recipe.sealed(self.offset))
        if self.keys is not None and self.values is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.keys, self.values = keys, values
        self.offset = keys.shape[2]
        return keys, values

    def _seal(self, end: int) -> None:
        start = self._sealed
        if self.keys is None or self.values is None or end <= start:
            return
        keys, values = (x[:, :, start:end] for x in (self.keys, self.values))
        if self._recipe.even:
            # Measured on the first sealed tokens. A product would measure it at load.
            if self._sizes is None:
                self._sizes = mx.abs(keys).mean(axis=(0, 2), keepdims=True)
            keys, values = self._recipe.stored(keys / self._sizes, values, start)
            stored = (keys * self._sizes, values)
        else:
            stored = self._recipe.stored(keys, values, start)
        self.keys, self.values = (
            mx.concatenate([whole[:, :, :start], part, whole[:, :, end:]], axis=2)
            for whole, part in zip((self.keys, self.values), stored, strict=True)
        )
        self._sealed = end

    @property
    def state(self) -> tuple[mx.array | None, mx.array | None]:
        """Keys and values, for `mx.eval`."""
        return self.keys, self.values

    @property
    def lossy(self) -> bool:
        """Whether any token so far is quantized."""
        return self._sealed > self._recipe.sinks

    def make_mask(self, *arguments: Any, **settings: Any) -> Any:
        """Return the mask that mlx-lm's own cache would return."""
        shown = KVCache()
        shown.offset = self.offset
        return shown.make_mask(*arguments, **settings)


class MlxLmQuantizedCache(QuantizedKVCache):
    """mlx-lm's quantized cache. It quantizes each token before any other attends to it.

    So one pass over several decoded tokens gives the same numbers as decoding them one by one.
    """

    def __init__(self, bits: int) -> None:
        super().__init__(group_size=PAGE, bits=bits)
        self._last = 0
        """Tokens of the last pass."""

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Quantize and append the new tokens, and return all tokens."""
        self._last = keys.shape[2]
        return super().update_and_fetch(keys, values)

    @property
    def lossy(self) -> bool:
        """Whether the last pass follows another one: those passes count for kvd's caches too."""
        return bool(self.offset > self._last)


def make_caches(model: Any, recipe: Recipe) -> list[Any]:
    """Return mlx-lm's caches, with each plain `KVCache` of a quantized layer replaced."""
    caches = []
    for layer, cache in enumerate(make_prompt_cache(model)):
        mine = recipe.at(layer) if type(cache) is KVCache else None
        caches.append(_cache_of(mine) if mine else cache)
    return caches


def _cache_of(recipe: Recipe) -> Any:
    return MlxLmQuantizedCache(recipe.keys.bits) if recipe.mlx_lm else FakeQuantizedCache(recipe)
