"""A launch with the attributes that `kvd.worker.attention.kernels.launch.Launch` has."""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Small:
    """A kernel of a few lines; one threadgroup of one simdgroup and one float32 output `y`."""

    source: str
    inputs: list[mx.array] = field(default_factory=list)
    input_names: tuple[str, ...] = ("x",)
    output_names: tuple[str, ...] = ("y",)
    output_shapes: list[tuple[int, ...]] = field(default_factory=lambda: [(32,)])
    output_dtypes: list[mx.Dtype] = field(default_factory=lambda: [mx.float32])
    grid: Triple = (32, 1, 1)
    threadgroup: Triple = (32, 1, 1)
    template: tuple[tuple[str, int | bool | mx.Dtype], ...] = ()
    header: str = ""
    name: str = "small"
