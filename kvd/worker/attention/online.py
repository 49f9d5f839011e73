"""Online softmax (arXiv 1805.02867) in plain MLX operations: running maximum, sum and output."""

from __future__ import annotations

import mlx.core as mx


class OnlineSoftmax:
    """Attention of query heads that share their keys, over any number of tiles.

    ``queries``: ``[heads, count, k_dim]``, not yet scaled. ``sinks``: ``[heads]`` logits that count
    in the softmax's sum once and have no value vector.
    """

    def __init__(
        self, queries: mx.array, scale: float, v_dim: int, sinks: mx.array | None = None
    ) -> None:
        self._rows = queries.shape[:2]
        self._dtype = queries.dtype
        self._queries = (queries.astype(mx.float32) * scale).flatten(0, 1)
        count = self._queries.shape[0]
        if sinks is None:
            # Finite: if a query sees no key of a tile, its weights are 0 instead of NaN.
            self._top = mx.full((count, 1), mx.finfo(mx.float32).min)
            self._total = mx.zeros((count, 1))
        else:
            each = sinks.astype(mx.float32)[:, None]
            self._top = mx.broadcast_to(each, self._rows).reshape(count, 1)
            self._total = mx.ones((count, 1))
        self._output = mx.zeros((count, v_dim))

    def add(self, keys: mx.array, values: mx.array, seen: mx.array | None) -> None:
        """Attend to ``keys``, ``[k_dim, n]``, and ``values``, ``[n, v_dim]``; lazy.

        ``seen``: ``[count, n]`` bool, or None for all.
        """
        scores = self._queries @ keys.astype(mx.float32)
        if seen is not None:
            scores = mx.where(seen, scores.reshape(*self._rows, -1), -mx.inf).flatten(0, 1)
        top = mx.maximum(self._top, scores.max(axis=-1, keepdims=True))
        scores = mx.exp(scores - top)
        fade = mx.exp(self._top - top)
        self._top = top
        self._total = self._total * fade + scores.sum(axis=-1, keepdims=True)
        self._output = self._output * fade + scores @ values.astype(mx.float32)

    def state(self) -> list[mx.array]:
        return [self._top, self._total, self._output]

    def result(self) -> mx.array:
        """Return ``[heads, count, v_dim]`` in the queries' dtype; lazy.

        Every query must have seen a key.
        """
        output = self._output / self._total
        return output.astype(self._dtype).reshape(*self._rows, -1)
