// Affine quantization of groups of values, equal to `mx.quantize` to the bit.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace kvd {

struct GroupScale {
  float scale, bias;
};

// MLX's rule: the end of the range with the larger magnitude is represented exactly.
inline GroupScale group_scale(float least, float most, int bits) {
  const bool below = std::abs(least) > std::abs(most);
  const float steps = static_cast<float>((1 << bits) - 1);
  const float width = std::max((most - least) / steps, 1e-7f);
  const float scale = below ? width : -width;
  const float edge = below ? least : most;
  const float code = std::rint(edge / scale);
  return code == 0 ? GroupScale{scale, 0} : GroupScale{edge / code, edge};
}

// Codes of eight values, as integers; ties round to even.
inline I8 codes_of(F8 x, F8 scale, F8 bias, F8 greatest_code) {
  const F8 wanted = (x - bias) / scale;
#if defined(__AVX2__)
  const __m256 rounded = _mm256_round_ps((__m256)wanted, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const __m256 low = _mm256_max_ps(rounded, _mm256_setzero_ps());
  return (I8)_mm256_cvttps_epi32(_mm256_min_ps(low, (__m256)greatest_code));
#else
  I8 found;
  for (int i = 0; i < LANES; ++i) {
    // 0 first: of NaN, `max` then is 0, as above.
    found[i] = static_cast<int32_t>(
        std::min(std::max(0.0f, std::rint(wanted[i])), greatest_code[i]));
  }
  return found;
#endif
}

// Eight codes in `8 * bits` bits, the first one lowest.
inline uint64_t joined(I8 codes, int bits) {
  typedef uint64_t U64x4 __attribute__((vector_size(32)));
  const U64x4 wide = (U64x4)codes;  // two codes each, the second one in the upper half
  const U64x4 pairs = (wide & 0xffffffff) | (wide >> (32 - bits));
  return pairs[0] | pairs[1] << 2 * bits | pairs[2] << 4 * bits | pairs[3] << 6 * bits;
}

// Quantize `size` values, a multiple of 8, to `size * bits / 8` bytes, the lowest bits first.
inline GroupScale quantize_group(const float* x, int64_t size, int bits, uint8_t* codes) {
  F8 least = splat(std::numeric_limits<float>::infinity());
  F8 most = -least;
  for (int64_t i = 0; i < size; i += LANES) {
    const F8 some = load(x + i);
    least = some < least ? some : least;
    most = max(some, most);
  }
  const GroupScale by = group_scale(-greatest(-least), greatest(most), bits);
  const F8 scale = splat(by.scale), bias = splat(by.bias);
  const F8 last = splat(static_cast<float>((1 << bits) - 1));
  for (int64_t i = 0; i < size; i += LANES, codes += bits) {
    const uint64_t eight = joined(codes_of(load(x + i), scale, bias, last), bits);
    std::memcpy(codes, &eight, bits);  // eight codes take `bits` bytes
  }
  return by;
}

// The same for eight groups whose first values are neighbors, and so on: value i of group g is
// x[i * stride + g]. The codes of group g begin at codes + g * pitch.
inline void quantize_eight_groups(
    const float* x, int64_t stride, int64_t size, int bits, uint8_t* codes, int64_t pitch,
    GroupScale* by) {
  F8 least = splat(std::numeric_limits<float>::infinity());
  F8 most = -least;
  for (int64_t i = 0; i < size; ++i) {
    const F8 some = load(x + i * stride);
    least = some < least ? some : least;
    most = max(some, most);
  }
  F8 scale, bias;
  for (int g = 0; g < LANES; ++g) {
    by[g] = group_scale(least[g], most[g], bits);
    scale[g] = by[g].scale;
    bias[g] = by[g].bias;
  }
  const F8 last = splat(static_cast<float>((1 << bits) - 1));
  for (int64_t i = 0; i < size; i += LANES, codes += bits) {
    I8 half[2] = {};  // four codes of each group
    for (int k = 0; k < LANES; ++k) {
      const I8 some = codes_of(load(x + (i + k) * stride), scale, bias, last);
      half[k / 4] |= some << (k % 4 * bits);
    }
    for (int g = 0; g < LANES; ++g) {
      const uint64_t eight = static_cast<uint32_t>(half[0][g]) |
          static_cast<uint64_t>(static_cast<uint32_t>(half[1][g])) << 4 * bits;
      std::memcpy(codes + g * pitch, &eight, bits);
    }
  }
}

}  // namespace kvd
