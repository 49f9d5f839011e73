"""Removes attention from a model, so that a step's time is the time of everything else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import mlx.core as mx

from kvd.worker.attention.fused import FusedStep


@contextlib.contextmanager
def no_attention() -> Iterator[None]:
    """Make attention, kvd's and mlx-lm's, return its queries: they have the right shape.

    Keys and values are still computed, rotated and written into the caches.
    """
    from mlx_lm.models import qwen3

    original, in_blocks = qwen3.scaled_dot_product_attention, FusedStep.attend

    def queries_only(queries: mx.array, *_: Any, **__: Any) -> mx.array:
        return queries

    def queries_of(_: FusedStep, queries: mx.array, *__: Any) -> mx.array:
        return queries

    qwen3.scaled_dot_product_attention = queries_only
    FusedStep.attend = queries_of  # type: ignore[method-assign]
    try:
        yield
    finally:
        qwen3.scaled_dot_product_attention = original
        FusedStep.attend = in_blocks  # type: ignore[method-assign]
