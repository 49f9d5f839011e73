"""Small kernels that test the shim, with the attributes of
`kvd.worker.attention.kernels.launch.Launch`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import mlx.core as mx

from tests.worker.kernels.wrap import Language

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class Small:
    """A kernel of a few lines: one threadgroup of one simdgroup, and one float32 output `y`."""

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


# The two languages differ in these words; the rest of the kernels is C++.
WORDS: dict[Language, dict[str, str]] = {
    "metal": {
        "@shared": "threadgroup",
        "@barrier": "threadgroup_barrier(mem_flags::mem_threadgroup)",
        "@thread": "thread_index_in_threadgroup",
        "@lane": "thread_index_in_simdgroup",
        "@group": "threadgroup_position_in_grid.x",
        "@device": "device",
    },
    "cuda": {
        "@shared": "__shared__",
        "@barrier": "__syncthreads()",
        "@thread": "threadIdx.x",
        "@lane": "(threadIdx.x % 32)",
        "@group": "blockIdx.x",
        "@device": "",
    },
}


def small(language: Language, source: str, x: mx.array | None = None, **about) -> Small:
    """Return a kernel over `x` (0 to 31 by default) whose source fits both languages."""
    for word, meaning in WORDS[language].items():
        source = source.replace(word, meaning)
    x = mx.arange(32, dtype=mx.float32) if x is None else x
    return Small(source, [x], **about)
