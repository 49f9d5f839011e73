// Affine quantization of groups of a row's elements, equal to `mx.quantize` to the bit.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "simd.h"

namespace kvd {

// The nearest integers, halves to even; below 2^22.
inline I8 rounded(F8 x) {
  const F8 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to the next integer
  return (I8)(x + magic) - (I8)magic;
}

// One group of finite elements: codes, least significant bits first, in `group * BITS / 8` bytes.
template <int BITS>
inline void quantize_group(
    const float* x, int64_t group, uint8_t* codes, float* scale_to, float* bias_to) {
  static_assert(BITS == 2 || BITS == 4 || BITS == 8);
  constexpr float MOST = (1 << BITS) - 1;
  F8 low = load(x), high = low;
  for (int64_t i = LANES; i < group; i += LANES) {
    const F8 some = load(x + i);
    low = low < some ? low : some;
    high = max(high, some);
  }
  const float least = -greatest(-low), most = greatest(high);
  const bool below = std::fabs(least) > std::fabs(most);
  float scale = std::max((most - least) / MOST, 1e-7f);
  scale = below ? scale : -scale;
  const float edge = below ? least : most;
  const float steps = std::rint(edge / scale);
  float bias = 0.0f;
  if (steps != 0.0f) {
    scale = edge / steps;
    bias = edge;
  }
  for (int64_t i = 0; i < group; i += LANES) {
    F8 code = (load(x + i) - splat(bias)) / splat(scale);
    code = code > splat(0.0f) ? code : splat(0.0f);
    code = code < splat(MOST) ? code : splat(MOST);
    const I8 all = rounded(code);
    uint64_t bits = 0;
    for (int lane = 0; lane < LANES; ++lane) {
      bits |= static_cast<uint64_t>(static_cast<uint32_t>(all[lane])) << (lane * BITS);
    }
    std::memcpy(codes + i / 8 * BITS, &bits, BITS);
  }
  *scale_to = scale;
  *bias_to = bias;
}

// A row of whole groups.
inline void quantize(
    const float* x, int64_t size, int64_t group, int bits, uint8_t* codes, float* scales,
    float* biases) {
  for (int64_t i = 0; i < size; i += group, ++scales, ++biases) {
    uint8_t* to = codes + i / 8 * bits;
    switch (bits) {
      case 2: quantize_group<2>(x + i, group, to, scales, biases); break;
      case 4: quantize_group<4>(x + i, group, to, scales, biases); break;
      default: quantize_group<8>(x + i, group, to, scales, biases);
    }
  }
}

}  // namespace kvd
