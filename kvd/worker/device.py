"""Which kind of device MLX computes on."""

from __future__ import annotations

import mlx.core as mx


def on_cpu() -> bool:
    return mx.default_device().type == mx.DeviceType.cpu


def on_cuda() -> bool:
    return not on_cpu() and bool(mx.cuda.is_available())
