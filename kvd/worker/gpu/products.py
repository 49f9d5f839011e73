"""Products of few rows on CUDA, in one kernel: ``x @ weight.T`` for the rows of a decode step.

The kernel can include the layer's work before and after: the norm of its inputs, a bias, the
residual, the gate of an MLP.

MLX calls cuBLASLt for each product, which costs the host 9.6 µs. A custom kernel is launched in a
third of that. This one writes a separate output for each of several joined layers. It sums in one
order for any number of rows, so a row's numbers do not depend on its batch.

A block of warps computes 16 outputs. The tensor cores' ``m16n8k16`` takes weights as its left side
and 8 rows as its right side, so weights are read once, straight into registers. Both sides may be
permuted alike along the inputs, so each lane reads 16 bytes at a time. Of each block of 32 inputs,
lane ``4 g + t`` reads eight, of outputs ``g`` and ``g + 8`` and of row ``g``::

    inputs   0..7     8..15    16..23   24..31
    t        0        1        2        3

Sums are float32. The kernel is used only if `find` has verified it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product
from typing import Any

import mlx.core as mx

from kvd.worker.artifacts import modules
from kvd.worker.artifacts.checks import Checks
from kvd.worker.attention.kernels.kernel_files import CudaKernel
from kvd.worker.device import on_cuda

COMPILING = 0.1
"""Fraction of the load before these kernels are compiled."""
MOST_ROWS = 32
OUTPUTS = 16
"""Outputs per block of threads; every layer's number of outputs must be a multiple of it."""
INPUTS = 32
"""Inputs that a warp reads at once; the number of inputs must be a multiple of it."""
WARPS = 8
_ROWS = 8
_PTX = {mx.bfloat16: "bf16", mx.float16: "f16"}
_PAIRS = {
    "bf16": {
        "pair": "__nv_bfloat162",
        "widen": "__bfloat1622float2",
        "narrow": "__float22bfloat162_rn",
    },
    "f16": {"pair": "__half2", "widen": "__half22float2", "narrow": "__float22half2_rn"},
}
_TOLERANCE = {mx.bfloat16: 2.0**-7, mx.float16: 2.0**-10}
"""Half an ulp of the output, and as much again for sums in a different order."""

Product = Callable[[mx.array, mx.array, Sequence[int]], list[mx.array]]
"""Multiplies ``[batch, 1, inputs]`` with weights ``[outputs, inputs]``; returns an array
``[batch, 1, size]`` for each of the given sizes, which add up to the outputs."""

_HEADER = """
typedef %(pair)s Pair;
__device__ inline void multiply(
    float (&sums)[4],
    unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.%(type)s.%(type)s.f32 "
      "{%%0, %%1, %%2, %%3}, {%%4, %%5, %%6, %%7}, {%%8, %%9}, {%%0, %%1, %%2, %%3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline float2 both(unsigned word) {
  return %(widen)s(*reinterpret_cast<const Pair*>(&word));
}
__device__ inline float squares(unsigned word) {
  const float2 two = both(word);
  return two.x * two.x + two.y * two.y;
}
__device__ inline unsigned scaled(unsigned word, unsigned weights, float factor) {
  const float2 two = both(word), by = both(weights);
  const Pair found = %(narrow)s(make_float2(two.x * factor * by.x, two.y * factor * by.y));
  return *reinterpret_cast<const unsigned*>(&found);
}
"""

_NORM = """
  __shared__ float norms[TILES * 8];
  for (int row = warp; row < TILES * 8; row += WARPS) {
    float sum = 0;
    if (row < rows) {
      const uint4* from = reinterpret_cast<const uint4*>(x + size_t(row) * K);
      for (int at = lane; at < K / 8; at += 32) {
        const uint4 v = from[at];
        sum += squares(v.x) + squares(v.y) + squares(v.z) + squares(v.w);
      }
    }
    for (int bit = 16; bit; bit /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, bit);
    if (lane == 0) norms[row] = rsqrtf(sum / K + %(eps)s);
  }
  __syncthreads();
  float factors[TILES];
  for (int tile = 0; tile < TILES; ++tile) factors[tile] = norms[tile * 8 + g];
  const uint4* weights = reinterpret_cast<const uint4*>(norm) + t;
"""
"""The text before the product: computes the factor that normalizes each row."""

