"""A model whose attention costs nothing: what is left of a step is everything else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx


@contextlib.contextmanager
def no_attention() -> Iterator[None]:
    """Replace attention, ours and mlx-lm's alike, by its queries: the right shape, and no op.

    Keys and values are still made, rotated and written into the caches.
    """
    from mlx_lm.models import qwen3

    original = qwen3.scaled_dot_product_attention

    def queries_only(queries: mx.array, *_: Any, **__: Any) -> mx.array:
        return queries

    qwen3.scaled_dot_product_attention = queries_only
    try:
        yield
    finally:
        qwen3.scaled_dot_product_attention = original
