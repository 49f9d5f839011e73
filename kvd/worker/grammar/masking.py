"""Applies masks to logits by operations of MLX, where no single operation draws all tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx


def masked(logits: Any, masks: Any) -> Any:
    """Return logits with minus infinity for tokens that the masks exclude, lazily.

    ``logits``: ``[rows, vocabulary]``. ``masks``: a bit for each token, ``[rows, bytes]`` uint8,
    the lowest bit first.
    """
    whole = (masks[:, :, None] & _bits()).astype(mx.bool_)
    allowed = whole.reshape(masks.shape[0], -1)[:, : logits.shape[-1]]
    return mx.where(allowed, logits, -mx.inf)


@cache
def _bits() -> Any:
    """Return the bits of a byte, ``[8]`` uint8. A new array is another copy to the device."""
    return mx.array([1 << bit for bit in range(8)], dtype=mx.uint8)
