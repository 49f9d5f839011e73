"""Copies of a row, for the completions of one prompt."""

from __future__ import annotations

from typing import Any

from kvd.worker.serving.runner import Row


def copies(cache: Any, row: Row, count: int) -> list[Row]:
    """Return rows with the content of ``row``. The device must be idle.

    ``cache``: `ModelCache` or `MlxLmCache`. Raises MLX's errors if memory is short.
    """
    snapshot = cache.snapshots.take(row)
    try:
        return [cache.restore(snapshot) for _ in range(count)]
    finally:  # a snapshot that is left holds its pages for ever
        cache.snapshots.drop(snapshot)
