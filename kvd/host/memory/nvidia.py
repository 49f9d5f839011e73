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
_UNIQUE_ID_BYTES = 96


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
    return [str(number) for number in range(_count(nvml))]


def _count(nvml: ctypes.CDLL) -> int:
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    return count.value


def _read(nvml: ctypes.CDLL, name: str) -> Device | None:
    memory = _Memory()
    if (device := _handle(nvml, name)) is None:
        return None
    known = nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0
    return Device(int(memory.total) if known else None, name)


def _handle(nvml: ctypes.CDLL, name: str) -> ctypes.c_void_p | None:
    """Return NVML's handle of a device, by its number or its unique id; None if there is none.

    CUDA also accepts the beginning of a unique id.
    """
    device, unique_id = ctypes.c_void_p(), ctypes.create_string_buffer(_UNIQUE_ID_BYTES)
    reference = ctypes.byref(device)
    if name.isdigit():
        found = nvml.nvmlDeviceGetHandleByIndex_v2(int(name), reference) == 0
        return device if found else None
    if nvml.nvmlDeviceGetHandleByUUID(name.encode(), reference) == 0:
        return device
    for number in range(_count(nvml)):
        found = nvml.nvmlDeviceGetHandleByIndex_v2(number, reference) == 0
        found = found and nvml.nvmlDeviceGetUUID(device, unique_id, _UNIQUE_ID_BYTES) == 0
        if found and unique_id.value.startswith(name.encode()):
            return device
    return None
