"""kvd's products for GPUs (`kvd.worker.gpu.products`) as plain operations of MLX; run anywhere."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
from mlx import nn

from kvd.worker.gpu import products


def multiply(
    x: mx.array,
    weight: mx.array,
    sizes: Sequence[int],
    *,
    norm: products.Norm | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
) -> list[mx.array]:
    """Replace `products.multiply`."""
    x = x.reshape(x.shape[0], 1, -1)
    if norm is not None:
        x = mx.fast.rms_norm(x, norm.weight, norm.eps)
    found = x @ weight.T
    for one in (bias, residual):
        found = found if one is None else found + one
    ends = [sum(sizes[: count + 1]) for count in range(len(sizes) - 1)]
    return list(mx.split(found, ends, axis=-1))


def multiply_gated(x: mx.array, weight: mx.array, norm: products.Norm) -> mx.array:
    """Replace `products.multiply_gated`."""
    gate, up = multiply(x, weight, [weight.shape[0] // 2] * 2, norm=norm)
    return nn.silu(gate) * up
