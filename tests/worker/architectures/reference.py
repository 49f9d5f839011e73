"""mlx-lm's own run of one sequence over its own caches, which every other way must equal."""

from __future__ import annotations

import itertools
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import make_prompt_cache

# All vocabularies of the zoo are larger than this.
TOKENS = 97


def tokens(length: int, seed: int = 1) -> mx.array:
    """Random token ids [length], int32."""
    return mx.random.randint(0, TOKENS, (length,), key=mx.random.key(seed))


def run(model: nn.Module, ids: mx.array, chunk: int | None = 64, decoded: int = 3) -> mx.array:
    """Logits [length, vocabulary], float32, of ids [length]: all but the last ``decoded`` are
    read in chunks of ``chunk`` tokens (None: at once), the rest one by one."""
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
    """Largest absolute difference, relative to the largest logit; NaN if any value is."""
    return (mx.abs(got - expected).max() / mx.abs(expected).max()).item()


def parts(cache: Any) -> list[tuple[Any, Any]]:
    """The places of one cache's arrays: (owner, key), an attribute's name or a list's index."""
    if hasattr(cache, "caches"):
        return [part for inner in cache.caches for part in parts(inner)]
    if hasattr(cache, "cache"):
        return [(cache.cache, i) for i, array in enumerate(cache.cache) if _full(array)]
    names = (name for name, value in vars(cache).items() if _full(value))
    return [(cache, name) for name in names]


def _full(value: Any) -> bool:
    return isinstance(value, mx.array) and value.size > 0 and value.ndim > 1
