"""Which kind of device MLX computes on."""

from __future__ import annotations

import os

import mlx.core as mx


def on_cpu() -> bool:
    return mx.default_device().type == mx.DeviceType.cpu


def on_cuda() -> bool:
    return not on_cpu() and bool(mx.cuda.is_available())


def launches_in_order() -> bool:
    """Return whether CUDA graphs are off, so that kernels run in the order of their launches.

    With graphs, MLX orders kernels by their inputs and outputs. It does not know that some of kvd's
    kernels write into their inputs. Workers turn graphs off (`kvd.worker.process.interpreter`).
    """
    return os.environ.get("MLX_USE_CUDA_GRAPHS") == "0"
