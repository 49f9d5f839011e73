// Vectors of eight and of sixteen floats and conversions to them, with GCC's and Clang's vector
// extensions.
//
// Compiled without contraction of a * b + c: a product is fused only where the code says `fma`.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace kvd {

constexpr int LANES = 8;

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef uint32_t U8 __attribute__((vector_size(32)));

// Sixteen floats: one register of AVX-512, or two F8. Compilers keep a pair in registers, but not
// a vector that is larger than a register.
constexpr int WIDE = 16;
#if defined(__AVX512F__)
typedef float Wide __attribute__((vector_size(64)));
constexpr int WIDE_REGISTERS = 32;
#else
struct Wide {
  F8 low, high;
};
constexpr int WIDE_REGISTERS = 8;
#endif

inline F8 splat(float x) {
  return F8{x, x, x, x, x, x, x, x};
}

template <typename V = F8>
inline V load(const float* from) {
  V found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

template <typename V>
inline void store(float* to, V x) {
  std::memcpy(to, &x, sizeof x);
}

#if !defined(__AVX512F__)
// One vector at a time: GCC keeps a pair in memory that is copied as a whole.
template <>
inline Wide load<Wide>(const float* from) {
  return {load(from), load(from + LANES)};
}

template <>
inline void store(float* to, Wide x) {
  store(to, x.low);
  store(to + LANES, x.high);
}
#endif

// Rounded once, on every machine: a row's numbers must not depend on which loop computed them.
inline F8 fma(F8 a, F8 b, F8 c) {
#if defined(__FMA__)
  return (F8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  const auto low = [](F8 x) { return (float32x4_t)__builtin_shufflevector(x, x, 0, 1, 2, 3); };
  const auto high = [](F8 x) { return (float32x4_t)__builtin_shufflevector(x, x, 4, 5, 6, 7); };
  return (F8)__builtin_shufflevector(
      vfmaq_f32(low(c), low(a), low(b)), vfmaq_f32(high(c), high(a), high(b)), 0, 1, 2, 3, 4, 5, 6,
      7);
#else
  F8 found;
  for (int i = 0; i < LANES; ++i) {
    found[i] = __builtin_fmaf(a[i], b[i], c[i]);
  }
  return found;
#endif
}

#if defined(__AVX512F__)
inline Wide splat_wide(float x) {
  return (Wide)_mm512_set1_ps(x);
}

inline Wide fma(Wide a, Wide b, Wide c) {
  return (Wide)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
}
#else
inline Wide splat_wide(float x) {
  return {splat(x), splat(x)};
}

inline Wide fma(Wide a, Wide b, Wide c) {
  return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}

inline Wide operator*(Wide a, Wide b) {
  return {a.low * b.low, a.high * b.high};
}

inline Wide operator+(Wide a, Wide b) {
  return {a.low + b.low, a.high + b.high};
}

inline Wide operator-(Wide a, Wide b) {
  return {a.low - b.low, a.high - b.high};
}
#endif

// Keep compilers from reading a vector from memory again in each product: processors load as many
// vectors of 16 floats in a cycle as they multiply.
inline Wide in_register(Wide x) {
#if defined(__AVX512F__)
  asm("" : "+v"(x));
#elif defined(__AVX__)
  asm("" : "+x"(x.low), "+x"(x.high));
#endif
  return x;
}

// `b` if either is NaN. Compilers make a comparison and a selection of `?:`, not one instruction.
inline F8 max(F8 a, F8 b) {
#if defined(__AVX__)
  return (F8)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}

inline F8 min(F8 a, F8 b) {
#if defined(__AVX__)
  return (F8)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
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

// Lanes 0 to 7, and 8 to 15.
inline F8 lower(Wide x) {
#if defined(__AVX512F__)
  return (F8)_mm512_castps512_ps256((__m512)x);
#else
  return x.low;
#endif
}

inline F8 upper(Wide x) {
#if defined(__AVX512F__)
  return (F8)_mm256_castpd_ps(_mm512_extractf64x4_pd((__m512d)x, 1));
#else
  return x.high;
#endif
}

#if defined(__AVX512F__)
inline Wide max(Wide a, Wide b) {
  return (Wide)_mm512_max_ps((__m512)a, (__m512)b);
}

inline Wide min(Wide a, Wide b) {
  return (Wide)_mm512_min_ps((__m512)a, (__m512)b);
}
#else
inline Wide max(Wide a, Wide b) {
  return {max(a.low, b.low), max(a.high, b.high)};
}
#endif

// Whether any lane is not `y`.
inline bool differs(Wide x, float y) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(y), _CMP_NEQ_UQ) != 0;
#else
  return any((x.low != splat(y)) | (x.high != splat(y)));
#endif
}

// Floats whose first one begins a cache line. Loads of 16 then do not cross into another line, which
// would take twice as long.
class Floats {
 public:
  // What was there stays only if no more room is needed.
  void resize(int64_t count) {
    if (count > static_cast<int64_t>(lines_.size()) * WIDE) {
      lines_ = std::vector<Line>((count + WIDE - 1) / WIDE);
    }
  }

  float* data() {
    return lines_.empty() ? nullptr : lines_.front().floats;
  }
  const float* data() const {
    return lines_.empty() ? nullptr : lines_.front().floats;
  }

 private:
  struct alignas(64) Line {
    float floats[WIDE];
  };
  std::vector<Line> lines_;
};

// Half floats, as in safetensors; exact as floats.

struct Half {
  uint16_t bits;
};

struct BFloat {
  uint16_t bits;
};

#if defined(__aarch64__)
typedef __fp16 Float16;  // before version 13, GCC has no _Float16 in C++ for this processor
#else
typedef _Float16 Float16;
#endif

inline F8 load(const BFloat* from) {
#if defined(__AVX2__)
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  return (F8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16);
#else
  uint16_t bits[LANES];
  std::memcpy(bits, from, sizeof bits);
  U8 wide;
  for (int i = 0; i < LANES; ++i) {
    wide[i] = static_cast<uint32_t>(bits[i]) << 16;
  }
  return (F8)wide;
#endif
}

inline F8 load(const Half* from) {
#if defined(__F16C__)
  return (F8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Float16 halves[LANES];
  std::memcpy(halves, from, sizeof halves);
  F8 found;
  for (int i = 0; i < LANES; ++i) {
    found[i] = static_cast<float>(halves[i]);
  }
  return found;
#endif
}

// Sixteen weights of any dtype.
template <typename W>
inline Wide load_wide(const W* from) {
#if defined(__AVX512F__)
  if constexpr (sizeof(W) == 4) {
    return load<Wide>(from);
  } else {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    if constexpr (std::is_same_v<W, BFloat>) {
      return (Wide)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
    } else {
      return (Wide)_mm512_cvtph_ps(bits);
    }
  }
#else
  return {load(from), load(from + LANES)};
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
  Float16 found;
  std::memcpy(&found, &x, sizeof found);
  return static_cast<float>(found);
}

// e to the power of x: 0 below -87.7, infinite above 88.4; NaN stays NaN. Relative error below 2e-7
// (Cody and Waite's reduction, then the polynomial of degree 6 that Cephes uses for floats).
template <typename Floats>
inline Floats exp_lanes(Floats x) {
  typedef decltype(x < x) Ints;
  const auto all = [](float value) { return value - Floats{}; };
  // At these ends n is -127 and 128, whose powers of two are 0 and infinity.
  x = min(all(88.6f), max(all(-87.9f), x));
  const Floats magic = all(12582912.0f);  // 1.5 * 2^23: adding it rounds to the next integer
  const Floats shifted = fma(x, all(1.44269504088896341f), magic);
  const Floats n = shifted - magic;
  Floats r = fma(n, all(-0.693359375f), x);
  r = fma(n, all(2.12194440e-4f), r);
  Floats p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r) + all(1.0f);
  const Ints power = ((Ints)shifted - ((Ints)magic - 127)) << 23;
  return p * (Floats)power;
}

inline F8 exp(F8 x) {
  return exp_lanes(x);
}

#if defined(__AVX512F__)
inline Wide exp(Wide x) {
  return exp_lanes(x);
}
#else
inline Wide exp(Wide x) {
  return {exp_lanes(x.low), exp_lanes(x.high)};
}
#endif

}  // namespace kvd
