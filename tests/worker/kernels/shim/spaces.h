// Declarations with which clang checks a Metal text as C++14 (-fsyntax-only). Address spaces are
// parts of types, vectors are the compiler's own, and functions are overloaded as in Metal.
#pragma once

using uchar = unsigned char;
using ushort = unsigned short;
using uint = unsigned int;
using ulong = unsigned long;
using size_t = unsigned long;
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
using half = _Float16;
using float16_t = half;
using bfloat = __bf16;
using bfloat16_t = bfloat;

#define SHIM_VECTORS(T)                                        \
  typedef T T##2 __attribute__((ext_vector_type(2)));          \
  typedef T T##3 __attribute__((ext_vector_type(3)));          \
  typedef T T##4 __attribute__((ext_vector_type(4)));
SHIM_VECTORS(uchar)
SHIM_VECTORS(ushort)
SHIM_VECTORS(int)
SHIM_VECTORS(uint)
SHIM_VECTORS(half)
SHIM_VECTORS(float)

namespace metal {

template <typename To, typename From>
To as_type(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps all bits");
  return __builtin_bit_cast(To, from);
}

#define SHIM_CHOOSE(T) \
  T max(T, T);         \
  T min(T, T);         \
  T clamp(T, T, T);
SHIM_CHOOSE(char)
SHIM_CHOOSE(uchar)
SHIM_CHOOSE(short)
SHIM_CHOOSE(ushort)
SHIM_CHOOSE(int)
SHIM_CHOOSE(uint)
SHIM_CHOOSE(long)
SHIM_CHOOSE(ulong)
SHIM_CHOOSE(half)
SHIM_CHOOSE(float)
SHIM_CHOOSE(bfloat)

#define SHIM_MATH(T) \
  T exp(T);          \
  T exp2(T);         \
  T log2(T);         \
  T sqrt(T);         \
  T cos(T);          \
  T sin(T);          \
  T fabs(T);
SHIM_MATH(half)
SHIM_MATH(float)
SHIM_MATH(bfloat)
namespace fast {
SHIM_MATH(half)
SHIM_MATH(float)
SHIM_MATH(bfloat)
} // namespace fast
namespace precise {
SHIM_MATH(half)
SHIM_MATH(float)
SHIM_MATH(bfloat)
} // namespace precise

#define SHIM_SIMD(T)              \
  T simd_shuffle(T, ushort);      \
  T simd_shuffle_xor(T, ushort);  \
  T simd_sum(T);                  \
  T simd_max(T);
SHIM_SIMD(short)
SHIM_SIMD(ushort)
SHIM_SIMD(int)
SHIM_SIMD(uint)
SHIM_SIMD(half)
SHIM_SIMD(float)
SHIM_SIMD(bfloat)

enum class mem_flags { mem_none, mem_device, mem_threadgroup, mem_texture };
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

} // namespace metal

using namespace metal;

#define INFINITY __builtin_inff()
#define device __attribute__((address_space(1)))
#define constant __attribute__((address_space(2)))
#define threadgroup static __attribute__((address_space(3)))
#define thread
