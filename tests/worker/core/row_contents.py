"""The content of a row in a runner's cache, for tests that compare rows."""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.serving.runner import Row, Runner


def contents_of(runner: Runner, row: Row) -> list[mx.array]:
    """Return keys and values of each layer, ``[heads, tokens, dim]``."""
    return [
        side
        for store, one in zip(runner.cache.stores, row.rows, strict=True)
        for layer in range(len(store.layers))
        for side in store.read(one, layer)
    ]
