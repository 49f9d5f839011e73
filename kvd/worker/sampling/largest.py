"""The largest values of each row without sorting the row: exact, and the same in any batch."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

BLOCK = 128
"""Divides the vocabularies of most models, so that nothing is padded."""


def largest(rows: Any, count: int) -> tuple[Any, Any]:
    """Return the ``count`` largest values of each row, falling, and their places.

    ``rows`` is ``[rows, width]``; the result has ``min(count, width)`` columns. Of equal values
    the first places come first, as far as they are in. Places of minus infinity may be beyond
    the width.
    """
    width = rows.shape[-1]
    if width <= count:
        places = mx.broadcast_to(mx.arange(width, dtype=mx.int32), rows.shape)
    elif width <= count * BLOCK:
        places = _partition(rows, count)
    else:
        places = _by_blocks(rows, count)
        rows = mx.pad(rows, [(0, 0), (0, -width % BLOCK)], constant_values=-mx.inf)
    places = mx.sort(places, axis=-1)
    values = mx.take_along_axis(rows, places, axis=-1)
    order = mx.argsort(-values, axis=-1)
    return mx.take_along_axis(values, order, axis=-1), mx.take_along_axis(places, order, axis=-1)


def _partition(rows: Any, count: int) -> Any:
    return mx.argpartition(-rows, kth=count - 1, axis=-1)[:, :count].astype(mx.int32)


def _by_blocks(rows: Any, count: int) -> Any:
    """Look only at the ``count`` blocks with the largest maxima: all that is wanted is there."""
    height, width = rows.shape
    padded = mx.pad(rows, [(0, 0), (0, -width % BLOCK)], constant_values=-mx.inf)
    blocks = padded.reshape(height, -1, BLOCK)
    best = _partition(mx.max(blocks, axis=-1), count)
    inside = mx.take_along_axis(blocks, best[:, :, None], axis=1).reshape(height, -1)
    found = _partition(inside, count)
    block = mx.take_along_axis(best, found // BLOCK, axis=-1)
    return block * BLOCK + found % BLOCK
