// Decode attention over pages and tails, in blocks of 64 tokens, in float32.
//
// Every block is converted to one form, keys [dim, 64] and values [64, dim], whether it comes from
// a page of any packing or from a tail, and then goes through the same loops (online softmax,
// arXiv 1805.02867, in FlashAttention's form, arXiv 2205.14135). So tokens of a committed page give
// the same numbers to the bit, read from the tail or, after a flush, from the pool.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

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

// Sixteen codes: 2 * BITS bytes.
template <int BITS>
inline Wide wide_codes(const uint8_t* from) {
#if defined(__AVX512F__)
  if constexpr (BITS == 8) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Wide)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
  } else {
    const uint64_t left = eight<BITS>(from), right = eight<BITS>(from + BITS);
    const __m128i fours = _mm_setr_epi32(
        static_cast<int>(left), static_cast<int>(left >> (4 * BITS)), static_cast<int>(right),
        static_cast<int>(right >> (4 * BITS)));
    const __m512i words = _mm512_permutexvar_epi32(
        _mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
        _mm512_castsi128_si512(fours));
    const __m512i shifts =
        _mm512_broadcast_i32x4(_mm_setr_epi32(0, BITS, 2 * BITS, 3 * BITS));
    const __m512i found =
        _mm512_and_si512(_mm512_srlv_epi32(words, shifts), _mm512_set1_epi32((1 << BITS) - 1));
    return (Wide)_mm512_cvtepi32_ps(found);
  }
#else
  return {codes<BITS>(from), codes<BITS>(from + BITS)};
#endif
}

// Floats, [rows, columns], from which loops read 16 columns of a row at once.
struct Dense {
  const float* data;
  int64_t columns;

  Wide at(int64_t row, int64_t column) const {
    return load<Wide>(data + row * columns + column);
  }
};

// Like `Dense`, over a page's codes. Dequantizes like MLX: a product and a sum, each rounded.
template <int BITS>
struct Codes {
  const uint8_t* words;
  const float* scales;
  const float* biases;
  int64_t pitch, groups;  // bytes and groups of a row
  int shift;              // a group has 2^shift elements

  Codes(const Packed& side, int64_t page)
      : words(side.words + page * side.elements() / 8 * BITS),
        scales(side.scales + page * side.elements() / side.group),
        biases(side.biases + page * side.elements() / side.group), pitch(side.b / 8 * BITS),
        groups(side.b / side.group), shift(__builtin_ctz(side.group)) {}

  Wide at(int64_t row, int64_t column) const {
    const int64_t group = row * groups + (column >> shift);
    return wide_codes<BITS>(words + row * pitch + (column >> 3) * BITS) *
        splat_wide(scales[group]) + splat_wide(biases[group]);
  }
};

