"""Two texts of one CUDA kernel: MLX's, which names the module, and kvd's, which compiles fast.

MLX 0.32.4 puts its own headers and CCCL before every custom kernel. They take NVRTC seconds per
kernel. kvd's text defines the few types and functions that its kernels use, and nothing else.
Both texts have the same signature and the same body, so MLX can launch the module of either.

Before MLX compiles a custom kernel, it looks for a module on disk, under a name that contains a
hash of its text (mlx/backend/cuda/custom_kernel.cpp, jit_module.cpp). It never writes one there.
If the name is wrong, for example in another version of MLX, then MLX finds nothing and compiles.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import mlx.core as mx

Template = Sequence[tuple[str, int | bool | mx.Dtype]]

_TYPES = {
    mx.float32: "float",
    mx.float16: "__half",
    mx.bfloat16: "__nv_bfloat16",
    mx.bool_: "bool",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
}
_TEMPLATE_NAMES = _TYPES | {mx.float16: "float16_t", mx.bfloat16: "bfloat16_t"}
_MLX_HEADER = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

"""
_MLX_NAMESPACE = "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
_HASH_SEED = 0xC70F6907

_OWN_HEADER = """
typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
template <typename T> struct Ten {
  T of[10];
  __device__ const T& operator[](int at) const { return of[at]; }
};
typedef Ten<int32_t> Shape;
typedef Ten<int64_t> Strides;
struct __align__(2) __half {
  unsigned short bits;
  __half() = default;
  __device__ __half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};
struct __align__(2) __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __device__ __nv_bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ operator float() const { return __uint_as_float((unsigned)bits << 16); }
};
struct __align__(4) __half2 {
  __half x, y;
};
struct __align__(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
__device__ inline __half __ushort_as_half(unsigned short bits) {
  __half x;
  x.bits = bits;
  return x;
}
__device__ inline float __half2float(__half x) { return x; }
__device__ inline float2 __half22float2(__half2 two) { return make_float2(two.x, two.y); }
__device__ inline __half2 __floats2half2_rn(float x, float y) {
  __half2 two;
  two.x = __half(x), two.y = __half(y);
  return two;
}
__device__ inline __half2 __float22half2_rn(float2 two) {
  return __floats2half2_rn(two.x, two.y);
}
__device__ inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  __half2 found;
  asm("fma.rn.f16x2 %0, %1, %2, %3;"
      : "=r"(*(unsigned*)&found)
      : "r"(*(unsigned*)&a), "r"(*(unsigned*)&b), "r"(*(unsigned*)&c));
  return found;
}
__device__ inline float2 __bfloat1622float2(__nv_bfloat162 two) {
  return make_float2(two.x, two.y);
}
__device__ inline __nv_bfloat162 __float22bfloat162_rn(float2 two) {
  __nv_bfloat162 found;
  found.x = __nv_bfloat16(two.x), found.y = __nv_bfloat16(two.y);
  return found;
}
"""


@dataclass(frozen=True)
class Argument:
    """An input or output of a kernel."""

    name: str
    dtype: mx.Dtype
    scalar: bool = False
    """Whether it is an array without dimensions, which has no shape to pass."""


@dataclass(frozen=True)
class KernelText:
    """A custom kernel with everything that its two texts depend on."""

    name: str
    """As given to MLX."""
    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    template: tuple[tuple[str, int | bool | mx.Dtype], ...]
    source: str
    header: str
    mlx_source: str
    """The body as given to MLX: the source itself, or a line that includes it from a file."""
    mlx_header: str

    @property
    def symbol(self) -> str:
        """The name of the function in the module."""
        parts = ["custom_kernel_", self.name]
        for _, value in self.template:
            if isinstance(value, bool):
                parts.append("_t" if value else "_f")
            else:
                parts.append(f"_{_TEMPLATE_NAMES[value] if isinstance(value, mx.Dtype) else value}")
        return "".join(parts)

    @property
    def kernel(self) -> str:
        """The name by which MLX asks the module for the function."""
        return f"mlx::core::cu::{self.symbol}"

    @property
    def mlx_text(self) -> str:
        """The text that MLX compiles if it finds no module."""
        body = self._function(self.mlx_source, self.mlx_source)
        front = _MLX_HEADER + self.mlx_header + _MLX_NAMESPACE
        return f"{front}{body}\n}} // namespace mlx::core::cu\n"

    @property
    def own_text(self) -> str:
        body = self._function(self.source, self.mlx_source)
        return f'{_OWN_HEADER}{self.header}\nextern "C" {body}'

    @property
    def module(self) -> str:
        """The name under which MLX looks for the module."""
        return f"{self.symbol}_{_hash(self.mlx_text.encode()):x}"

    def _function(self, source: str, named_in: str) -> str:
        """Return the function. MLX passes a property of an input if ``named_in`` contains it."""
        lines = []
        for given in self.inputs:
            lines.append(f"    const {_TYPES[given.dtype]}* {given.name}")
            if not given.scalar:
                for what, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
                    if f"{given.name}_{what}" in named_in:
                        lines.append(f"    const __grid_constant__ {kind} {given.name}_{what}")
        lines += [f"    {_TYPES[made.dtype]}* {made.name}" for made in self.outputs]
        constants = "".join(map(_constant, self.template)) + ("\n" if self.template else "")
        head = f"__global__ void {self.symbol}(\n" + ",\n".join(lines) + ") {\n"
        return f"{head}{constants}{source}\n}}\n"


def _constant(given: tuple[str, int | bool | mx.Dtype]) -> str:
    name, value = given
    if isinstance(value, mx.Dtype):
        return f"  using {name} = {_TYPES[value]};\n"
    if isinstance(value, bool):
        return f"  constexpr bool {name} = {str(value).lower()};\n"
    return f"  constexpr int {name} = {value};\n"


@cache
def _libstdcxx() -> ctypes.CDLL:
    library = ctypes.CDLL("libstdc++.so.6")
    function = library._ZSt11_Hash_bytesPKvmm  # noqa: SLF001 - its exported name
    function.restype = ctypes.c_size_t
    function.argtypes = [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t]
    return library


def _hash(data: bytes) -> int:
    """Return libstdc++'s ``std::hash`` of a string."""
    found: int = _libstdcxx()._ZSt11_Hash_bytesPKvmm(data, len(data), _HASH_SEED)  # noqa: SLF001
    return found
