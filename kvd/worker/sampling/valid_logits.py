"""Whether logits can be drawn from."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def finite_and_varied(logits: Any) -> Any:
    """Return which rows have valid logits, ``[rows]`` bool, lazily.

    A failed buffer reads as zeros or NaN, whose most likely token would be token 0. Models may
    exclude tokens with minus infinity, so it is allowed among finite values.
    """
    largest = mx.max(logits, axis=-1)  # NaN if any logit is
    return mx.isfinite(largest) & (mx.min(logits, axis=-1) < largest)
