"""NVIDIA: the memory of the first device, read through the driver's library.

Only with MLX's CUDA build: a device that MLX does not use limits nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


def has_cuda_build() -> bool:
    """Return whether the installed MLX is a CUDA build, without importing it."""
    for name in ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            importlib.metadata.distribution(name)
            return True
    return False


def total_memory() -> int | None:
    """Return the first device's memory in bytes, or None if MLX cannot use one."""
    if not has_cuda_build():
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:  # no driver: MLX's CUDA build falls back to the CPU
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    device, memory = ctypes.c_void_p(), _Memory()
    found = (
        nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
        and nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    )
    nvml.nvmlShutdown()
    return int(memory.total) if found else None
