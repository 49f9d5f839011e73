"""Attention of a packed prefill: each chunk attends as if its pass had no other chunk.

A chunk attends to its row's pages, to the tail before it, and to itself. If the pass has several
chunks of one row, a later one sees the pages that earlier ones fill as the cache will store them:
quantized. Results are therefore equal to those of separate passes, on the CPU to the bit.

Some devices make a plan for each new shape of attention (`attention_is_planned`), which takes long.
There, chunks are padded to few widths.
"""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.attention.prefill import Copies, prefill_attention
from kvd.worker.cache import padded_sizes
from kvd.worker.cache.batch import PackedHandle, PrefillHandle


def packed_attention(
    queries: mx.array, handle: PackedHandle, scale: float, sinks: mx.array | None = None
) -> mx.array:
    """Attend the queries of all chunks, ``[batch, q_heads, 1, k_dim]``, causally.

    ``sinks``: ``[q_heads]`` logits of gpt-oss's attention sinks. Returns
    ``[batch, q_heads, 1, v_dim]``, lazy as far as the scratch allows. Outputs of the padding are 0.
    """
    together = queries.swapaxes(0, 2)  # [1, q_heads, batch, k_dim]
    outputs: list[mx.array] = []
    copies: Copies = {}
    for index, (part, where) in enumerate(zip(handle.parts, handle.step.parts(), strict=True)):
        if not part.step.continues:
            copies = {}
        continued = index + 1 < len(handle.parts) and handle.parts[index + 1].step.continues
        outputs.append(
            prefill_attention(
                _padded(together[:, :, where], part),
                part,
                scale,
                sinks,
                pending=outputs,
                copies=copies if continued or part.step.continues else None,
            )[:, :, : part.step.count]
        )
    if missing := handle.step.batch - sum(part.step.count for part in handle.parts):
        heads, dim = outputs[0].shape[1], outputs[0].shape[3]
        outputs.append(mx.zeros((1, heads, missing, dim), outputs[0].dtype))
    return mx.concatenate(outputs, axis=2).swapaxes(0, 2)


def _padded(queries: mx.array, part: PrefillHandle) -> mx.array:
    """Pad a chunk's queries to one of few widths, if the device plans attention for each."""
    count = part.step.count
    if part.step.backend is not None or not padded_sizes.attention_is_planned():
        return queries
    missing = padded_sizes.padded_width(count) - count
    return mx.pad(queries, [(0, 0), (0, 0), (0, missing), (0, 0)]) if missing else queries
