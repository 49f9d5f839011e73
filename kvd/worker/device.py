"""Which kind of device MLX computes on."""

from __future__ import annotations

import os

import mlx.core as mx


def on_cpu() -> bool:
    return mx.default_device().type == mx.DeviceType.cpu


def on_cuda() -> bool:
    return not on_cpu() and bool(mx.cuda.is_available())


def launches_in_order() -> bool:
    """Return whether the device runs kernels in the order of their launches.

    With CUDA graphs, MLX orders them by the arrays that they share, and does not know of arrays
    that kernels write to. Workers use none (`kvd.worker.process.interpreter`).
    """
    return os.environ.get("MLX_USE_CUDA_GRAPHS") == "0"
