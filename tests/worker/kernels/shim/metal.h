// The part of Metal's language that the kernels use, in C++. As in Metal, nothing converts to
// bfloat implicitly. Not covered: textures, atomics, matrices, swizzles, function pointers.
#pragma once

#include "common.h"

using half = ShimHalf;
using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using float16_t = half;

struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <typename T>
    requires std::is_arithmetic_v<T> || std::is_same_v<T, half>
  explicit bfloat(T value) : bits(shim_to_bfloat(float(value))) {}
  operator float() const { return shim_from_bfloat(bits); }
  friend bfloat operator+(bfloat a, bfloat b) { return bfloat(float(a) + float(b)); }
  friend bfloat operator-(bfloat a, bfloat b) { return bfloat(float(a) - float(b)); }
  friend bfloat operator*(bfloat a, bfloat b) { return bfloat(float(a) * float(b)); }
  friend bfloat operator/(bfloat a, bfloat b) { return bfloat(float(a) / float(b)); }
  friend bfloat operator-(bfloat a) { return bfloat(-float(a)); }
};
using bfloat16_t = bfloat;

namespace metal {

template <typename T, int N>
struct vec;
template <typename T>
struct alignas(2 * sizeof(T)) vec<T, 2> {
  T x, y;
  vec() = default;
  vec(T all) : x(all), y(all) {}
  vec(T a, T b) : x(a), y(b) {}
};
template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 3> {
  T x, y, z;
  vec() = default;
  vec(T all) : x(all), y(all), z(all) {}
  vec(T a, T b, T c) : x(a), y(b), z(c) {}
};
template <typename T>
struct alignas(4 * sizeof(T)) vec<T, 4> {
  T x, y, z, w;
  vec() = default;
  vec(T all) : x(all), y(all), z(all), w(all) {}
  vec(T a, T b, T c, T d) : x(a), y(b), z(c), w(d) {}
};

} // namespace metal

#define SHIM_VECTORS(T)              \
  using T##2 = metal::vec<T, 2>;     \
  using T##3 = metal::vec<T, 3>;     \
  using T##4 = metal::vec<T, 4>;
SHIM_VECTORS(char)
SHIM_VECTORS(uchar)
SHIM_VECTORS(short)
SHIM_VECTORS(ushort)
SHIM_VECTORS(int)
SHIM_VECTORS(uint)
SHIM_VECTORS(long)
SHIM_VECTORS(ulong)
SHIM_VECTORS(half)
SHIM_VECTORS(float)
SHIM_VECTORS(bfloat)
#undef SHIM_VECTORS

