"""The text that MLX itself would compile for Metal, on any machine."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import mlx.core as mx


def printed_by_mlx(launch: Any) -> str:
    """Return the text that MLX would compile: an export prints it, even without Metal."""
    kernel = mx.fast.metal_kernel(
        launch.name, list(launch.input_names), list(launch.output_names), launch.source,
        launch.header,
    )  # fmt: skip

    def call(*arrays: mx.array) -> list[mx.array]:
        return kernel(
            inputs=list(arrays),
            template=list(launch.template),
            output_shapes=launch.output_shapes,
            output_dtypes=launch.output_dtypes,
            grid=launch.grid,
            threadgroup=launch.threadgroup,
            stream=mx.gpu,
            verbose=True,
        )

    with tempfile.TemporaryFile() as caught, tempfile.TemporaryDirectory() as folder:
        stdout = os.dup(1)
        os.dup2(caught.fileno(), 1)  # MLX prints from C++, not through `sys.stdout`
        try:
            mx.export_function(str(Path(folder) / "f"), call, *launch.inputs)
        finally:
            os.dup2(stdout, 1)
            os.close(stdout)
        caught.seek(0)
        return caught.read().decode().split("```\n")[1]
