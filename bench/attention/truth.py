"""Reference attention in float32, without products that a GPU would round to TF32."""

from __future__ import annotations

import math

import mlx.core as mx

from bench.attention.case import Case, dense_copy


class WrongResultError(Exception):
    """A result is wrong, so its time means nothing."""


def attended(queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
    """Attend one row: ``[q_heads, dim]`` to ``[kv_heads, tokens, dim]``, all float32.

    Computes one KV head at a time, with elementwise products and sums instead of matrix products.
    Returns ``[q_heads, dim]``, evaluated.
    """
    grouped = queries.reshape(keys.shape[0], -1, 1, queries.shape[-1])
    outputs = []
    for head in range(keys.shape[0]):
        scores = (grouped[head] * keys[head]).sum(axis=-1) * scale
        weights = mx.softmax(scores, axis=-1, precise=True)
        outputs.append((weights[..., None] * values[head]).sum(axis=1))
        mx.eval(outputs[-1])
    return mx.concatenate(outputs)


def error_over_pages(case: Case, call: int, got: mx.array) -> float:
    """Return the greater relative error of the first and the last row in a call's result.

    ``got``: ``[rows, q_heads, 1, dim]``.
    """
    errors = []
    for place in sorted({0, len(case.rows) - 1}):
        keys, values = dense_copy(case.rows[place], case.handle(call))
        queries = case.queries[call, place, :, 0].astype(mx.float32)
        want = attended(queries, keys, values, case.shape.scale)
        errors.append(relative_error(got[place, :, 0], want))
    return max(errors)


def relative_error(got: mx.array, want: mx.array) -> float:
    """Return norm(got - want) / norm(want), or infinity if any element is not finite."""
    if not bool((mx.isfinite(got).all() & mx.isfinite(want).all()).item()):
        return math.inf
    got = got.astype(mx.float32)
    found: float = (mx.linalg.norm(got - want) / mx.linalg.norm(want)).item()  # type: ignore[assignment]
    return found
