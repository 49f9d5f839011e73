"""Which BLAS library workers preload on Linux.

MLX's CPU wheel carries reference BLAS; OpenBLAS in its place is 6 to 80 times faster for what a
model does, so a worker that computes on the CPU starts with it when the machine has it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvd.host.memory import nvidia
from protocol.errors import ConfigError

_NAME = "libopenblas.so.0"
_FOLDERS = (
    "usr/lib/*-linux-gnu*",  # Debian, Ubuntu
    "usr/lib/*-linux-gnu*/openblas-pthread",
    "usr/lib64",  # Fedora
    "usr/lib",  # Arch
    "usr/local/lib",
)


def choose(setting: str) -> Path | None:
    """Return the library for the setting ``auto``, ``off`` or a path; None preloads nothing."""
    if setting == "off" or sys.platform != "linux":
        return None
    if setting != "auto":
        path = Path(setting).expanduser()
        if not path.is_file():
            raise ConfigError(f"blas: no library at {path}; use auto, off or a path", key="blas")
        return path
    if nvidia.total_memory() is not None:  # the device computes
        return None
    return find()


def find(root: Path = Path("/")) -> Path | None:
    """Return the machine's OpenBLAS, the first in the order of the folders above."""
    for folder in _FOLDERS:
        for path in sorted(root.glob(f"{folder}/{_NAME}")):
            return path
    return None
