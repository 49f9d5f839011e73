// x @ W.T over weights in panels of 16 outputs: [outputs / 16][inputs][16], in their stored dtype.
//
// Every output is summed over the inputs one after another, whatever the number of rows, threads
// and panels, so a row's numbers do not depend on its batch. Half floats are widened exactly: in
// registers for few rows, once per panel for many.

#pragma once

#include "pool.h"
#include "simd.h"

namespace kvd {

constexpr int PANEL = 16;
#if defined(__AVX512VL__) || defined(__aarch64__)
constexpr int MOST_ROWS = 12;  // 24 sums, 2 weights and an input: 32 registers
#else
constexpr int MOST_ROWS = 6;  // 12 sums, 2 weights and an input: 16 registers
#endif
constexpr int WIDENED_ROWS = 2 * MOST_ROWS + 1;  // from this number on, a panel is widened once

template <int ROWS, typename W>
inline void multiply_rows(
    const float* x, int64_t inputs, const W* panel, float* y, int64_t outputs, int columns,
    const float* bias) {
  F8 sums[ROWS][2];
  for (int r = 0; r < ROWS; ++r) {
    sums[r][0] = sums[r][1] = splat(0.0f);
  }
  for (int64_t k = 0; k < inputs; ++k) {
    const F8 left = load(panel + k * PANEL);
    const F8 right = load(panel + k * PANEL + LANES);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const F8 input = splat(x[r * inputs + k]);
      sums[r][0] = fma(input, left, sums[r][0]);
      sums[r][1] = fma(input, right, sums[r][1]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    float found[PANEL];
    store(found, sums[r][0]);
    store(found + LANES, sums[r][1]);
    for (int c = 0; c < columns; ++c) {
      y[r * outputs + c] = bias ? found[c] + bias[c] : found[c];
    }
  }
}

// `count` rows, at most ROWS.
template <int ROWS, typename W>
inline void multiply_some(
    int64_t count, const float* x, int64_t inputs, const W* panel, float* y, int64_t outputs,
    int columns, const float* bias) {
  if constexpr (ROWS > 1) {
    if (count < ROWS) {
      return multiply_some<ROWS - 1>(count, x, inputs, panel, y, outputs, columns, bias);
    }
  }
  multiply_rows<ROWS>(x, inputs, panel, y, outputs, columns, bias);
}

template <typename W>
inline void multiply_panel(
    const float* x, int64_t rows, int64_t inputs, const W* panel, float* y, int64_t outputs,
    int columns, const float* bias) {
  const int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
  int64_t first = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t count = (rows - first) / (blocks - block);
    const float* from = x + first * inputs;
    float* to = y + first * outputs;
    multiply_some<MOST_ROWS>(count, from, inputs, panel, to, outputs, columns, bias);
    first += count;
  }
}

template <typename W>
inline const float* widened(const W* panel, int64_t inputs, std::vector<float>& room) {
  room.resize(inputs * PANEL);
  for (int64_t i = 0; i < inputs * PANEL; i += LANES) {
    store(room.data() + i, load(panel + i));
  }
  return room.data();
}

inline const float* widened(const float* panel, int64_t, std::vector<float>&) {
  return panel;
}

// x: [rows, inputs]; packed: [panels, inputs, 16]; bias: [outputs] or null; y: [rows, outputs].
template <typename W>
void multiply(
    const float* x, int64_t rows, int64_t inputs, const W* packed, const float* bias, float* y,
    int64_t outputs) {
  const int panels = static_cast<int>((outputs + PANEL - 1) / PANEL);
  const int64_t work = rows * inputs * PANEL;  // per panel
  const int grain = static_cast<int>(
      std::max<int64_t>(1, std::min<int64_t>(panels, SHARED_WORK / 16 / std::max<int64_t>(1, work))));
  auto some = [=](int first, int last) {
    thread_local std::vector<float> room;
    for (int panel = first; panel < last; ++panel) {
      const W* weights = packed + panel * inputs * PANEL;
      const int columns = static_cast<int>(std::min<int64_t>(PANEL, outputs - panel * PANEL));
      float* to = y + panel * PANEL;
      const float* biases = bias ? bias + panel * PANEL : nullptr;
      if (rows >= WIDENED_ROWS) {
        multiply_panel(
            x, rows, inputs, widened(weights, inputs, room), to, outputs, columns, biases);
      } else {
        multiply_panel(x, rows, inputs, weights, to, outputs, columns, biases);
      }
    }
  };
  if (work * panels < SHARED_WORK) {
    some(0, panels);
  } else {
    Pool::shared().share(panels, grain, some);
  }
}

}  // namespace kvd
