// x @ W.T over weights in panels of 16 outputs: [outputs / 16][inputs][16], in their stored dtype.
//
// Every output is summed over the inputs one after another, whatever the number of rows, threads
// and panels, so a row's numbers do not depend on its batch. Half floats are widened exactly: in
// registers for few rows, once per panel for many.

#pragma once

#include <initializer_list>

#include "pool.h"
#include "simd.h"

namespace kvd {

constexpr int PANEL = WIDE;
constexpr int MOST_ROWS = WIDE_REGISTERS == 32 ? 12 : 6;
constexpr int WIDENED_ROWS = 2 * MOST_ROWS + 1;  // from this number on, a panel is widened once

// Panels that are multiplied with so many rows at once: as many as registers hold, with a weight of
// each panel and an input. One row and one panel would wait for the previous sum.
constexpr int panels_at_once(int64_t rows) {
  int found = 1;
  while (found < 8 && 2 * found * (rows + 1) < WIDE_REGISTERS) {
    found *= 2;
  }
  return found;
}

// Where a tile's results go: y[row * pitch + column], of `columns` columns.
struct Tile {
  float* y;
  int64_t pitch;
  int64_t columns;
  const float* bias;  // or null

  Tile from(int64_t row, int64_t column) const {
    return {y + row * pitch + column, pitch, columns - column, bias ? bias + column : nullptr};
  }

  void put(int row, int panel, Wide found) const {
    float* to = y + row * pitch + panel * PANEL;
    const float* biases = bias ? bias + panel * PANEL : nullptr;
    if (columns - panel * PANEL >= PANEL) {
      store(to, biases ? found + load<Wide>(biases) : found);
    } else {
      float some[PANEL];
      store(some, found);
      put_some(to, some, biases, columns - panel * PANEL);
    }
  }

  // Reads the sums from memory. With a pair of vectors as the argument, the compiler would keep the
  // sums in memory during all products.
  [[gnu::noinline]] static void put_some(
      float* to, const float* some, const float* biases, int64_t count) {
    for (int64_t c = 0; c < count; ++c) {
      to[c] = biases ? some[c] + biases[c] : some[c];
    }
  }
};

// `ahead`: distance to weights that are needed next; they are fetched from memory meanwhile.
template <int ROWS, int PANELS, typename W>
[[gnu::noinline]] void multiply_tile(
    const float* x, int64_t inputs, const W* weights, int64_t ahead, const Tile& to) {
  constexpr int LINE = 64 / (PANEL * sizeof(W));  // inputs in a cache line of a panel
  Wide sums[ROWS][PANELS];
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p) {
      sums[r][p] = splat_wide(0.0f);
    }
  }
  for (int64_t k = 0; k < inputs; ++k) {
    Wide some[PANELS];
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p) {
      some[p] = load_wide(weights + (p * inputs + k) * PANEL);
    }
    if (k % LINE == 0) {
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; ++p) {
        __builtin_prefetch(weights + ahead + (p * inputs + k) * PANEL, 0, 2);
      }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r) {
      const Wide input = splat_wide(x[r * inputs + k]);
#pragma GCC unroll 8
      for (int p = 0; p < PANELS; ++p) {
        sums[r][p] = fma(input, some[p], sums[r][p]);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 8
    for (int p = 0; p < PANELS; ++p) {
      to.put(r, p, sums[r][p]);
    }
  }
}

// `panels` panels, at most PANELS at once.
template <int ROWS, int PANELS, typename W>
inline void multiply_panels(
    const float* x, int64_t inputs, const W* weights, int panels, int64_t ahead, const Tile& to) {
  int panel = 0;
  for (; panel + PANELS <= panels; panel += PANELS) {
    multiply_tile<ROWS, PANELS>(
        x, inputs, weights + panel * inputs * PANEL, ahead, to.from(0, panel * PANEL));
  }
  if constexpr (PANELS > 1) {
    multiply_panels<ROWS, PANELS / 2>(
        x, inputs, weights + panel * inputs * PANEL, panels - panel, ahead,
        to.from(0, panel * PANEL));
  }
}

