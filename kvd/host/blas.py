"""The BLAS library that workers preload on Linux, if they compute on the CPU.

MLX's CPU wheel contains reference BLAS. OpenBLAS is 6 to 80 times faster for matrix products.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvd.host.memory import nvidia
from protocol import paths
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
    """Return the library to preload for ``auto``, ``off`` or a path; None for no preload."""
    if setting == "off" or sys.platform != "linux":
        return None
    if setting != "auto":
        path = Path(setting).expanduser()
        if not paths.is_file(path):
            raise ConfigError(
                f"blas: no library at {path}; set auto, off or an existing path", key="blas"
            )
        return path
    return None if nvidia.first_device() else find()


def find(root: Path = Path("/")) -> Path | None:
    """Return the machine's OpenBLAS, searching the folders in their order."""
    found = (path for folder in _FOLDERS for path in sorted(root.glob(f"{folder}/{_NAME}")))
    return next(found, None)
