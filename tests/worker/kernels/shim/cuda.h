// The part of CUDA's language that the kernels use, in C++. As in CUDA, half and bfloat16 do not
// mix with float. Not covered: cooperative groups, atomics, textures, and inline PTX, which
// tensor.h replaces.
#pragma once

#include "common.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __grid_constant__
#define __restrict__ __restrict
#define __launch_bounds__(...)
// One array for all blocks, because blocks run one after another.
#define __shared__ static __attribute__((used))

#define SHIM_VECTORS(T, name)                                                       \
  struct alignas(2 * sizeof(T)) name##2 {                                           \
    T x, y;                                                                         \
  };                                                                                \
  struct name##3 {                                                                  \
    T x, y, z;                                                                      \
  };                                                                                \
  struct alignas(4 * sizeof(T)) name##4 {                                           \
    T x, y, z, w;                                                                   \
  };                                                                                \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                        \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SHIM_VECTORS(unsigned char, uchar)
SHIM_VECTORS(short, short)
SHIM_VECTORS(unsigned short, ushort)
SHIM_VECTORS(int, int)
SHIM_VECTORS(unsigned int, uint)
SHIM_VECTORS(float, float)
#undef SHIM_VECTORS

using uint = unsigned int;
using ushort = unsigned short;

struct __half {
  ShimHalf value;
  __half() = default;
  __half(float from) : value(ShimHalf(from)) {}
  operator float() const { return float(value); }
};
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float from) : bits(shim_to_bfloat(from)) {}
  operator float() const { return shim_from_bfloat(bits); }
};
#define SHIM_ARITHMETIC(T)                                                           \
  inline T operator+(T a, T b) { return T(float(a) + float(b)); }                    \
  inline T operator-(T a, T b) { return T(float(a) - float(b)); }                    \
  inline T operator*(T a, T b) { return T(float(a) * float(b)); }                    \
  inline T operator/(T a, T b) { return T(float(a) / float(b)); }
SHIM_ARITHMETIC(__half)
SHIM_ARITHMETIC(__nv_bfloat16)
#undef SHIM_ARITHMETIC
using half = __half;
using nv_bfloat16 = __nv_bfloat16;

inline float __half2float(__half x) { return float(x); }
inline __half __float2half(float x) { return __half(x); }
inline __half __float2half_rn(float x) { return __half(x); }
inline float __bfloat162float(__nv_bfloat16 x) { return float(x); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
inline __half __ushort_as_half(unsigned short x) { return std::bit_cast<__half>(x); }
inline unsigned short __half_as_ushort(__half x) { return std::bit_cast<unsigned short>(x); }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) {
  return std::bit_cast<__nv_bfloat16>(x);
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline float __int_as_float(int x) { return std::bit_cast<float>(x); }
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline int __float_as_int(float x) { return std::bit_cast<int>(x); }

inline float expf(float x) { return __builtin_expf(x); }
inline float exp2f(float x) { return __builtin_exp2f(x); }
inline float __expf(float x) { return __builtin_expf(x); }
inline float logf(float x) { return __builtin_logf(x); }
inline float log2f(float x) { return __builtin_log2f(x); }
inline float __logf(float x) { return __builtin_logf(x); }
inline float cosf(float x) { return __builtin_cosf(x); }
inline float sinf(float x) { return __builtin_sinf(x); }
inline float sqrtf(float x) { return __builtin_sqrtf(x); }
inline float rintf(float x) { return __builtin_rintf(x); }
inline float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float fabsf(float x) { return __builtin_fabsf(x); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fmaf(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float __fdividef(float a, float b) { return a / b; }
inline bool isnan(float x) { return __builtin_isnan(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline bool isfinite(float x) { return __builtin_isfinite(x); }
template <typename T>
  requires std::is_integral_v<T>
T max(T a, T b) {
  return a > b ? a : b;
}
template <typename T>
  requires std::is_integral_v<T>
T min(T a, T b) {
  return a < b ? a : b;
}
inline float max(float a, float b) { return fmaxf(a, b); }
inline float min(float a, float b) { return fminf(a, b); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> (shift & 31));
}
inline unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned shift) {
  return unsigned((uint64_t(high) << 32 | low) >> min(shift, 32u));
}
inline int __popc(unsigned x) { return std::popcount(x); }
template <typename T>
T __ldg(const T* from) {
  return *from;
}

struct dim3 {
  unsigned x, y, z;
};
#define threadIdx (dim3{shim_thread->position[0], shim_thread->position[1], shim_thread->position[2]})
#define blockIdx (dim3{shim_thread->group[0], shim_thread->group[1], shim_thread->group[2]})
#define blockDim (dim3{shim_thread->size[0], shim_thread->size[1], shim_thread->size[2]})
#define gridDim (dim3{shim_thread->groups[0], shim_thread->groups[1], shim_thread->groups[2]})
#define warpSize 32

inline void __syncthreads(unsigned line = __builtin_LINE()) {
  shim_wait(SHIM_GROUP_BARRIER, "__syncthreads", line);
}

constexpr unsigned SHIM_ALL = 0xffffffffu;

// Accepts only operations of whole warps, all lanes of which exist.
inline void shim_whole(unsigned mask) {
  const ShimThread& now = *shim_thread;
  unsigned threads = now.size[0] * now.size[1] * now.size[2];
  if (mask != SHIM_ALL) {
    shim_fail("a warp operation names a part of the warp only");
  }
  if (threads - now.index / SHIM_LANES * SHIM_LANES < SHIM_LANES) {
    shim_fail("a warp operation names lanes that do not exist");
  }
}

inline void __syncwarp(unsigned mask = SHIM_ALL, unsigned line = __builtin_LINE()) {
  shim_whole(mask);
  shim_wait(SHIM_SIMD_BARRIER, "__syncwarp", line);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T x, int lanes, int width = 32, unsigned line = __builtin_LINE()) {
  shim_whole(mask);
  if (lanes < 0 || lanes >= width || width != 32) {
    shim_fail("__shfl_xor_sync reads a lane that does not exist");
  }
  return ShimLanes<T>("__shfl_xor_sync", line, x).values[shim_lane() ^ unsigned(lanes)];
}
template <typename T>
T __shfl_sync(unsigned mask, T x, int lane, int width = 32, unsigned line = __builtin_LINE()) {
  shim_whole(mask);
  if (width != 32) {
    shim_fail("__shfl_sync over a part of the warp");
  }
  return ShimLanes<T>("__shfl_sync", line, x).values[unsigned(lane) % SHIM_LANES];
}
template <typename T>
T __shfl_down_sync(unsigned mask, T x, unsigned delta, unsigned line = __builtin_LINE()) {
  shim_whole(mask);
  unsigned from = shim_lane() + delta;
  return ShimLanes<T>("__shfl_down_sync", line, x).values[from < SHIM_LANES ? from : shim_lane()];
}

#include "tensor.h"

namespace cuda::std {
using ::std::bit_cast;
using ::std::numeric_limits;
} // namespace cuda::std

namespace mlx::core::cu {
// The types in which MLX passes an array's shape and strides: at most eight axes.
struct Shape {
  int32_t values[8];
  int32_t operator[](int at) const { return values[at]; }
};
struct Strides {
  int64_t values[8];
  int64_t operator[](int at) const { return values[at]; }
};
} // namespace mlx::core::cu

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif
