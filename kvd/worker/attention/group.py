"""Prefill attention of several rows that share a forward pass.

Each row attends as if it were alone: to its pages, its tail and its own chunk. Rows without earlier
tokens can share one call of the dense kernel (`mx.fast.scaled_dot_product_attention`). Their chunks
are padded on the right, and the causal mask hides the padding.

On the CPU only chunks of equal length share a call. The order of the kernel's sums depends on the
padded length, so with padding a row's result would depend on the rows that share its pass.

Some devices make a plan for each new shape of attention (`attention_is_planned`), which takes long.
There, rows that attend one by one keep their padding: passes have few widths
(`kvd.worker.serving.runner`), so attention has few shapes.
"""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.attention.prefill import prefill_attention
from kvd.worker.attention.tiles import Work
from kvd.worker.cache import padded_sizes
from kvd.worker.cache.batch import GroupHandle


def group_attention(
    queries: mx.array, handle: GroupHandle, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """Attend the rows' queries, ``[rows, q_heads, width, k_dim]``, causally.

    ``sinks``: ``[q_heads]`` logits of gpt-oss's attention sinks. Returns
    ``[rows, q_heads, width, v_dim]``, lazy as far as the scratch allows. Outputs of the padding are
    finite and otherwise undefined.
    """
    if _in_one_call(queries, handle, sinks):
        output: mx.array = mx.fast.scaled_dot_product_attention(
            queries, handle.keys, handle.values, scale=scale, mask="causal", sinks=sinks
        )
        return output
    outputs: list[mx.array] = []
    for row, part in enumerate(handle.parts):
        count = part.step.count
        row_queries = queries[row : row + 1]
        if padded_sizes.attention_is_planned() and part.step.backend is None:
            outputs.append(prefill_attention(row_queries, part, scale, sinks, pending=outputs))
            continue
        row_queries = row_queries[:, :, :count]
        attended = prefill_attention(row_queries, part, scale, sinks, pending=outputs)
        padding = handle.step.width - count
        outputs.append(mx.pad(attended, [(0, 0), (0, 0), (0, padding), (0, 0)]))
    return mx.concatenate(outputs)


def _on_cpu() -> bool:
    return mx.default_device().type == mx.DeviceType.cpu


def _in_one_call(queries: mx.array, handle: GroupHandle, sinks: mx.array | None) -> bool:
    """Return whether one call of the dense kernel suffices; if so, reserve its scratch."""
    store, group = handle.store, handle.step
    if len(group.steps) == 1 or group.steps[0].backend is not None:  # row by row is as fast
        return False
    fresh = all(step.offset == 0 for step in group.steps)
    if not fresh or store.kind.low(group.width - 1) > 0:  # a window hides something
        return False
    if not group.even and _on_cpu():
        return False
    rows, kv_heads, width, k_dim = handle.keys.shape
    repeats, v_dim = queries.shape[1] // kv_heads, handle.values.shape[-1]
    shape = (rows * kv_heads, repeats, width, width, k_dim, v_dim, queries.dtype.size)
    work = Work(*shape, sinks=sinks is not None)
    needed = work.dense_bytes(work.kv_heads)
    if needed > store.scratch.limit:
        return False
    if store.scratch.add(needed):
        mx.eval(queries, handle.keys, handle.values)
        store.scratch.add(needed)
    return True