_SCALE = """
      const uint4 by = weights[block * 4];
      v.x = scaled(v.x, by.x, factors[tile]), v.y = scaled(v.y, by.y, factors[tile]);
      v.z = scaled(v.z, by.z, factors[tile]), v.w = scaled(v.w, by.w, factors[tile]);
"""

_SOURCE = """
  const int rows = x_shape[0];
  const int lane = threadIdx.x %% 32, warp = threadIdx.x / 32;
  const int g = lane / 4, t = lane %% 4;
  const int first = blockIdx.x * %(made)s;
  const uint4* upper = reinterpret_cast<const uint4*>(w + size_t(first + g) * K) + t;
  const uint4* lower = upper + size_t(K) * %(apart)s / 8;  // eight inputs in a uint4
  const uint4* right = reinterpret_cast<const uint4*>(x + size_t(g) * K) + t;
%(norm)s
  float sums[TILES][4] = {};
#pragma unroll 4
  for (int block = warp; block < K / 32; block += WARPS) {
    const uint4 a = upper[block * 4], b = lower[block * 4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (tile * 8 + g < rows) v = right[block * 4 + tile * K];
%(scale)s
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
  for (int at = threadIdx.x; at < rows * %(made)s; at += WARPS * 32) {
    const int row = at / %(made)s, output = at %% %(made)s;
    float sum = 0;
    for (int one = 0; one < WARPS; ++one) sum += parts[one][row][output];
    int place = first + output;
%(put)s
  }
"""

_GATED = """
    float up = 0;
    for (int one = 0; one < WARPS; ++one) up += parts[one][row][output + 8];
    out0[row * %(size)s + place] = sum / (1.0f + __expf(-sum)) * up;
"""


@dataclass(frozen=True, eq=False)
class Norm:
    """The RMS norm of a product's inputs."""

    weight: mx.array
    """``[inputs]``."""
    eps: float

    def of(self, x: mx.array) -> mx.array:
        """Return normed inputs, by MLX's operation; lazy."""
        found: mx.array = mx.fast.rms_norm(x, self.weight, self.eps)
        return found


def find(dtype: mx.Dtype | None, checks: Checks | None = None) -> Product | None:
    """Return the kernel for weights of this dtype, if it works on the device with right results.

    ``checks``: kept results. ``KVD_NATIVE=off`` in the environment disables the kernel.
    """
    if not on_cuda():
        return None
    if dtype not in _PTX or os.environ.get("KVD_NATIVE") == "off":
        return None
    right = (checks or Checks()).agrees(f"products of {dtype}", partial(_is_right, dtype))
    return multiply if right else None


def _is_right(dtype: mx.Dtype) -> bool:
    try:
        with modules.ahead(COMPILING):
            results = [_results(dtype, *shape) for shape in product((1, 8, 9, 32), (96, 1024))]
        return all(_are_right(dtype, *one) for one in results)
    except (RuntimeError, ValueError):  # a device before sm_80, or no compiler
        return False


def fits(x: mx.array, sizes: Sequence[int]) -> bool:
    """Return whether `multiply` accepts these inputs: those of a decode step with few rows."""
    return (
        x.ndim == 3
        and x.shape[1] == 1
        and x.shape[0] <= MOST_ROWS
        and x.shape[2] % INPUTS == 0
        and not any(size % OUTPUTS for size in sizes)
    )


