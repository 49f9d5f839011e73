"""Products of few rows on CUDA, as one kernel: ``x @ weight.T`` for the rows of a decode step.

MLX asks cuBLASLt for each product, which takes the host 9.6 µs; a kernel of one's own is launched
in a third of that, gives each of several joined layers its own output, and sums in one order for
any number of rows: a row gets the same numbers alone and in company.

A block of warps makes 16 outputs. The tensor cores' ``m16n8k16`` takes weights as its left side and
8 rows as its right one, so weights are read once, straight into registers. Both sides may be
permuted alike along the inputs, so each lane reads 16 bytes at a time. ::

    inputs   0..7     8..15    16..23   24..31      of a block of 32
    lane t   0        1        2        3           reads them, of outputs g and g + 8, and of row g

Sums are float32. Used only where `find` has found it right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import mlx.core as mx

MOST_ROWS = 32
OUTPUTS = 16
"""Of one block; every layer's number of outputs is a multiple of it."""
INPUTS = 32
"""Of one turn of a warp; the number of inputs is a multiple of it."""
WARPS = 8
_ROWS = 8
_PTX = {mx.bfloat16: "bf16", mx.float16: "f16"}
_TOLERANCE = {mx.bfloat16: 2.0**-7, mx.float16: 2.0**-10}
"""Half an ulp of the output, and as much again for the order of sums."""

Product = Callable[[mx.array, mx.array, Sequence[int]], list[mx.array]]
"""``[batch, 1, inputs]`` times weights ``[outputs, inputs]`` as one array ``[batch, 1, size]`` for
each of the sizes that the outputs are made of."""

_HEADER = """
__device__ inline void multiply(
    float (&sums)[4],
    unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.%(type)s.%(type)s.f32 "
      "{%%0, %%1, %%2, %%3}, {%%4, %%5, %%6, %%7}, {%%8, %%9}, {%%0, %%1, %%2, %%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
"""

_SOURCE = """
  const int rows = x_shape[0];
  const int lane = threadIdx.x %% 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane %% 4;
  const int first = blockIdx.x * 16;
  const uint4* upper = reinterpret_cast<const uint4*>(w + size_t(first + g) * K) + t;
  const uint4* lower = upper + K;  // eight outputs further, eight inputs in a uint4
  const uint4* right = reinterpret_cast<const uint4*>(x + size_t(g) * K) + t;
  float sums[TILES][4] = {};
#pragma unroll 4
  for (int block = warp; block < K / 32; block += WARPS) {
    const uint4 a = upper[block * 4], b = lower[block * 4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (tile * 8 + g < rows) v = right[block * 4 + tile * K];
      multiply(sums[tile], a.x, b.x, a.y, b.y, v.x, v.y);
      multiply(sums[tile], a.z, b.z, a.w, b.w, v.z, v.w);
    }
  }
  __shared__ float parts[WARPS][TILES * 8][17];  // one more: no two lanes in one bank
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    for (int one = 0; one < 4; ++one) {
      parts[warp][tile * 8 + t * 2 + one %% 2][g + one / 2 * 8] = sums[tile][one];
    }
  }
  __syncthreads();
  for (int at = threadIdx.x; at < rows * 16; at += WARPS * 32) {
    const int row = at / 16, output = at %% 16;
    float sum = 0;
    for (int one = 0; one < WARPS; ++one) sum += parts[one][row][output];
    int place = first + output;
%(put)s
  }
"""


def find(dtype: mx.Dtype | None) -> Product | None:
    """Return the kernel for weights of a dtype, if this device has it and it is right.

    The environment's ``KVD_NATIVE=off`` goes without.
    """
    if mx.default_device().type == mx.DeviceType.cpu or not mx.cuda.is_available():
        return None
    if dtype not in _PTX or os.environ.get("KVD_NATIVE") == "off":
        return None
    try:
        right = all(_is_right(dtype, *shape) for shape in product((1, 8, 9, 32), (96, 1024)))
    except (RuntimeError, ValueError):  # a device before sm_80, or no compiler
        return None
    return multiply if right else None


def fits(x: mx.array, sizes: Sequence[int]) -> bool:
    """Return whether `multiply` takes these inputs: a decode step's, of few rows."""
    return (
        x.ndim == 3
        and x.shape[1] == 1
        and x.shape[0] <= MOST_ROWS
        and x.shape[2] % INPUTS == 0
        and not any(size % OUTPUTS for size in sizes)
    )


def multiply(x: mx.array, weight: mx.array, sizes: Sequence[int]) -> list[mx.array]:
    """Multiply ``[batch, 1, inputs]`` with weights ``[outputs, inputs]``; see `Product`."""
    batch, _, inputs = x.shape
    tiles = -(-batch // _ROWS)
    kernel = _kernel(weight.dtype, tuple(sizes))
    found: list[mx.array] = kernel(
        inputs=[x, weight],
        template=[("K", inputs), ("TILES", tiles), ("WARPS", WARPS)],
        grid=(sum(sizes) // OUTPUTS * WARPS * 32, 1, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=[(batch, 1, size) for size in sizes],
        output_dtypes=[weight.dtype] * len(sizes),
    )
    return found


@lru_cache
def _kernel(dtype: mx.Dtype, sizes: tuple[int, ...]) -> Any:
    names = [f"out{number}" for number in range(len(sizes))]
    puts = []
    for name, size in zip(names, sizes, strict=True):
        puts.append(f"    if (place >= 0 && place < {size}) {name}[row * {size} + place] = sum;")
        puts.append(f"    place -= {size};")
    return mx.fast.cuda_kernel(
        # MLX finds a compiled kernel by its name: all that its source depends on is in there.
        name="_".join(["kvd_product", _PTX[dtype], *map(str, sizes)]),
        input_names=["x", "w"],
        output_names=names,
        source=_SOURCE % {"put": "\n".join(puts)},
        header=_HEADER % {"type": _PTX[dtype]},
    )


def _is_right(dtype: mx.Dtype, rows: int, inputs: int) -> bool:
    """Compare with the product in float32, on sizes of three layers."""
    keys = mx.random.split(mx.random.key(rows * inputs))
    sizes = (48, 16, 32)
    x = mx.random.normal((rows, 1, inputs), key=keys[0]).astype(dtype)
    weight = mx.random.normal((sum(sizes), inputs), key=keys[1]).astype(dtype)
    got = mx.concatenate(multiply(x, weight, sizes), axis=-1).astype(mx.float32)
    want = x.astype(mx.float32) @ weight.astype(mx.float32).T
    bound = _TOLERANCE[dtype] * (mx.abs(want) + inputs**0.5 * 2.0**-8)
    return bool(mx.isfinite(got).all()) and bool((mx.abs(got - want) <= bound).all())
