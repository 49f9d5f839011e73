// Norms, RoPE, the gate of an MLP and masks of logits, one row or token at a time.

#pragma once

#include <algorithm>
#include <vector>

#include "simd.h"

namespace kvd {

// y = x / sqrt(mean(x^2) + eps) * weight (arXiv 1910.07467); weight may be null.
inline void rms_norm(const float* x, const float* weight, float eps, int64_t size, float* y) {
  F8 squares = splat(0.0f);
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const F8 some = load(x + i);
    squares = fma(some, some, squares);
  }
  float total = sum(squares);
  for (int64_t rest = i; rest < size; ++rest) {
    total += x[rest] * x[rest];
  }
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(size) + eps);
  for (i = 0; i + LANES <= size; i += LANES) {
    const F8 some = load(x + i) * splat(scale);
    store(y + i, weight ? some * load(weight + i) : some);
  }
  for (; i < size; ++i) {
    y[i] = x[i] * scale * (weight ? weight[i] : 1.0f);
  }
}

// silu(gate) * x (arXiv 2002.05202).
inline void swiglu(const float* gate, const float* x, int64_t size, float* y) {
  int64_t i = 0;
#if defined(__AVX512F__)
  for (; i + WIDE <= size; i += WIDE) {
    const Wide g = load<Wide>(gate + i);
    store(y + i, g / (splat_wide(1.0f) + exp(-g)) * load<Wide>(x + i));
  }
#endif
  for (; i + LANES <= size; i += LANES) {
    const F8 g = load(gate + i);
    store(y + i, g / (splat(1.0f) + exp(-g)) * load(x + i));
  }
  if (i < size) {  // the same arithmetic for the rest
    float gates[LANES] = {}, others[LANES] = {}, found[LANES];
    std::memcpy(gates, gate + i, (size - i) * sizeof(float));
    std::memcpy(others, x + i, (size - i) * sizeof(float));
    const F8 g = load(gates);
    store(found, g / (splat(1.0f) + exp(-g)) * load(others));
    std::memcpy(y + i, found, (size - i) * sizeof(float));
  }
}

// x, or minus infinity where the mask's bit is 0, the lowest bit of a byte first.
inline void masked(const float* x, const uint8_t* mask, int64_t size, float* y) {
  const F8 excluded = splat(-std::numeric_limits<float>::infinity());
  const I8 bits = {1, 2, 4, 8, 16, 32, 64, 128};
  int64_t i = 0;
  for (; i + LANES <= size; i += LANES) {
    const int32_t byte = mask[i / LANES];
    const I8 own = I8{byte, byte, byte, byte, byte, byte, byte, byte} & bits;
    store(y + i, own == bits ? load(x + i) : excluded);
  }
  for (; i < size; ++i) {
    y[i] = mask[i / LANES] >> (i % LANES) & 1 ? x[i] : excluded[0];
  }
}

// Cosines and sines of tokens' angles; cached, because the layers of a pass use the same ones.
class Angles {
 public:
  // positions * scale * frequencies: [tokens, pairs] of each.
  void turn(const std::vector<float>& positions, const float* frequencies, int64_t pairs) {
    if (positions == positions_ &&
        std::equal(frequencies, frequencies + pairs, frequencies_.begin(), frequencies_.end())) {
      return;
    }
    positions_ = positions;
    frequencies_.assign(frequencies, frequencies + pairs);
    cosines.resize(positions.size() * pairs);
    sines.resize(positions.size() * pairs);
    for (size_t t = 0; t < positions.size(); ++t) {
      for (int64_t p = 0; p < pairs; ++p) {
        const float angle = positions[t] * frequencies[p];
        cosines[t * pairs + p] = std::cos(angle);
        sines[t * pairs + p] = std::sin(angle);
      }
    }
  }

  std::vector<float> cosines, sines;

 private:
  std::vector<float> positions_, frequencies_;
};

// Rotate the first 2 * pairs elements of a token's head (arXiv 2104.09864); the others stay.
inline void rotate(
    const float* x, const float* cosines, const float* sines, int64_t pairs, int64_t size,
    bool interleaved, float* y) {
  const int64_t step = interleaved ? 2 : 1;
  const int64_t other = interleaved ? 1 : pairs;
  for (int64_t p = 0; p < pairs; ++p) {
    const float a = x[p * step], b = x[p * step + other];
    y[p * step] = a * cosines[p] - b * sines[p];
    y[p * step + other] = a * sines[p] + b * cosines[p];
  }
  for (int64_t i = 2 * pairs; i < size; ++i) {
    y[i] = x[i];
  }
}

}  // namespace kvd
