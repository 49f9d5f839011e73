"""The single seam into mlx-lm: its `scaled_dot_product_attention`, replaced once.

Model modules import that function by name, so `install` must run before any of them is imported.
Dispatch is on the handle instead of the cache, because some models share keys and values between
layers with ``cache=None``. Calls without a handle go to mlx-lm's function.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from kvd.worker.attention.decode import decode_attention
from kvd.worker.attention.packed import packed_attention
from kvd.worker.attention.prefill import prefill_attention
from kvd.worker.cache.batch import DecodeHandle, KVHandle, OpaqueKV, PackedHandle, PrefillHandle

_original = base.scaled_dot_product_attention


def scaled_dot_product_attention(
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attend to pages if ``keys`` is one of kvd's handles, otherwise call mlx-lm's function."""
    if isinstance(keys, KVHandle | OpaqueKV):
        _refuse_mask(mask, keys)
    match keys:
        case DecodeHandle():
            return decode_attention(queries, keys, scale, sinks)
        case PrefillHandle():
            return prefill_attention(queries, keys, scale, sinks)
        case PackedHandle():
            return packed_attention(queries, keys, scale, sinks)
        case OpaqueKV():
            return keys.attend(queries, scale, sinks)
    dense: mx.array = _original(
        queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks
    )
    return dense


def _refuse_mask(mask: Any, handle: KVHandle | OpaqueKV) -> None:
    kind = handle.kind if isinstance(handle, OpaqueKV) else handle.store.kind
    # A model with chunked attention passes its own mask. The self-check has verified that this mask
    # hides the same tokens as the cache's kind.
    if mask is not None and kind.chunk is None:
        raise TypeError(f"the model passes its own attention mask ({type(mask).__name__})")


def install() -> None:
    """Replace mlx-lm's function once, before model modules are imported.

    Raises ``RuntimeError`` if a model module has already imported the original.
    """
    if base.scaled_dot_product_attention is scaled_dot_product_attention:
        return
    late = [
        name
        for name, module in sys.modules.items()
        if name.startswith("mlx_lm.models.")
        and name != base.__name__
        and getattr(module, "scaled_dot_product_attention", None) is _original
    ]
    if late:
        raise RuntimeError(f"install the seam before importing {', '.join(late)}")
    base.scaled_dot_product_attention = scaled_dot_product_attention
