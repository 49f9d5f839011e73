"""Layers of a model without weights: attention over a cache's views, and a recurrent state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from kvd.worker.attention.decode import decode_attention
from kvd.worker.attention.packed import packed_attention
from kvd.worker.attention.prefill import prefill_attention
from kvd.worker.cache.batch import DecodeHandle, PackedHandle, PrefillHandle

SCALE = 0.3


@dataclass(frozen=True)
class Output:
    """Attention's output in one layer."""

    store: int
    layer: int
    queries: mx.array
    output: mx.array


def recur(view: Any, inputs: mx.array) -> None:
    """Update the sum of all inputs and the last two of them, like a recurrent layer."""
    total, last = view[0], view[1]
    if total is None:
        total, last = mx.zeros((len(inputs), 3)), mx.zeros((len(inputs), 2, 4))
    view[0] = total + inputs[:, :, :3].sum(axis=1)
    view[1] = mx.concatenate([last, inputs], axis=1)[:, -2:]


def attend(view: Any, queries: mx.array, found: tuple[Any, Any]) -> mx.array:
    """Attend like a model, over the keys if there are no values."""
    keys, values = found
    count = queries.shape[2]
    if isinstance(keys, DecodeHandle):
        return decode_attention(queries, keys, SCALE)
    if isinstance(keys, PrefillHandle):
        return prefill_attention(queries, keys, SCALE)
    if isinstance(keys, PackedHandle):
        return packed_attention(queries, keys, SCALE)
    if values.shape[-1] == 0:
        values = keys
    mask = view.make_mask(count, return_array=False)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=SCALE, mask=mask)