def multiply(
    x: mx.array,
    weight: mx.array,
    sizes: Sequence[int],
    *,
    norm: Norm | None = None,
    bias: mx.array | None = None,
    residual: mx.array | None = None,
) -> list[mx.array]:
    """Multiply ``[batch, ..., inputs]`` with weights ``[outputs, inputs]``; see `Product`.

    ``norm`` is applied to ``x`` before. ``bias``, ``[outputs]``, and ``residual``,
    ``[batch, 1, outputs]``, are added after; with a residual there may be only one size.
    """
    extra = {"norm": None if norm is None else norm.weight, "bias": bias, "residual": residual}
    given = {name: array for name, array in extra.items() if array is not None}
    variant = _Variant(weight.dtype, tuple(sizes), tuple(given), None if norm is None else norm.eps)
    shapes = [(x.shape[0], 1, size) for size in sizes]
    return _run(variant, x, weight, list(given.values()), sum(sizes) // OUTPUTS, shapes)


def multiply_gated(x: mx.array, weight: mx.array, norm: Norm) -> mx.array:
    """Return ``silu(gate) * up`` of normed inputs, ``[batch, 1, size]``.

    ``weight``: ``[2 * size, inputs]``, the gate's rows, then those of ``up``. The size must be a
    multiple of 8.
    """
    size = weight.shape[0] // 2
    variant = _Variant(weight.dtype, (size,), ("norm",), norm.eps, gated=True)
    (found,) = _run(variant, x, weight, [norm.weight], size // 8, [(x.shape[0], 1, size)])
    return found


@dataclass(frozen=True)
class _Variant:
    """Everything that a kernel's text depends on."""

    dtype: mx.Dtype
    sizes: tuple[int, ...]
    extra: tuple[str, ...] = ()
    eps: float | None = None
    gated: bool = False

    @property
    def name(self) -> str:
        # MLX finds a compiled kernel by its name: the name covers all that the source depends on.
        eps = "" if self.eps is None else float(self.eps).hex().replace(".", "_")
        eps = eps.replace("-", "m").replace("+", "p")
        parts = ["gated"] if self.gated else []
        parts += [*self.extra, eps, *map(str, self.sizes)]
        return "_".join(["kvd_product", _PTX[self.dtype], *filter(None, parts)])

    @property
    def source(self) -> str:
        normed = "norm" in self.extra
        return _SOURCE % {
            "made": 8 if self.gated else OUTPUTS,
            "apart": self.sizes[0] if self.gated else 8,
            "norm": _NORM % {"eps": f"{float(self.eps or 0.0).hex()}f"} if normed else "",
            "scale": _SCALE if normed else "",
            "put": _GATED % {"size": self.sizes[0]} if self.gated else self._puts(),
        }

    def _puts(self) -> str:
        lines = []
        if "bias" in self.extra:
            lines.append("    sum += float(bias[place]);")
        if "residual" in self.extra:
            lines.append(f"    sum += float(residual[row * {self.sizes[0]} + place]);")
        for number, size in enumerate(self.sizes):
            lines.append(
                f"    if (place >= 0 && place < {size}) out{number}[row * {size} + place] = sum;"
            )
            lines.append(f"    place -= {size};")
        return "\n".join(lines)


def _run(
    variant: _Variant,
    x: mx.array,
    weight: mx.array,
    extra: list[mx.array],
    blocks: int,
    shapes: Sequence[tuple[int, ...]],
) -> list[mx.array]:
    inputs = weight.shape[1]
    template = ("K", inputs), ("TILES", -(-x.shape[0] // _ROWS)), ("WARPS", WARPS)
    found: list[mx.array] = _kernel(variant, template)(
        inputs=[x, weight, *extra],
        template=list(template),
        grid=(blocks * WARPS * 32, 1, 1),
        threadgroup=(WARPS * 32, 1, 1),
        output_shapes=list(shapes),
        output_dtypes=[weight.dtype] * len(shapes),
    )
    return found


@lru_cache
def _kernel(variant: _Variant, _template: tuple[tuple[str, int], ...]) -> Any:
    ptx = _PTX[variant.dtype]  # a `CudaKernel` is created once per template
    return CudaKernel(
        name=variant.name,
        input_names=["x", "w", *variant.extra],
        output_names=[f"out{number}" for number in range(len(variant.sizes))],
        source=variant.source,
        header=_HEADER % ({"type": ptx} | _PAIRS[ptx]),
    )


def _results(dtype: mx.Dtype, rows: int, inputs: int) -> tuple[mx.array, mx.array, int]:
    """Return the kernel's result, the product in float32, and the number of inputs; lazy.

    There are three layers of different sizes.
    """
    keys = mx.random.split(mx.random.key(rows * inputs))
    sizes = (48, 16, 32)
    x = mx.random.normal((rows, 1, inputs), key=keys[0]).astype(dtype)
    weight = mx.random.normal((sum(sizes), inputs), key=keys[1]).astype(dtype)
    got = mx.concatenate(multiply(x, weight, sizes), axis=-1).astype(mx.float32)
    return got, x.astype(mx.float32) @ weight.astype(mx.float32).T, inputs


def _are_right(dtype: mx.Dtype, got: mx.array, want: mx.array, inputs: int) -> bool:
    bound = _TOLERANCE[dtype] * (mx.abs(want) + inputs**0.5 * 2.0**-8)
    return bool(mx.isfinite(got).all()) and bool((mx.abs(got - want) <= bound).all())