namespace metal {

template <typename To, typename From>
To as_type(From from) {
  return std::bit_cast<To>(from);
}

// Functions of one number, for each of the three floating types. Results have the same type.
#define SHIM_UNARY(name, compute)                                     \
  inline float name(float x) { return compute; }                      \
  inline half name(half given) {                                      \
    float x = given;                                                  \
    return half(compute);                                             \
  }                                                                   \
  inline bfloat name(bfloat given) {                                  \
    float x = given;                                                  \
    return bfloat(compute);                                           \
  }
#define SHIM_MATH                                     \
  SHIM_UNARY(exp, __builtin_expf(x))                  \
  SHIM_UNARY(exp2, __builtin_exp2f(x))                \
  SHIM_UNARY(log, __builtin_logf(x))                  \
  SHIM_UNARY(log2, __builtin_log2f(x))                \
  SHIM_UNARY(sqrt, __builtin_sqrtf(x))                \
  SHIM_UNARY(rsqrt, 1.0f / __builtin_sqrtf(x))        \
  SHIM_UNARY(cos, __builtin_cosf(x))                  \
  SHIM_UNARY(sin, __builtin_sinf(x))                  \
  SHIM_UNARY(fabs, __builtin_fabsf(x))                \
  SHIM_UNARY(floor, __builtin_floorf(x))              \
  SHIM_UNARY(ceil, __builtin_ceilf(x))                \
  SHIM_UNARY(rint, __builtin_rintf(x))                \
  SHIM_UNARY(round, __builtin_roundf(x))              \
  SHIM_UNARY(trunc, __builtin_truncf(x))              \
  SHIM_UNARY(tanh, __builtin_tanhf(x))

SHIM_MATH
namespace fast {
SHIM_MATH
}
namespace precise {
SHIM_MATH
}
#undef SHIM_MATH
#undef SHIM_UNARY

template <typename T>
constexpr bool shim_floating =
    std::is_same_v<T, float> || std::is_same_v<T, half> || std::is_same_v<T, bfloat>;

template <typename T>
T abs(T x) {
  if constexpr (shim_floating<T>) {
    return fabs(x);
  } else {
    return x < 0 ? -x : x;
  }
}

// Of NaN and a number, returns the number.
template <typename T>
T max(T a, T b) {
  if constexpr (shim_floating<T>) {
    return T(__builtin_fmaxf(float(a), float(b)));
  } else {
    return a > b ? a : b;
  }
}
template <typename T>
T min(T a, T b) {
  if constexpr (shim_floating<T>) {
    return T(__builtin_fminf(float(a), float(b)));
  } else {
    return a < b ? a : b;
  }
}
template <typename T>
T fmax(T a, T b) {
  static_assert(shim_floating<T>);
  return max(a, b);
}
template <typename T>
T fmin(T a, T b) {
  static_assert(shim_floating<T>);
  return min(a, b);
}
template <typename T>
T clamp(T x, T low, T high) {
  return min(max(x, low), high);
}
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline half fma(half a, half b, half c) { return half(__builtin_fmaf(a, b, c)); }
template <typename T>
T select(T otherwise, T then, bool condition) {
  return condition ? then : otherwise;
}
template <typename T>
bool isnan(T x) {
  return __builtin_isnan(float(x));
}
template <typename T>
bool isinf(T x) {
  return __builtin_isinf(float(x));
}
template <typename T>
bool isfinite(T x) {
  return __builtin_isfinite(float(x));
}
template <typename T>
T popcount(T x) {
  return T(std::popcount(x));
}
template <typename T>
T extract_bits(T x, uint offset, uint bits) {
  static_assert(std::is_unsigned_v<T>);
  if (offset + bits > 8 * sizeof(T)) {
    shim_fail("extract_bits reaches behind the word");
  }
  return bits == 0 ? T(0) : T(T(x << (8 * sizeof(T) - offset - bits)) >> (8 * sizeof(T) - bits));
}

using std::numeric_limits;

enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture };

inline void threadgroup_barrier(mem_flags, uint line = __builtin_LINE()) {
  shim_wait(SHIM_GROUP_BARRIER, "threadgroup_barrier", line);
}
inline void simdgroup_barrier(mem_flags, uint line = __builtin_LINE()) {
  shim_wait(SHIM_SIMD_BARRIER, "simdgroup_barrier", line);
}

inline uint shim_checked(uint lane) {
  const ShimThread& now = *shim_thread;
  uint threads = now.size[0] * now.size[1] * now.size[2];
  if (lane >= SHIM_LANES || now.index / SHIM_LANES * SHIM_LANES + lane >= threads) {
    shim_fail("a shuffle reads a lane that does not exist");
  }
  return lane;
}

