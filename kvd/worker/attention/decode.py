"""Decode attention in plain MLX operations: the reference for the kernels, correct on every device.

Each page is multiplied with the queries of its row. A softmax per row then covers the row's pages
on all precision levels and its dense tail (flash decoding, arXiv 2311.01282, with a page as the
split). Maximum and sum are accumulated in float32.

The work is proportional to the number of tokens. Every operation is per page or per row, so on the
CPU a row's output is the same to the bit, whatever other rows are in its batch.
"""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.cache.batch import DecodeHandle


def decode_attention(
    queries: mx.array, handle: DecodeHandle, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """Attend one query per row to the row's pages and tail.

    ``queries``: ``[batch, q_heads, 1, k_dim]``; the step's rows come first, the rest is padding.
    ``sinks``: ``[q_heads]`` logits of gpt-oss's attention sinks. Returns
    ``[batch, q_heads, 1, v_dim]`` in the queries' dtype, zero for the padding.
    """
    step, layer, product = handle.step, handle.layer, handle.store.page_product
    if step.backend is not None:
        return step.backend.attend(queries, layer, scale, sinks)
    batch, q_heads, _, k_dim = queries.shape
    rows, heads = len(step.rows), layer.geometry.kv_heads
    # In float32: half-precision scores are wrong by several per cent where attention is sharp.
    q = queries[:rows].astype(mx.float32).reshape(rows, heads, -1, k_dim) * scale

    tail_keys, tail_values = step.tails(layer)
    scores = q @ tail_keys.astype(mx.float32).swapaxes(-1, -2)
    scores = mx.where(step.visible_tails()[:, None, None], scores, -mx.inf)
    top = scores.max(axis=-1)

    paged = []
    for table in step.tables:
        pool = layer.pools[table.level]
        by_row, _ = table.indices(heads)
        page_scores = product(q, pool.keys, pool.key_packing, by_row, transpose=False)
        if (seen := step.visible_pages(table)) is not None:
            page_scores = mx.where(seen[:, None, None], page_scores, -mx.inf)
        paged.append((table, pool, page_scores))
        top = top.at[table.rows].maximum(page_scores.max(axis=-1))
    if sinks is not None:
        sink = sinks.astype(mx.float32).reshape(1, heads, -1)
        top = mx.maximum(top, sink)

    weights = mx.exp(scores - top[..., None])
    total = weights.sum(axis=-1)
    if sinks is not None:
        total = total + mx.exp(sink - top)
    output = weights @ tail_values.astype(mx.float32)
    for table, pool, page_scores in paged:
        weights = mx.exp(page_scores - top[table.rows][..., None])
        total = total.at[table.rows].add(weights.sum(axis=-1))
        _, by_page = table.indices(heads)
        partial = product(
            weights,
            pool.values,
            pool.value_packing,
            by_page,
            transpose=not pool.value_packing.per_token,
        )
        output = output.at[table.rows].add(partial)

    output = (output / total[..., None]).astype(queries.dtype).reshape(rows, q_heads, 1, -1)
    if batch > rows:
        padding = mx.zeros((batch - rows, *output.shape[1:]), output.dtype)
        output = mx.concatenate([output, padding])
    return output
