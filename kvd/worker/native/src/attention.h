// Decode attention over pages and tails, in blocks of 64 tokens, in float32.
//
// Every block is converted to one form, keys [dim, 64] and values [64, dim], whether it comes from
// a page of any packing or from a tail, and then goes through the same loops (online softmax,
// arXiv 1805.02867, in FlashAttention's form, arXiv 2205.14135). So tokens of a committed page give
// the same numbers to the bit, read from the tail or, after a flush, from the pool.

#pragma once

#include <limits>

#include "pool.h"
#include "simd.h"

namespace kvd {

constexpr int BLOCK = 64;
constexpr float UNSEEN = -1.0f;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// One side (keys or values) of a pool's pages: [pages, heads, a, b], groups along b.
struct Packed {
  int bits = 16;
  int group = 0;
  int64_t a = 0, b = 0;
  bool turned = false;  // values that are stored [dim, 64]
  const uint8_t* words = nullptr;  // or the dense floats
  const float* scales = nullptr;
  const float* biases = nullptr;

  int64_t elements() const {
    return a * b;
  }
};

template <typename Word>
inline uint64_t word(const uint8_t* from) {
  Word found;
  std::memcpy(&found, from, sizeof found);
  return found;
}

// The bits of eight codes: BITS bytes.
template <int BITS>
inline uint64_t eight(const uint8_t* from) {
  static_assert(BITS >= 2 && BITS <= 6);
  if constexpr (BITS == 2) {
    return word<uint16_t>(from);
  } else if constexpr (BITS == 3) {
    return word<uint16_t>(from) | word<uint8_t>(from + 2) << 16;
  } else if constexpr (BITS == 4) {
    return word<uint32_t>(from);
  } else if constexpr (BITS == 5) {
    return word<uint32_t>(from) | word<uint8_t>(from + 4) << 32;
  } else {
    return word<uint32_t>(from) | word<uint16_t>(from + 4) << 32;
  }
}

template <int BITS>
inline F8 codes(const uint8_t* from) {
  if constexpr (BITS == 8) {
    return widen(from);
  } else {
    const uint64_t all = eight<BITS>(from);
    const auto low = static_cast<uint32_t>(all), high = static_cast<uint32_t>(all >> (4 * BITS));
    const U8 both = {low, low, low, low, high, high, high, high};
    const U8 shifts = {0, BITS, 2 * BITS, 3 * BITS, 0, BITS, 2 * BITS, 3 * BITS};
    return __builtin_convertvector((I8)((both >> shifts) & ((1u << BITS) - 1)), F8);
  }
}

// Dequantizes like MLX: a product and a sum, each rounded.
template <int BITS>
inline void unpack(const Packed& side, int64_t page, float* to) {
  const int64_t count = side.elements();
  const uint8_t* words = side.words + page * count / 8 * BITS;
  const int64_t groups = page * count / side.group;
  for (int64_t g = 0; g < count / side.group; ++g) {
    const F8 scale = splat(side.scales[groups + g]), bias = splat(side.biases[groups + g]);
    for (int64_t i = g * side.group; i < (g + 1) * side.group; i += LANES) {
      store(to + i, codes<BITS>(words + i / 8 * BITS) * scale + bias);
    }
  }
}

// Return a page's [a, b] floats: in `room`, or in place.
inline const float* dense(const Packed& side, int64_t page, float* room) {
  switch (side.bits) {
    case 2: unpack<2>(side, page, room); return room;
    case 3: unpack<3>(side, page, room); return room;
    case 4: unpack<4>(side, page, room); return room;
    case 5: unpack<5>(side, page, room); return room;
    case 6: unpack<6>(side, page, room); return room;
    case 8: unpack<8>(side, page, room); return room;
    default: return reinterpret_cast<const float*>(side.words) + page * side.elements();
  }
}

// Transposes an 8 x 8 block.
inline void transpose_lanes(const float* from, int64_t pitch, float* to, int64_t to_pitch) {
  F8 r[LANES], s[LANES];
  for (int i = 0; i < LANES; ++i) {
    r[i] = load(from + i * pitch);
  }
  for (int i = 0; i < LANES; i += 2) {
    s[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    s[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  for (int i = 0; i < LANES; i += 4) {
    for (int j = i; j < i + 2; ++j) {
      r[j] = __builtin_shufflevector(s[j], s[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      r[j + 2] = __builtin_shufflevector(s[j], s[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int j = 0; j < 4; ++j) {
    store(to + j * to_pitch, __builtin_shufflevector(r[j], r[j + 4], 0, 1, 2, 3, 8, 9, 10, 11));
    store(
        to + (j + 4) * to_pitch,
        __builtin_shufflevector(r[j], r[j + 4], 4, 5, 6, 7, 12, 13, 14, 15));
  }
}

// [rows, columns] to [columns, rows], whose rows begin every `pitch` elements.
inline void transpose(const float* from, int64_t rows, int64_t columns, int64_t pitch, float* to) {
  const int64_t whole_rows = rows / LANES * LANES, whole_columns = columns / LANES * LANES;
  for (int64_t r = 0; r < whole_rows; r += LANES) {
    for (int64_t c = 0; c < whole_columns; c += LANES) {
      transpose_lanes(from + r * columns + c, columns, to + c * pitch + r, pitch);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) {
      to[c * pitch + r] = from[r * columns + c];
    }
  }
}

// The keys and values that heads attend to; all arrays are contiguous.
struct Held {
  int64_t q_heads, kv_heads, k_dim, v_dim;
  float scale;
  int keep;             // first tokens that a window never hides
  const float* sinks;   // [q_heads] or null
  const int32_t* pages; // [pages, 3]: level, slot in its pools, position of its first token
  std::vector<Packed> keys, values;  // by level

  // Dense tokens after the pages: tails of all rows, or a chunk.
  int64_t room;  // tokens of capacity
  const float* dense_keys;  // [slots, kv_heads, room, k_dim]
  const float* dense_values;
};

// A query of one head. It sees the positions from `low` to `last`, and those before `keep`.
struct Line {
  int64_t low, last;
};

// Queries of one row that share a KV head: its query heads, times the tokens of a chunk.
class HeadAttention {
 public:
  explicit HeadAttention(const Held& held) : held_(held) {
    const int64_t size = std::max(held.k_dim, held.v_dim) * BLOCK;
    keys_.resize(size);
    values_.resize(size);
    spare_.resize(size);
  }

  // Add a query; element d is at query[d * stride].
  void add(const float* query, int64_t stride, Line line, const float* sink) {
    for (int64_t d = 0; d < held_.k_dim; ++d) {
      queries_.push_back(query[d * stride] * held_.scale);
    }
    lines_.push_back(line);
    top_.push_back(sink ? *sink : NEVER);
    total_.push_back(sink ? 1.0f : 0.0f);
    output_.resize(lines_.size() * held_.v_dim, 0.0f);
    fades_.resize(lines_.size());
    weights_.resize(lines_.size() * BLOCK);
    low_ = lines_.size() == 1 ? line.low : std::min(low_, line.low);
    last_ = lines_.size() == 1 ? line.last : std::max(last_, line.last);
  }

  void clear() {
    queries_.clear();
    lines_.clear();
    top_.clear();
    total_.clear();
    output_.clear();
  }

  // Attend to pages [first, end) of the list.
  void pages(int64_t first, int64_t end, int64_t head) {
    for (int64_t p = first; p < end; ++p) {
      const int32_t* about = held_.pages + p * 3;
      if (!seen(about[2])) {
        continue;
      }
      const Packed& keys = held_.keys[about[0]];
      const Packed& values = held_.values[about[0]];
      const int64_t page = about[1] * held_.kv_heads + head;
      const float* v = dense(values, page, values_.data());
      if (values.turned) {
        transpose(v, held_.v_dim, BLOCK, held_.v_dim, spare_.data());
        v = spare_.data();
      }
      attend(dense(keys, page, keys_.data()), v, BLOCK, about[2]);
    }
  }

  // Attend to the first `count` dense tokens of a slot; the first has this `position`.
  void tokens(int64_t slot, int64_t count, int64_t position, int64_t head) {
    const int64_t at = (slot * held_.kv_heads + head) * held_.room;
    for (int64_t first = 0; first < count && position + first <= last_; first += BLOCK) {
      if (!seen(position + first)) {
        continue;
      }
      const int64_t some = std::min<int64_t>(BLOCK, count - first);
      transpose(
          held_.dense_keys + (at + first) * held_.k_dim, some, held_.k_dim, BLOCK, keys_.data());
      attend(
          keys_.data(), held_.dense_values + (at + first) * held_.v_dim, some, position + first);
    }
  }

  // The output of a query, in the order of `add`: [v_dim].
  void result(int64_t line, float* to) const {
    for (int64_t d = 0; d < held_.v_dim; ++d) {
      to[d] = output_[line * held_.v_dim + d] / total_[line];
    }
  }

 private:
  bool seen(int64_t position) const {
    return position + BLOCK > low_ || position < held_.keep;
  }

  bool whole(const Line& line, int64_t count, int64_t position) const {
    return count == BLOCK && position + BLOCK - 1 <= line.last &&
        (position >= line.low || position + BLOCK <= held_.keep);
  }

  bool hidden(const Line& line, int64_t position) const {
    return position > line.last || (position < line.low && position >= held_.keep);
  }

  // keys: [k_dim, 64]; values: [64, v_dim]; the first `count` tokens of both, from `position` on.
  void attend(const float* keys, const float* values, int64_t count, int64_t position) {
    const int64_t lines = static_cast<int64_t>(lines_.size());
    for (int64_t one = 0; one < lines; one += 2) {
      if (one + 1 < lines) {
        score<2>(keys, one);
      } else {
        score<1>(keys, one);
      }
    }
    for (int64_t one = 0; one < lines; ++one) {
      float* weights = weights_.data() + one * BLOCK;
      if (!whole(lines_[one], count, position)) {
        for (int64_t t = 0; t < BLOCK; ++t) {
          weights[t] = t >= count || hidden(lines_[one], position + t) ? NEVER : weights[t];
        }
      }
      fades_[one] = soften(one, weights);
    }
    for (int64_t one = 0; one < lines; ++one) {
      if (fades_[one] == UNSEEN) {
        continue;
      }
      const bool all = whole(lines_[one], count, position);
      if (all && one + 1 < lines && fades_[one + 1] != UNSEEN &&
          whole(lines_[one + 1], count, position)) {
        gather<2>(one, values);
        ++one;
      } else if (all) {
        gather<1>(one, values);
      } else {
        gather_some(one, values, count, position);
      }
    }
  }

  // Scores of some queries; each is summed over the channels one after another.
  template <int LINES>
  void score(const float* keys, int64_t first) {
    constexpr int WIDTH = 4;
    const float* queries = queries_.data() + first * held_.k_dim;
    for (int part = 0; part < BLOCK; part += WIDTH * LANES) {
      F8 sums[LINES][WIDTH];
      for (auto& line : sums) {
        for (auto& one : line) {
          one = splat(0.0f);
        }
      }
      for (int64_t d = 0; d < held_.k_dim; ++d) {
        const float* from = keys + d * BLOCK + part;
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; ++i) {
          const F8 key = load(from + i * LANES);
#pragma GCC unroll 2
          for (int l = 0; l < LINES; ++l) {
            sums[l][i] = fma(splat(queries[l * held_.k_dim + d]), key, sums[l][i]);
          }
        }
      }
      for (int l = 0; l < LINES; ++l) {
        for (int i = 0; i < WIDTH; ++i) {
          store(weights_.data() + (first + l) * BLOCK + part + i * LANES, sums[l][i]);
        }
      }
    }
  }

  // Convert scores to weights relative to the largest score so far. Return the factor for the
  // earlier results, or UNSEEN if the query sees nothing of the block.
  float soften(int64_t line, float* weights) {
    F8 most = load(weights);
    I8 some = most != splat(NEVER);
    for (int i = LANES; i < BLOCK; i += LANES) {
      const F8 next = load(weights + i);
      most = max(most, next);
      some |= next != splat(NEVER);
    }
    if (!any(some)) {
      return UNSEEN;
    }
    const float top = std::max(top_[line], greatest(most));
    F8 sums = splat(0.0f);
    for (int i = 0; i < BLOCK; i += LANES) {
      const F8 weight = exp(load(weights + i) - splat(top));
      store(weights + i, weight);
      sums = sums + weight;
    }
    const float fade = top_[line] > NEVER ? exp(splat(top_[line] - top))[0] : 0.0f;
    total_[line] = total_[line] * fade + sum(sums);
    top_[line] = top;
    return fade;
  }

  template <int LINES>
  void gather(int64_t first, const float* values) {
    constexpr int WIDTH = 4;
    const float* weights = weights_.data() + first * BLOCK;
    float* out = output_.data() + first * held_.v_dim;
    int64_t d = 0;
    for (; d + WIDTH * LANES <= held_.v_dim; d += WIDTH * LANES) {
      F8 sums[LINES][WIDTH];
      for (int l = 0; l < LINES; ++l) {
        for (int i = 0; i < WIDTH; ++i) {
          sums[l][i] = load(out + l * held_.v_dim + d + i * LANES) * splat(fades_[first + l]);
        }
      }
      for (int64_t t = 0; t < BLOCK; ++t) {
        const float* from = values + t * held_.v_dim + d;
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; ++i) {
          const F8 value = load(from + i * LANES);
#pragma GCC unroll 2
          for (int l = 0; l < LINES; ++l) {
            sums[l][i] = fma(splat(weights[l * BLOCK + t]), value, sums[l][i]);
          }
        }
      }
      for (int l = 0; l < LINES; ++l) {
        for (int i = 0; i < WIDTH; ++i) {
          store(out + l * held_.v_dim + d + i * LANES, sums[l][i]);
        }
      }
    }
    for (int l = 0; l < LINES; ++l) {
      for (int64_t rest = d; rest < held_.v_dim; ++rest) {
        float one = out[l * held_.v_dim + rest] * fades_[first + l];
        for (int64_t t = 0; t < BLOCK; ++t) {
          one = std::fma(weights[l * BLOCK + t], values[t * held_.v_dim + rest], one);
        }
        out[l * held_.v_dim + rest] = one;
      }
    }
  }

  // Like `gather`, for a query that does not see all tokens: hidden tokens are skipped, because
  // their memory may hold anything.
  void gather_some(int64_t line, const float* values, int64_t count, int64_t position) {
    const float* weights = weights_.data() + line * BLOCK;
    float* out = output_.data() + line * held_.v_dim;
    const F8 fade = splat(fades_[line]);
    int64_t d = 0;
    for (; d + LANES <= held_.v_dim; d += LANES) {
      store(out + d, load(out + d) * fade);
    }
    for (; d < held_.v_dim; ++d) {
      out[d] *= fades_[line];
    }
    for (int64_t t = 0; t < count; ++t) {
      if (hidden(lines_[line], position + t)) {
        continue;
      }
      const float* from = values + t * held_.v_dim;
      for (d = 0; d + LANES <= held_.v_dim; d += LANES) {
        store(out + d, fma(splat(weights[t]), load(from + d), load(out + d)));
      }
      for (; d < held_.v_dim; ++d) {
        out[d] = std::fma(weights[t], from[d], out[d]);
      }
    }
  }

  const Held& held_;
  int64_t low_ = 0, last_ = 0;  // least `low` and greatest `last` of the lines
  std::vector<Line> lines_;
  std::vector<float> keys_, values_, spare_, queries_, output_, top_, total_, fades_, weights_;
};

}  // namespace kvd
