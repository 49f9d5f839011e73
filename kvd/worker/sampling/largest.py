"""The largest values of each row without a full sort: exact, and the same in any batch."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

BLOCK = 128
"""Values per block. Divides most vocabulary sizes, so that no padding is needed."""


def pick(rows: Any, places: Any, axis: int = -1) -> Any:
    """Return the values at ``places`` along an axis.

    Integers, which must be below 2**24, are moved as float32 and places are int32. So CUDA needs a
    single module for all settings, which MLX compiles when it is first needed.
    """
    found = mx.take_along_axis(rows.astype(mx.float32), places.astype(mx.int32), axis=axis)
    return found.astype(rows.dtype)


def largest(rows: Any, count: int) -> tuple[Any, Any]:
    """Return the ``count`` largest values of each row in descending order, and their indices.

    ``rows``: ``[rows, width]``. Both results have ``min(count, width)`` columns. Equal values are
    in order of index; of those equal to the smallest value returned, any may be left out. Indices
    of minus infinity may exceed the width.
    """
    width = rows.shape[-1]
    if width <= count:
        indices = mx.broadcast_to(mx.arange(width, dtype=mx.int32), rows.shape)
    elif width <= count * BLOCK:
        indices = _partition(rows, count)
    else:
        rows = mx.pad(rows, [(0, 0), (0, -width % BLOCK)], constant_values=-mx.inf)
        indices = _by_blocks(rows, count)
    indices = mx.sort(indices, axis=-1)
    values = pick(rows, indices)
    order = mx.argsort(-values, axis=-1)
    return pick(values, order), pick(indices, order)


def _partition(rows: Any, count: int) -> Any:
    return mx.argpartition(-rows, kth=count - 1, axis=-1)[:, :count].astype(mx.int32)


def _by_blocks(rows: Any, count: int) -> Any:
    """Partition only the ``count`` blocks with the largest maxima. Rows have whole blocks."""
    height = rows.shape[0]
    blocks = rows.reshape(height, -1, BLOCK)
    best = _partition(mx.max(blocks, axis=-1), count)
    inside = pick(blocks, best[:, :, None], axis=1).reshape(height, -1)
    found = _partition(inside, count)
    block = pick(best, found // BLOCK)
    return block * BLOCK + found % BLOCK
