"""The reference: mlx-lm runs one sequence over its own caches. Tests compare all else with it."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

# All vocabularies of the zoo are larger than this.
TOKENS = 97


def tokens(length: int, seed: int = 1) -> mx.array:
    """Return random token ids [length], int32."""
    return mx.random.randint(0, TOKENS, (length,), key=mx.random.key(seed))


def run(model: nn.Module, ids: mx.array, chunk: int | None = 64, decoded: int = 3) -> mx.array:
    """Return the logits [length, vocabulary], float32, of ids [length].

    The last ``decoded`` tokens are read one by one, and those before them in chunks of ``chunk``
    tokens (None: at once).
    """
    cache = make_prompt_cache(model)
    length = ids.size - decoded
    edges = [*range(0, length, chunk or length), *range(length, ids.size), ids.size]
    parts = [_forward(model, ids[a:b], cache) for a, b in itertools.pairwise(edges)]
    return mx.concatenate(parts, axis=0)


def _forward(model: nn.Module, ids: mx.array, cache: list[Any]) -> mx.array:
    logits = model(ids[None], cache=cache)[0].astype(mx.float32)
    mx.eval(logits)
    return logits


def difference(got: mx.array, expected: mx.array) -> float:
    """Return the largest absolute difference, relative to the largest logit; NaN if any is NaN."""
    return (mx.abs(got - expected).max() / mx.abs(expected).max()).item()


def parts(cache: Any) -> list[tuple[Any, Any]]:
    """Return the places of a cache's arrays: (object, attribute name) or (list, index)."""
    if hasattr(cache, "caches"):
        return [part for inner in cache.caches for part in parts(inner)]
    if hasattr(cache, "cache"):
        return [(cache.cache, i) for i, array in enumerate(cache.cache) if _full(array)]
    names = (name for name, value in vars(cache).items() if _full(value))
    return [(cache, name) for name in names]


def _full(value: Any) -> bool:
    return isinstance(value, mx.array) and value.size > 0 and value.ndim > 1
