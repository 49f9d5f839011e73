// Vectors of eight floats and conversions to them, with GCC's and Clang's vector extensions.
//
// Compiled without contraction of a * b + c: a product is fused only where the code says `fma`.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvd {

constexpr int LANES = 8;

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));

inline F8 splat(float x) {
  return F8{x, x, x, x, x, x, x, x};
}

inline F8 load(const float* from) {
  F8 found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

inline void store(float* to, F8 x) {
  std::memcpy(to, &x, sizeof x);
}

// Rounded once, on every machine: a row's numbers must not depend on which loop computed them.
inline F8 fma(F8 a, F8 b, F8 c) {
#if defined(__FMA__)
  return (F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  F8 found;
  for (int i = 0; i < LANES; ++i) {
    found[i] = __builtin_fmaf(a[i], b[i], c[i]);
  }
  return found;
#endif
}

inline F8 max(F8 a, F8 b) {
  return a > b ? a : b;
}

// The order of summation is fixed.
inline float sum(F8 x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

inline float greatest(F8 x) {
  float found = x[0];
  for (int i = 1; i < LANES; ++i) {
    found = x[i] > found ? x[i] : found;
  }
  return found;
}

// Eight bytes. GCC splits a conversion between vectors of different sizes.
inline F8 widen(const uint8_t* from) {
#if defined(__AVX2__)
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  return (F8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes));
#else
  F8 found;
  for (int i = 0; i < LANES; ++i) {
    found[i] = from[i];
  }
  return found;
#endif
}

inline bool any(I8 mask) {
  int32_t found = 0;
  for (int i = 0; i < LANES; ++i) {
    found |= mask[i];
  }
  return found != 0;
}

// Half floats, as in safetensors; exact as floats.

struct Half {
  uint16_t bits;
};

struct BFloat {
  uint16_t bits;
};

inline F8 load(const BFloat* from) {
  uint16_t bits[LANES];
  std::memcpy(bits, from, sizeof bits);
  U8 wide;
  for (int i = 0; i < LANES; ++i) {
    wide[i] = static_cast<uint32_t>(bits[i]) << 16;
  }
  return (F8)wide;
}

inline F8 load(const Half* from) {
#if defined(__F16C__)
  return (F8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  _Float16 halves[LANES];
  std::memcpy(halves, from, sizeof halves);
  F8 found;
  for (int i = 0; i < LANES; ++i) {
    found[i] = static_cast<float>(halves[i]);
  }
  return found;
#endif
}

inline float widen(float x) {
  return x;
}

inline float widen(BFloat x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float found;
  std::memcpy(&found, &bits, sizeof found);
  return found;
}

inline float widen(Half x) {
  _Float16 found;
  std::memcpy(&found, &x, sizeof found);
  return static_cast<float>(found);
}

// e to the power of x: 0 below -87, infinite above 88; NaN stays NaN. Relative error below 2e-7
// (Cody and Waite's reduction, then the polynomial of degree 6 that Cephes uses for floats).
inline F8 exp(F8 x) {
  const F8 least = splat(-87.0f), most = splat(88.0f);
  const I8 low = x < least, high = x > most;
  x = least > x ? least : x;
  x = x > most ? most : x;
  const F8 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the next integer
  const F8 shifted = fma(x, splat(1.44269504088896341f), magic);
  const F8 n = shifted - magic;
  F8 r = fma(n, splat(-0.693359375f), x);
  r = fma(n, splat(2.12194440e-4f), r);
  F8 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  const I8 power = ((I8)shifted - (I8)magic + 127) << 23;
  const F8 found = p * (F8)power;
  const F8 infinite = splat(std::numeric_limits<float>::infinity());
  return (F8)((~(low | high) & (I8)found) | (high & (I8)infinite));
}

}  // namespace kvd
