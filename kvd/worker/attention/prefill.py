"""Prefill attention: dequantize one layer of one row, then the dense kernel.

The chunk attends to its own tokens exactly, and to what came before as the cache holds it.
"""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.cache.batch import PrefillHandle
from kvd.worker.cache.scheme import PAGE_TOKENS


def prefill_attention(
    queries: mx.array, handle: PrefillHandle, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """Attend a chunk's queries, ``[1, q_heads, count, k_dim]``, causally.

    Returns ``[1, q_heads, count, v_dim]``. A lazy graph would keep many layers' dense copies
    alive, so the output is evaluated here once they pass the store's ``prefill_scratch``.
    """
    parts = [handle.layer.pools[table.level].read(table.slots) for table in handle.step.tables]
    keys, values = (
        mx.concatenate(
            [*(part[side].swapaxes(0, 1).flatten(1, 2) for part in parts), newest], axis=1
        )
        for side, newest in enumerate((handle.chunk.keys, handle.chunk.values))
    )
    mask: mx.array | str = "causal"
    if handle.store.kind.bounded:
        step = handle.step
        starts = [start for table in step.tables for start in table.starts]
        paged = (mx.array(starts, mx.int32)[:, None] + mx.arange(PAGE_TOKENS)).flatten()
        end = step.offset + step.count
        places = mx.concatenate([paged, mx.arange(step.tail_start, end)])
        mask = handle.store.kind.visible(mx.arange(step.offset, end)[:, None], places)
    output = mx.fast.scaled_dot_product_attention(
        queries, keys[None], values[None], scale=scale, mask=mask, sinks=sinks
    )
    # The pages as they come out of the pool, and their copy in one piece.
    if handle.store.note_scratch(2 * (keys.nbytes + values.nbytes)):
        mx.eval(output)
    return output
