"""The reference: textbook attention in float32 over dense keys and values."""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.cache.attention_kind import FULL, Kind


def dense_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    sinks: mx.array | None = None,
    kind: Kind = FULL,
) -> mx.array:
    """Attend one row's newest tokens, causally.

    ``queries``: ``[q_heads, n, k_dim]`` of the last ``n`` of ``length`` tokens; ``keys`` and
    ``values``: ``[kv_heads, length, dim]``. Returns ``[q_heads, n, v_dim]`` in float32.
    """
    q, k, v = (array.astype(mx.float32) for array in (queries, keys, values))
    repeats = q.shape[0] // k.shape[0]
    k, v = mx.repeat(k, repeats, axis=0), mx.repeat(v, repeats, axis=0)
    n, length = q.shape[1], k.shape[1]
    scores = (q * scale) @ k.swapaxes(-1, -2)
    visible = kind.visible(mx.arange(length - n, length)[:, None], mx.arange(length))
    scores = mx.where(visible, scores, -mx.inf)
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(mx.float32)[:, None, None], (q.shape[0], n, 1))
        scores = mx.concatenate([scores, column], axis=-1)
    weights = mx.softmax(scores, axis=-1)
    return weights[..., :length] @ v
