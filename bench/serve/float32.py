"""Converts weights to float32.

On a machine that computes on the CPU, MLX emulates half precision, many times slower. kvd would
convert at load and mlx_lm.server would not, but conversion is not what is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any


def convert(file: Path, copy: Path) -> None:
    """Write the weights of a safetensors file to another, in float32."""
    import mlx.core as mx

    weights: Any = mx.load(str(file), stream=mx.cpu)
    converted = {
        name: array.astype(mx.float32, stream=mx.cpu)
        if mx.issubdtype(array.dtype, mx.floating)
        else array
        for name, array in weights.items()
    }
    mx.save_safetensors(str(copy), converted)