// `count` rows, at most ROWS.
template <int ROWS, typename W>
inline void multiply_rows(
    int64_t count, const float* x, int64_t inputs, const W* weights, int panels, int64_t ahead,
    const Tile& to) {
  if constexpr (ROWS > 1) {
    if (count < ROWS) {
      return multiply_rows<ROWS - 1>(count, x, inputs, weights, panels, ahead, to);
    }
  }
  multiply_panels<ROWS, panels_at_once(ROWS)>(x, inputs, weights, panels, ahead, to);
}

// Any number of rows, in blocks of nearly equal size.
template <typename W>
inline void multiply_blocks(
    const float* x, int64_t rows, int64_t inputs, const W* weights, int panels, int64_t ahead,
    const Tile& to) {
  const int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
  int64_t first = 0;
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t count = (rows - first) / (blocks - block);
    multiply_rows<MOST_ROWS>(
        count, x + first * inputs, inputs, weights, panels, ahead, to.from(first, 0));
    first += count;
  }
}

template <typename W>
inline const float* widened(const W* weights, int64_t count, std::vector<float>& room) {
  room.resize(count);
  for (int64_t i = 0; i < count; i += WIDE) {
    store(room.data() + i, load_wide(weights + i));
  }
  return room.data();
}

inline const float* widened(const float* weights, int64_t, std::vector<float>&) {
  return weights;
}

enum class Stored { FLOAT, HALF, BFLOAT };

// A packed weight, [panels, inputs, 16], with its bias, [outputs] or null, and where its products
// go: y, [rows, outputs].
struct Linear {
  const void* packed;
  Stored stored;
  const float* bias;
  int64_t outputs;
  float* y;

  // The same weight, with its products at `there`.
  Linear to(float* there) const {
    Linear found = *this;
    found.y = there;
    return found;
  }

  int panels() const {
    return static_cast<int>((outputs + PANEL - 1) / PANEL);
  }

  // Call work(weights) with the weights' own type.
  template <typename Work>
  void visit(Work&& work) const {
    switch (stored) {
      case Stored::HALF: return work(static_cast<const Half*>(packed));
      case Stored::BFLOAT: return work(static_cast<const BFloat*>(packed));
      default: return work(static_cast<const float*>(packed));
    }
  }

  // The panels [first, last) for all rows of x, [rows, inputs].
  void multiply(const float* x, int64_t rows, int64_t inputs, int first, int last) const {
    const int at_once = panels_at_once(std::min<int64_t>(rows, MOST_ROWS));
    const int64_t size = inputs * PANEL;
    visit([&](const auto* weights) {
      thread_local std::vector<float> room;
      for (int panel = first; panel < last; panel += at_once) {
        const int some = std::min(at_once, last - panel);
        const auto* from = weights + panel * size;
        const Tile to = Tile{y, outputs, outputs, bias}.from(0, panel * PANEL);
        if (rows < WIDENED_ROWS) {
          multiply_blocks(x, rows, inputs, from, some, at_once * size, to);
        } else {
          multiply_blocks(x, rows, inputs, widened(from, some * size, room), some, 0, to);
        }
      }
    });
  }
};

// Multiply x, [rows, inputs], by several weights.
inline void multiply(
    const float* x, int64_t rows, int64_t inputs, std::initializer_list<Linear> linears) {
  int panels = 0;
  for (const Linear& linear : linears) {
    panels += linear.panels();
  }
  auto some = [&](int first, int last) {
    for (const Linear& linear : linears) {
      const int from = std::max(first, 0), to = std::min(last, linear.panels());
      if (from < to) {
        linear.multiply(x, rows, inputs, from, to);
      }
      first -= linear.panels();
      last -= linear.panels();
    }
  };
  const int64_t work = std::max<int64_t>(1, rows * inputs * PANEL);  // per panel
  if (work * panels < SHARED_WORK) {
    some(0, panels);
    return;
  }
  const int at_once = panels_at_once(std::min<int64_t>(rows, MOST_ROWS));
  const auto grain = std::clamp<int64_t>(SHARED_WORK / 16 / work, 1, panels);
  const auto whole = static_cast<int>((grain + at_once - 1) / at_once * at_once);
  Pool::shared().share(panels, whole, some);
}

}  // namespace kvd
