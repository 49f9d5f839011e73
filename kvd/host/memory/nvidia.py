"""NVIDIA: the memory of the first device, asked of the driver's own library.

Only where MLX's CUDA build is installed: a card that MLX does not use is no limit.
"""

from __future__ import annotations

import ctypes
import importlib.metadata


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


def has_cuda_build() -> bool:
    """Return whether the installed MLX computes on CUDA; does not import it."""
    for name in ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda"):
        try:
            importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return True
    return False


def total_memory() -> int | None:
    """Return the bytes of the first device, or None if MLX has none to compute on."""
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