// Call work(source) with a page's numbers, [a, b].
template <typename Work>
inline void visit(const Packed& side, int64_t page, Work&& work) {
  switch (side.bits) {
    case 2: return work(Codes<2>(side, page));
    case 3: return work(Codes<3>(side, page));
    case 4: return work(Codes<4>(side, page));
    case 5: return work(Codes<5>(side, page));
    case 6: return work(Codes<6>(side, page));
    case 8: return work(Codes<8>(side, page));
    default:
      return work(Dense{
          reinterpret_cast<const float*>(side.words) + page * side.elements(), side.b});
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

// Queries and columns whose sums are in registers at once.
constexpr int LINES_AT_ONCE = WIDE_REGISTERS == 32 ? 4 : 2;
constexpr int ACROSS = WIDE_REGISTERS == 32 ? 4 : 2;

// Queries of one row that share a KV head: its query heads, times the tokens of a chunk. An object
// is used again for other heads and rows, because its buffers cost more than a short row.
class HeadAttention {
 public:
  // The calling thread's object. Finding it takes a call, so loops keep the reference.
  static HeadAttention& own() {
    thread_local HeadAttention attention;
    return attention;
  }

  // Forget all queries.
  void begin(const Held& held) {
    held_ = &held;
    lines_.clear();
    queries_.clear();
    top_.clear();
    total_.clear();
    output_.clear();
  }

  // Add a query; element d is at query[d * stride].
  void add(const float* query, int64_t stride, Line line, const float* sink) {
    const size_t at = queries_.size();
    queries_.resize(at + held_->k_dim);
    float* to = queries_.data() + at;
    const int64_t size = held_->k_dim;
    const float scale = held_->scale;
    for (int64_t d = 0; d < size; ++d) {
      to[d] = query[d * stride] * scale;
    }
    lines_.push_back(line);
    top_.push_back(sink ? *sink : NEVER);
    total_.push_back(sink ? 1.0f : 0.0f);
    output_.resize(lines_.size() * held_->v_dim, 0.0f);
    fades_.resize(lines_.size());
    weights_.resize(lines_.size() * BLOCK);
    low_ = lines_.size() == 1 ? line.low : std::min(low_, line.low);
    last_ = lines_.size() == 1 ? line.last : std::max(last_, line.last);
  }

  // Attend to pages [first, end) of the list.
  void pages(int64_t first, int64_t end, int64_t head) {
    for (int64_t p = first; p < end; ++p) {
      const int32_t* about = held_->pages + p * 3;
      if (!seen(about[2])) {
        continue;
      }
      const Packed& keys = held_->keys[about[0]];
      const Packed& values = held_->values[about[0]];
      const int64_t page = about[1] * held_->kv_heads + head;
      read(keys, page, keys_, [&](const auto& source) { score(source); });
      weigh(BLOCK, about[2]);
      if (!values.turned && whole(BLOCK, about[2])) {
        read(values, page, values_, [&](const auto& source) { gather(source, BLOCK, about[2]); });
        continue;
      }
      const float* v = dense(values, page, values_);
      if (values.turned) {
        spare_.resize(held_->v_dim * BLOCK);
        transpose(v, held_->v_dim, BLOCK, held_->v_dim, spare_.data());
        v = spare_.data();
      }
      gather(Dense{v, held_->v_dim}, BLOCK, about[2]);
    }
  }

  // Attend to the first `count` dense tokens of a slot; the first has this `position`.
  void tokens(int64_t slot, int64_t count, int64_t position, int64_t head) {
    const int64_t at = (slot * held_->kv_heads + head) * held_->room;
    keys_.resize(held_->k_dim * BLOCK);
    for (int64_t first = 0; first < count && position + first <= last_; first += BLOCK) {
      if (!seen(position + first)) {
        continue;
      }
      const int64_t some = std::min<int64_t>(BLOCK, count - first);
      transpose(
          held_->dense_keys + (at + first) * held_->k_dim, some, held_->k_dim, BLOCK,
          keys_.data());
      score(Dense{keys_.data(), BLOCK});
      weigh(some, position + first);
      const float* values = held_->dense_values + (at + first) * held_->v_dim;
      gather(Dense{values, held_->v_dim}, some, position + first);
    }
  }

  // The output of a query, in the order of `add`: [v_dim].
  void result(int64_t line, float* to) const {
    const int64_t size = held_->v_dim;
    const float* from = output_.data() + line * size;
    const float total = total_[line];
    int64_t d = 0;
    for (; d + LANES <= size; d += LANES) {
      store(to + d, load(from + d) / splat(total));
    }
    for (; d < size; ++d) {
      to[d] = from[d] / total;
    }
  }

 private:
  // Return a page's [a, b] floats: in `room`, or in place.
  static const float* dense(const Packed& side, int64_t page, std::vector<float>& room) {
    const float* found = nullptr;
    visit(side, page, [&](const auto& source) {
      if constexpr (std::is_same_v<decltype(source), const Dense&>) {
        found = source.data;
      } else {
        room.resize(side.elements());
        for (int64_t row = 0; row < side.a; ++row) {
          for (int64_t column = 0; column < side.b; column += WIDE) {
            store(room.data() + row * side.b + column, source.at(row, column));
          }
        }
        found = room.data();
      }
    });
    return found;
  }

  // Call work(source) with a page's numbers. Where few queries read them, codes are converted in
  // the loop that multiplies; otherwise once, to `room`.
  template <typename Work>
  void read(const Packed& side, int64_t page, std::vector<float>& room, Work&& work) const {
    if (lines() <= LINES_AT_ONCE) {
      visit(side, page, work);
    } else {
      work(Dense{dense(side, page, room), side.b});
    }
  }

  int64_t lines() const {
    return static_cast<int64_t>(lines_.size());
  }

  bool seen(int64_t position) const {
    return position + BLOCK > low_ || position < held_->keep;
  }

  bool whole(const Line& line, int64_t count, int64_t position) const {
    return count == BLOCK && position + BLOCK - 1 <= line.last &&
        (position >= line.low || position + BLOCK <= held_->keep);
  }

  bool whole(int64_t count, int64_t position) const {
    return std::all_of(lines_.begin(), lines_.end(), [&](const Line& line) {
      return whole(line, count, position);
    });
  }

  // How many of a block's first tokens a query sees; -1 if it sees others than these.
  int64_t seen_first(int64_t number, int64_t count, int64_t position) const {
    const Line& line = lines_[number];
    if (position >= line.low || position + count <= held_->keep) {
      return std::clamp<int64_t>(line.last - position + 1, 0, count);
    }
    return -1;
  }

  bool hidden(const Line& line, int64_t position) const {
    return position > line.last || (position < line.low && position >= held_->keep);
  }

  // Scores of all queries with a block's keys, [k_dim, 64].
  template <typename Source>
  void score(const Source& keys) {
    for (int64_t first = 0; first < lines(); first += LINES_AT_ONCE) {
      score_some<LINES_AT_ONCE>(lines() - first, keys, first);
    }
  }

  template <int LINES, typename Source>
  void score_some(int64_t count, const Source& keys, int64_t first) {
    if constexpr (LINES > 1) {
      if (count < LINES) {
        return score_some<LINES - 1>(count, keys, first);
      }
    }
    score_lines<LINES>(keys, first);
  }

  // Each score is summed over the channels one after another.
  template <int LINES, typename Source>
  [[gnu::noinline]] void score_lines(const Source& keys, int64_t first) {
    const float* queries = queries_.data() + first * held_->k_dim;
    for (int part = 0; part < BLOCK; part += ACROSS * WIDE) {
      Wide sums[LINES][ACROSS];
#pragma GCC unroll 4
      for (int l = 0; l < LINES; ++l) {
#pragma GCC unroll 4
        for (int i = 0; i < ACROSS; ++i) {
          sums[l][i] = splat_wide(0.0f);
        }
      }
      for (int64_t d = 0; d < held_->k_dim; ++d) {
#pragma GCC unroll 4
        for (int i = 0; i < ACROSS; ++i) {
          const Wide key = keys.at(d, part + i * WIDE);
#pragma GCC unroll 4
          for (int l = 0; l < LINES; ++l) {
            sums[l][i] = fma(splat_wide(queries[l * held_->k_dim + d]), key, sums[l][i]);
          }
        }
      }
#pragma GCC unroll 4
      for (int l = 0; l < LINES; ++l) {
#pragma GCC unroll 4
        for (int i = 0; i < ACROSS; ++i) {
          store(weights_.data() + (first + l) * BLOCK + part + i * WIDE, sums[l][i]);
        }
      }
    }
  }

  // Convert the scores of a block's first `count` tokens, from `position` on, to weights.
  void weigh(int64_t count, int64_t position) {
    for (int64_t line = 0; line < lines(); ++line) {
      float* weights = weights_.data() + line * BLOCK;
      if (!whole(lines_[line], count, position)) {
        for (int64_t t = 0; t < BLOCK; ++t) {
          weights[t] = t >= count || hidden(lines_[line], position + t) ? NEVER : weights[t];
        }
      }
      fades_[line] = soften(line, weights);
    }
  }

  // Convert scores to weights relative to the largest score so far. Return the factor for the
  // earlier results, or UNSEEN if the query sees nothing of the block.
  float soften(int64_t line, float* weights) {
    Wide most = load<Wide>(weights);
    bool some = differs(most, NEVER);
    for (int i = WIDE; i < BLOCK; i += WIDE) {
      const Wide next = load<Wide>(weights + i);
      most = max(most, next);
      some |= differs(next, NEVER);
    }
    if (!some) {
      return UNSEEN;
    }
    const float top = std::max(top_[line], greatest(max(lower(most), upper(most))));
    F8 sums = splat(0.0f);
    for (int i = 0; i < BLOCK; i += WIDE) {
      const Wide weight = exp(load<Wide>(weights + i) - splat_wide(top));
      store(weights + i, weight);
      sums = (sums + lower(weight)) + upper(weight);
    }
    const float fade = top_[line] > NEVER ? exp(splat(top_[line] - top))[0] : 0.0f;
    total_[line] = total_[line] * fade + sum(sums);
    top_[line] = top;
    return fade;
  }

  // Add a block's values, [64, v_dim], to the outputs of the queries that see any of its tokens.
  template <typename Source>
  void gather(const Source& values, int64_t count, int64_t position) {
    for (int64_t first = 0; first < lines();) {
      const int64_t seen = fades_[first] == UNSEEN ? 0 : seen_first(first, count, position);
      int64_t end = first + 1;
      while (end < lines() && end < first + LINES_AT_ONCE && fades_[end] != UNSEEN &&
             seen_first(end, count, position) == seen) {
        ++end;
      }
      if (seen > 0) {
        gather_some<LINES_AT_ONCE>(end - first, values, first, seen);
        first = end;
        continue;
      }
      if constexpr (std::is_same_v<Source, Dense>) {
        if (seen < 0) {
          gather_seen(first, values.data, count, position);
        }
      }
      ++first;
    }
  }

  template <int LINES, typename Source>
  void gather_some(int64_t some, const Source& values, int64_t first, int64_t seen) {
    if constexpr (LINES > 1) {
      if (some < LINES) {
        return gather_some<LINES - 1>(some, values, first, seen);
      }
    }
    int64_t d = 0;
    for (; d + ACROSS * WIDE <= held_->v_dim; d += ACROSS * WIDE) {
      gather_columns<LINES, ACROSS>(values, first, seen, d);
    }
    for (; d + WIDE <= held_->v_dim; d += WIDE) {
      gather_columns<LINES, 1>(values, first, seen, d);
    }
    if constexpr (std::is_same_v<Source, Dense>) {
      for (int64_t line = first; line < first + LINES; ++line) {
        gather_rest(line, values.data, seen, d);
      }
    }
  }

  template <int LINES, int WIDTH, typename Source>
  [[gnu::noinline]] void gather_columns(const Source& values, int64_t first, int64_t seen, int64_t d) {
    const float* weights = weights_.data() + first * BLOCK;
    float* out = output_.data() + first * held_->v_dim + d;
    Wide sums[LINES][WIDTH];
#pragma GCC unroll 4
    for (int l = 0; l < LINES; ++l) {
#pragma GCC unroll 4
      for (int i = 0; i < WIDTH; ++i) {
        sums[l][i] = load<Wide>(out + l * held_->v_dim + i * WIDE) * splat_wide(fades_[first + l]);
      }
    }
    for (int64_t t = 0; t < seen; ++t) {
#pragma GCC unroll 4
      for (int i = 0; i < WIDTH; ++i) {
        const Wide value = values.at(t, d + i * WIDE);
#pragma GCC unroll 4
        for (int l = 0; l < LINES; ++l) {
          sums[l][i] = fma(splat_wide(weights[l * BLOCK + t]), value, sums[l][i]);
        }
      }
    }
#pragma GCC unroll 4
    for (int l = 0; l < LINES; ++l) {
#pragma GCC unroll 4
      for (int i = 0; i < WIDTH; ++i) {
        store(out + l * held_->v_dim + i * WIDE, sums[l][i]);
      }
    }
  }

  // The channels from `first` on, which fill no vector.
  void gather_rest(int64_t line, const float* values, int64_t seen, int64_t first) {
    const float* weights = weights_.data() + line * BLOCK;
    float* out = output_.data() + line * held_->v_dim;
    for (int64_t d = first; d < held_->v_dim; ++d) {
      float one = out[d] * fades_[line];
      for (int64_t t = 0; t < seen; ++t) {
        one = std::fma(weights[t], values[t * held_->v_dim + d], one);
      }
      out[d] = one;
    }
  }

  // For a query that does not see the first tokens: hidden tokens are skipped, because their memory may
  // hold anything.
  void gather_seen(int64_t line, const float* values, int64_t count, int64_t position) {
    const float* weights = weights_.data() + line * BLOCK;
    float* out = output_.data() + line * held_->v_dim;
    const F8 fade = splat(fades_[line]);
    int64_t d = 0;
    for (; d + LANES <= held_->v_dim; d += LANES) {
      store(out + d, load(out + d) * fade);
    }
    for (; d < held_->v_dim; ++d) {
      out[d] *= fades_[line];
    }
    for (int64_t t = 0; t < count; ++t) {
      if (hidden(lines_[line], position + t)) {
        continue;
      }
      const float* from = values + t * held_->v_dim;
      for (d = 0; d + LANES <= held_->v_dim; d += LANES) {
        store(out + d, fma(splat(weights[t]), load(from + d), load(out + d)));
      }
      for (; d < held_->v_dim; ++d) {
        out[d] = std::fma(weights[t], from[d], out[d]);
      }
    }
  }

  const Held* held_ = nullptr;
  int64_t low_ = 0, last_ = 0;  // least `low` and greatest `last` of the lines
  std::vector<Line> lines_;
  std::vector<float> keys_, values_, spare_, queries_, output_, top_, total_, fades_, weights_;
};

// Queries of a decode step, one for each row and head; distances in elements.
struct Queries {
  const float* data;
  int64_t per_row, per_head, per_channel;
};

// Decode attention. rows: [count, 6] int32: a row's tail (slot, tokens in it, position of the first
// one), its pages (first, last + 1), and the first position that its query sees, besides `keep`.
// y: [count, q_heads, v_dim].
inline void attend_rows(
    const Held& held, const Queries& queries, const int32_t* rows, int64_t count, float* y) {
  const int64_t repeats = held.q_heads / held.kv_heads;
  auto some = [&](int first, int last) {
    HeadAttention& attention = HeadAttention::own();
    for (int one = first; one < last; ++one) {
      const int64_t row = one / held.kv_heads, head = one % held.kv_heads;
      const int32_t* about = rows + row * 6;
      attention.begin(held);
      for (int64_t q = head * repeats; q < (head + 1) * repeats; ++q) {
        attention.add(
            queries.data + row * queries.per_row + q * queries.per_head, queries.per_channel,
            {about[5], std::numeric_limits<int32_t>::max()},
            held.sinks ? held.sinks + q : nullptr);
      }
      attention.pages(about[3], about[4], head);
      attention.tokens(about[0], about[1], about[2], head);
      for (int64_t r = 0; r < repeats; ++r) {
        attention.result(r, y + (one * repeats + r) * held.v_dim);
      }
    }
  };
  int64_t tokens = 0;
  for (int64_t row = 0; row < count; ++row) {
    tokens += rows[row * 6 + 1] + (rows[row * 6 + 4] - rows[row * 6 + 3]) * BLOCK;
  }
  const int heads = static_cast<int>(count * held.kv_heads);
  // Each takes as long as three of a product: pages are unpacked and go through softmax.
  if (3 * tokens * held.q_heads * (held.k_dim + held.v_dim) < SHARED_WORK) {
    some(0, heads);
  } else {
    Pool::shared().share(heads, 1, some);
  }
}

}  // namespace kvd