template <typename T>
T simd_shuffle(T x, ushort lane, uint line = __builtin_LINE()) {
  return ShimLanes<T>("simd_shuffle", line, x).values[shim_checked(lane)];
}
template <typename T>
T simd_shuffle_xor(T x, ushort mask, uint line = __builtin_LINE()) {
  return ShimLanes<T>("simd_shuffle_xor", line, x).values[shim_checked(shim_lane() ^ mask)];
}
// If the source lane is outside the simdgroup, the result is undefined in Metal, and poison here.
template <typename T>
T simd_shuffle_down(T x, ushort delta, uint line = __builtin_LINE()) {
  ShimLanes<T> lanes("simd_shuffle_down", line, x);
  uint from = shim_lane() + delta;
  if (from < SHIM_LANES) {
    return lanes.values[from];
  }
  std::memset(&x, 0xff, sizeof(T));
  return x;
}
template <typename T>
T simd_broadcast(T x, ushort lane, uint line = __builtin_LINE()) {
  return ShimLanes<T>("simd_broadcast", line, x).values[shim_checked(lane)];
}
template <typename T>
T simd_broadcast_first(T x, uint line = __builtin_LINE()) {
  return ShimLanes<T>("simd_broadcast_first", line, x).values[0];
}
template <typename T>
T simd_sum(T x, uint line = __builtin_LINE()) {
  return ShimLanes<T>("simd_sum", line, x).reduced([](T a, T b) { return T(a + b); });
}
template <typename T>
T simd_max(T x, uint line = __builtin_LINE()) {
  return ShimLanes<T>("simd_max", line, x).reduced([](T a, T b) { return max(a, b); });
}
template <typename T>
T simd_min(T x, uint line = __builtin_LINE()) {
  return ShimLanes<T>("simd_min", line, x).reduced([](T a, T b) { return min(a, b); });
}
inline bool simd_any(bool x, uint line = __builtin_LINE()) {
  return ShimLanes<bool>("simd_any", line, x).reduced([](bool a, bool b) { return a || b; });
}
inline bool simd_all(bool x, uint line = __builtin_LINE()) {
  return ShimLanes<bool>("simd_all", line, x).reduced([](bool a, bool b) { return a && b; });
}

} // namespace metal

using namespace metal;

// A thread's attributes, which are the last parameters of a kernel's signature.
namespace shim {
inline uint3 of(const uint32_t (&from)[3]) { return uint3(from[0], from[1], from[2]); }
inline uint count(const uint32_t (&of)[3]) { return of[0] * of[1] * of[2]; }
inline uint groups_of(const uint32_t (&size)[3], uint width) {
  return (count(size) + width - 1) / width;
}
inline uint dispatch_quadgroups_per_threadgroup() { return groups_of(shim_thread->full_size, 4); }
inline uint dispatch_simdgroups_per_threadgroup() { return groups_of(shim_thread->full_size, 32); }
inline uint3 dispatch_threads_per_threadgroup() { return of(shim_thread->full_size); }
inline uint3 grid_origin() { return uint3(0); }
inline uint3 grid_size() { return of(shim_thread->grid); }
inline uint quadgroup_index_in_threadgroup() { return shim_thread->index / 4; }
inline uint quadgroups_per_threadgroup() { return groups_of(shim_thread->size, 4); }
inline uint simdgroup_index_in_threadgroup() { return shim_thread->index / 32; }
inline uint simdgroups_per_threadgroup() { return groups_of(shim_thread->size, 32); }
inline uint thread_execution_width() { return 32; }
inline uint thread_index_in_quadgroup() { return shim_thread->index % 4; }
inline uint thread_index_in_simdgroup() { return shim_thread->index % 32; }
inline uint thread_index_in_threadgroup() { return shim_thread->index; }
inline uint3 thread_position_in_grid() {
  const ShimThread& now = *shim_thread;
  return uint3(
      now.group[0] * now.full_size[0] + now.position[0],
      now.group[1] * now.full_size[1] + now.position[1],
      now.group[2] * now.full_size[2] + now.position[2]);
}
inline uint3 thread_position_in_threadgroup() { return of(shim_thread->position); }
inline uint3 threadgroup_position_in_grid() { return of(shim_thread->group); }
inline uint3 threadgroups_per_grid() { return of(shim_thread->groups); }
inline uint3 threads_per_grid() { return of(shim_thread->grid); }
inline uint threads_per_simdgroup() { return 32; }
inline uint3 threads_per_threadgroup() { return of(shim_thread->size); }
} // namespace shim

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC pop_options
#endif

#define M_LOG2E_F 1.44269504088896340736f
#define METAL_FUNC inline __attribute__((always_inline))

// Address spaces. All threadgroups share one array, because they run one after another.
#define device
#define constant
#define thread
#define threadgroup static __attribute__((used))
