"""NVIDIA: the memory of each device, read through the driver's library.

Only with MLX's CUDA build: a device that MLX does not use limits nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
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
    """A device that this process may use."""

    total_bytes: int | None
    """Its memory; None if the driver does not report it."""
    name: str = "0"
    """Its number or its unique id, as in ``CUDA_VISIBLE_DEVICES``."""


def first_device() -> Device | None:
    """Return the first device, or None if MLX cannot use one."""
    return next(iter(devices()), None)


def devices() -> list[Device]:
    """Return the devices that MLX can use: those of ``CUDA_VISIBLE_DEVICES``, otherwise all."""
    if not has_cuda_build():
        return []
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        initialized = False
    else:
        initialized = nvml.nvmlInit_v2() == 0
    if not initialized:  # containers may have a device, and no library that describes it
        return [Device(None)] if _DEVICE_FILE.exists() else []
    found = []
    for name in _visible_names(nvml):
        if (device := _read(nvml, name)) is None:
            break  # CUDA ignores what follows an invalid name
        found.append(device)
    nvml.nvmlShutdown()
    return found


def _visible_names(nvml: ctypes.CDLL) -> list[str]:
    if (allowed := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name.strip() for name in allowed.split(",") if name.strip()]
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return [str(number) for number in range(count.value)]


def _read(nvml: ctypes.CDLL, name: str) -> Device | None:
    device, memory = ctypes.c_void_p(), _Memory()
    if name.isdigit():
        status = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), ctypes.byref(device))
    else:
        status = nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(device))
    if status != 0:
        return None
    known = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    return Device(int(memory.total) if known else None, name)
