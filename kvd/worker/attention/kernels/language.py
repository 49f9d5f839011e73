"""The primitives that Metal and CUDA name differently.

The kernels' text (`kvd.worker.attention.kernels.decode`) is the same for both. It uses kvd's names
for primitives, which `Language.header` defines, and for thread indices, which `Language.prologue`
declares.
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, eq=False)
class Language:
    """One language's definitions of the primitives, and its limits."""

    name: str
    prologue: str
    """Begins every kernel: declares ``lane``, ``warp``, ``me`` (thread in the block) and ``block``.
    """
    header: str
    dense: dict[mx.Dtype, str]
    """For each dtype of activations, how two elements in one 32-bit word become floats."""
    unit: int
    """``NUMBER`` turns a packed number ``n`` into the float ``n * 2 ** -unit``."""
    most_shared: int
    """Bytes of memory that the threads of a block may share."""
    most_buffers: int
    """Most arrays that one kernel may read and write."""
    output: str
    """Address space of the pointers that a kernel writes to."""
    matrix: bool
    """Whether kernels use tensor cores (`kvd.worker.attention.kernels.matrix`)."""


METAL = Language(
    "metal",
    prologue="""
  const int lane = thread_index_in_simdgroup, warp = simdgroup_index_in_threadgroup;
  const int me = warp * 32 + lane;
  const uint3 block = threadgroup_position_in_grid;
""",
    header="""
#define SHARED threadgroup
#define GLOBAL const device
#define SYNC_BLOCK() threadgroup_barrier(mem_flags::mem_threadgroup)
#define SYNC_WARP() simdgroup_barrier(mem_flags::mem_threadgroup)
#define SWAP(x, bit) simd_shuffle_xor(x, ushort(bit))
#define SAME(x) (x)
#define LARGEST(x) simd_max(x)
#define SUM(x) simd_sum(x)
#define POWER(x) metal::fast::exp2(x)
#define COS(x) metal::precise::cos(x)
#define SIN(x) metal::precise::sin(x)
#define SQRT(x) metal::precise::sqrt(x)
#define ROUND(x) metal::rint(x)
#define NUMBER(word) float(word)
#define ALIGN(low, high, shift) ((low) >> (shift) | (high) << 1 << (31 - (shift)))
#define BITS(word) as_type<float>(word)
""",
    dense={
        mx.float32: "",
        mx.bfloat16: """
#define LOW(word) as_type<float>((word) << 16)
#define HIGH(word) as_type<float>((word) & 0xffff0000u)
""",
        mx.float16: """
#define LOW(word) float(as_type<half>(ushort(word)))
#define HIGH(word) float(as_type<half>(ushort((word) >> 16)))
""",
    },
    unit=0,
    most_shared=32 * 1024,
    most_buffers=31,
    output="device",
    matrix=False,
)

CUDA = Language(
    "cuda",
    prologue="""
  const int me = threadIdx.x, lane = me % 32, warp = SAME(int(me / 32));
  const auto block = blockIdx;
""",
    header="""
#define SHARED __shared__
#define GLOBAL const
#define SYNC_BLOCK() __syncthreads()
#define SYNC_WARP() __syncwarp()
#define SWAP(x, bit) __shfl_xor_sync(0xffffffffu, x, bit)
#define SAME(x) __shfl_sync(0xffffffffu, x, 0)
#ifndef POWER
__device__ inline float POWER(float x) {  // exp2f also minds what is too small to matter
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}
#endif
#define COS(x) cosf(x)
#define SIN(x) sinf(x)
#define SQRT(x) sqrtf(x)
#define ROUND(x) rintf(x)
#define NUMBER(word) __uint_as_float(word)
#define ALIGN(low, high, shift) __funnelshift_r(low, high, shift)
#define BITS(word) __uint_as_float(word)
typedef unsigned short ushort;
typedef unsigned int uint;
__device__ inline float LARGEST(float x) {
  for (int bit = 16; bit; bit /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, bit));
  return x;
}
__device__ inline float SUM(float x) {
  for (int bit = 16; bit; bit /= 2) x += __shfl_xor_sync(0xffffffffu, x, bit);
  return x;
}
""",
    dense={
        mx.float32: "",
        mx.bfloat16: """
#define LOW(word) __uint_as_float((word) << 16)
#define HIGH(word) __uint_as_float((word) & 0xffff0000u)
""",
        mx.float16: """
#define LOW(word) __half2float(__ushort_as_half((unsigned short)(word)))
#define HIGH(word) __half2float(__ushort_as_half((unsigned short)((word) >> 16)))
""",
    },
    # The bits of a small integer are a denormal float, so no conversion is needed.
    unit=149,
    most_shared=48 * 1024,
    most_buffers=128,
    output="",
    matrix=True,
)
