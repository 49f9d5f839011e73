"""Prints MLX's version and device as one JSON object: ``python -m kvd.worker.tools.examine``.

`kvctl doctor` runs this program, because it does not import MLX itself. One small product is
computed, because a device that is present may still not work.
"""

from __future__ import annotations

import os
import sys
from importlib.metadata import version
from typing import Any

import mlx.core as mx
import msgspec

from kvd.worker.native import build


def examine() -> dict[str, Any]:
    device = mx.default_device()
    on_cpu = device.type == mx.DeviceType.cpu
    matrix = mx.arange(64 * 64).reshape(64, 64).astype(mx.float32) / 4096
    product = matrix @ mx.eye(64)
    accelerator = "metal" if mx.metal.is_available() else "cuda"
    wrong = float(mx.abs(product - matrix).max().item())  # type: ignore[arg-type]
    info = mx.device_info()
    return {
        "mlx": version("mlx"),
        "device": "cpu" if on_cpu else accelerator,
        "name": str(info.get("device_name") or info.get("architecture") or ""),
        "memory_bytes": int(info.get("memory_size") or 0),
        "recommended_bytes": int(info.get("max_recommended_working_set_size") or 0),
        "error": wrong,
        "blas": os.environ.get("KVD_BLAS_PRELOADED"),
        "blas_core": os.environ.get("OPENBLAS_CORETYPE"),
        "native_built": on_cpu and build.is_built(),
        "compiler": build.compiler(),
        "device_info": dict(info),
    }


def main() -> None:
    sys.stdout.write(msgspec.json.encode(examine()).decode() + "\n")


if __name__ == "__main__":
    main()
