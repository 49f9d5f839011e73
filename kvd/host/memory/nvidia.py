"""NVIDIA: the memory of the first device, read through the driver's library.

Only with MLX's CUDA build: a device that MLX does not use limits nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
from dataclasses import dataclass
from pathlib import Path

_DEVICE_FILE = Path("/dev/nvidia0")
"""The first device as the driver shows it."""


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


@dataclass(frozen=True)
class Device:
    """The first device."""

    total_bytes: int | None
    """Its memory; None if the driver does not report it."""


def first_device() -> Device | None:
    """Return the first device, or None if MLX cannot use one."""
    if not has_cuda_build():
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        initialized = False
    else:
        initialized = nvml.nvmlInit_v2() == 0
    if not initialized:  # containers may have a device, and no library that describes it
        return Device(None) if _DEVICE_FILE.exists() else None
    device, memory = ctypes.c_void_p(), _Memory()
    found = nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) == 0
    known = found and nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    nvml.nvmlShutdown()
    return Device(int(memory.total) if known else None) if found else None
