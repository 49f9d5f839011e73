// Attention of decode steps and of prefill chunks over pages and dense tokens, in blocks of 64
// tokens, in float32.
//
// Every block is converted to one form, keys [dim, 64] and values [64, dim], whether it comes from
// a page of any packing or from a tail, and then goes through the same loops (online softmax,
// arXiv 1805.02867, in FlashAttention's form, arXiv 2205.14135). So tokens of a committed page give
// the same numbers to the bit, read from the tail or, after a flush, from the pool.

#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "pages.h"
#include "pool.h"
#include "simd.h"

namespace kvd {

constexpr int BLOCK = 64;
constexpr float UNSEEN = -1.0f;
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// Keys or values of dense tokens; a token's elements are contiguous.
struct DenseTokens {
  const float* data;
  int64_t per_slot, per_head, per_token;  // elements from one to the next

  const float* at(int64_t slot, int64_t head) const {
    return data + slot * per_slot + head * per_head;
  }
};

// The keys and values that heads attend to; arrays of pages are contiguous.
struct Held {
  int64_t q_heads, kv_heads, k_dim, v_dim;
  float scale;
  int keep;             // first tokens that a window never hides
  const float* sinks;   // [q_heads] or null
  const int32_t* pages; // [pages, 3]: level, slot in its pools, position of its first token
  std::vector<Packed> keys, values;  // by level

  // Dense tokens after the pages: tails of all rows, or a chunk.
  int64_t room;  // tokens of capacity
  DenseTokens dense_keys, dense_values;
};

// A query of one head. It sees the positions from `low` to `last`, and those before `keep`.
struct Line {
  int64_t low, last;
};

// Most queries whose sums are in registers at once.
constexpr int LINES_AT_ONCE = 6;

// Vectors of 16 sums for each of them.
constexpr int across(int lines) {
  return WIDE_REGISTERS == 32 || lines == 1 ? 4 : lines <= 3 ? 2 : 1;
}

// Most queries for which codes are converted in the loop that multiplies.
constexpr int LINES_OF_CODES = WIDE_REGISTERS == 32 ? 4 : 2;

// Queries of one row that share a KV head: its query heads, times the tokens of a chunk. An object
// is used again for other heads and rows, because its buffers cost more than a short row.
class HeadAttention {
 public:
  // The calling thread's object. Finding it takes a call, so loops keep the reference.
  static HeadAttention& own() {
    thread_local HeadAttention attention;
    return attention;
  }

  // Forget all queries; at most `lines` follow.
  void begin(const Held& held, int64_t lines) {
    held_ = &held;
    lines_.clear();
    lines_.reserve(lines);
    queries_.resize(lines * held.k_dim);
    weights_.resize(lines * BLOCK);
    output_.resize(lines * held.v_dim);
    std::fill_n(output_.data(), lines * held.v_dim, 0.0f);
    top_.resize(lines);
    total_.resize(lines);
    fades_.resize(lines);
  }

  // Add a query; element d is at query[d * stride].
  void add(const float* query, int64_t stride, Line line, const float* sink) {
    const int64_t number = lines(), size = held_->k_dim;
    float* to = queries_.data() + number * size;
    const float scale = held_->scale;
    for (int64_t d = 0; d < size; ++d) {
      to[d] = query[d * stride] * scale;
    }
    top_.data()[number] = sink ? *sink : NEVER;
    total_.data()[number] = sink ? 1.0f : 0.0f;
    low_ = number ? std::min(low_, line.low) : line.low;
    last_ = number ? std::max(last_, line.last) : line.last;
    lines_.push_back(line);
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
      read(keys, page, keys_, [&](const auto& source) { score(source, about[2]); });
      weigh(BLOCK, about[2]);
      if (!values.turned && whole(BLOCK, about[2])) {
        read(values, page, values_, [&](const auto& source) { gather(source, BLOCK, about[2]); });
        continue;
      }
      const float* v = dense(values, page, values_);
      if (values.turned) {
        turned_.resize(held_->v_dim * BLOCK);
        transpose(v, held_->v_dim, BLOCK, BLOCK, turned_.data(), held_->v_dim);
        v = turned_.data();
      }
      gather(Dense{v, held_->v_dim}, BLOCK, about[2]);
    }
  }

  // Attend to the first `count` dense tokens of a slot; the first has this `position`.
  void tokens(int64_t slot, int64_t count, int64_t position, int64_t head) {
    const int64_t key_pitch = held_->dense_keys.per_token;
    const int64_t value_pitch = held_->dense_values.per_token;
    const float* keys = held_->dense_keys.at(slot, head);
    const float* values = held_->dense_values.at(slot, head);
    keys_.resize(held_->k_dim * BLOCK);
    for (int64_t first = 0; first < count && position + first <= last_; first += BLOCK) {
      if (!seen(position + first)) {
        continue;
      }
      const int64_t some = std::min<int64_t>(BLOCK, count - first);
      transpose(keys + first * key_pitch, some, held_->k_dim, key_pitch, keys_.data(), BLOCK);
      score(Dense{keys_.data(), BLOCK}, position + first);
      weigh(some, position + first);
      gather(Dense{values + first * value_pitch, value_pitch}, some, position + first);
    }
  }

  // The output of a query, in the order of `add`: [v_dim].
  void result(int64_t line, float* to) const {
    const int64_t size = held_->v_dim;
    const float* from = output_.data() + line * size;
    const float total = total_.data()[line];
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
  static const float* dense(const Packed& side, int64_t page, Floats& room) {
    const float* found = nullptr;
    visit(side, page, [&](const auto& source) {
      if constexpr (std::is_same_v<decltype(source), const Dense&>) {
        found = source.data;
      } else {
        room.resize(side.elements());
        source.unpack(side.elements() / side.group, room.data());
        found = room.data();
      }
    });
    return found;
  }

  // Call work(source) with a page's numbers. Where few queries read them, codes are converted in
  // the loop that multiplies; otherwise once, to `room`.
  template <typename Work>
  void read(const Packed& side, int64_t page, Floats& room, Work&& work) const {
    if (lines() <= LINES_OF_CODES) {
      visit(side, page, work);
    } else {
      work(Dense{dense(side, page, room), side.b});
    }
  }

  // Queries whose sums are in registers at once.
  template <typename Source>
  static constexpr int at_once() {
    return std::is_same_v<Source, Dense> ? LINES_AT_ONCE : LINES_OF_CODES;
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

  // Scores of the queries with a block's keys, [k_dim, 64]. A chunk's first queries see nothing of
  // its last blocks, and have no scores there.
  template <typename Source>
  void score(const Source& keys, int64_t position) {
    constexpr int AT_ONCE = at_once<Source>();
    for (int64_t first = 0; first < lines(); ++first) {
      if (lines_[first].last >= position) {
        score_some<AT_ONCE>(lines() - first, keys, first);
        first += AT_ONCE - 1;
      }
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
    constexpr int ACROSS = across(LINES);
    const int64_t size = held_->k_dim;
    const float* queries = queries_.data() + first * size;
    float* scores = weights_.data() + first * BLOCK;
    for (int part = 0; part < BLOCK; part += ACROSS * WIDE) {
      Wide sums[LINES][ACROSS];
#pragma GCC unroll 6
      for (int l = 0; l < LINES; ++l) {
#pragma GCC unroll 4
        for (int i = 0; i < ACROSS; ++i) {
          sums[l][i] = splat_wide(0.0f);
        }
      }
      for (int64_t d = 0; d < size; ++d) {
        Wide some[ACROSS];
#pragma GCC unroll 4
        for (int i = 0; i < ACROSS; ++i) {
          some[i] = in_register(keys.at(d, part + i * WIDE));
        }
#pragma GCC unroll 6
        for (int l = 0; l < LINES; ++l) {
          const Wide query = splat_wide(queries[l * size + d]);
#pragma GCC unroll 4
          for (int i = 0; i < ACROSS; ++i) {
            sums[l][i] = fma(query, some[i], sums[l][i]);
          }
        }
      }
#pragma GCC unroll 6
      for (int l = 0; l < LINES; ++l) {
#pragma GCC unroll 4
        for (int i = 0; i < ACROSS; ++i) {
          store(scores + l * BLOCK + part + i * WIDE, sums[l][i]);
        }
      }
    }
  }

  // Convert the scores of a block's first `count` tokens, from `position` on, to weights.
  void weigh(int64_t count, int64_t position) {
    for (int64_t number = 0; number < lines(); ++number) {
      const Line& line = lines_[number];
      if (whole(line, count, position)) {
        continue;
      }
      float* weights = weights_.data() + number * BLOCK;
      if (const int64_t seen = seen_first(number, count, position); seen >= 0) {
        std::fill(weights + seen, weights + BLOCK, NEVER);
        continue;
      }
      for (int64_t t = 0; t < BLOCK; ++t) {
        weights[t] = t >= count || hidden(line, position + t) ? NEVER : weights[t];
      }
    }
    int64_t line = 0;
    while (line < lines()) {
      const bool eight = line + LANES <= lines();
      if (eight && soften_eight(line)) {
        line += LANES;
        continue;
      }
      for (const int64_t end = eight ? line + LANES : lines(); line < end; ++line) {
        fades_.data()[line] = soften(line, weights_.data() + line * BLOCK);
      }
    }
  }

  // `soften` for eight queries. Returns false, and changes nothing, if one of them may see no key of
  // the block. The maxima and sums of eight queries are computed together, in the same order.
  bool soften_eight(int64_t first) {
    float* weights = weights_.data() + first * BLOCK;
    F8 most[LANES];
    for (int l = 0; l < LANES; ++l) {
      Wide found = load<Wide>(weights + l * BLOCK);
      for (int i = WIDE; i < BLOCK; i += WIDE) {
        found = max(found, load<Wide>(weights + l * BLOCK + i));
      }
      most[l] = max(lower(found), upper(found));
    }
    transpose_lanes(most);
    F8 tops = most[0];
    for (int l = 1; l < LANES; ++l) {
      tops = max(tops, most[l]);
    }
    if (any(~(I8)(tops > splat(NEVER)))) {
      return false;
    }
    const F8 before = load(top_.data() + first);
    tops = max(before, tops);
    F8 sums[LANES];
    for (int l = 0; l < LANES; ++l) {
      const Wide top = splat_wide(tops[l]);
      sums[l] = splat(0.0f);
      for (int i = 0; i < BLOCK; i += WIDE) {
        float* at = weights + l * BLOCK + i;
        const Wide weight = exp(load<Wide>(at) - top);
        store(at, weight);
        sums[l] = (sums[l] + lower(weight)) + upper(weight);
      }
    }
    transpose_lanes(sums);
    const F8 sum = ((sums[0] + sums[4]) + (sums[2] + sums[6])) +
        ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    const F8 fades = exp(before - tops);  // 0 for the first block
    store(total_.data() + first, load(total_.data() + first) * fades + sum);
    store(top_.data() + first, tops);
    store(fades_.data() + first, fades);
    return true;
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
    const float before = top_.data()[line];
    const float top = std::max(before, greatest(max(lower(most), upper(most))));
    F8 sums = splat(0.0f);
    for (int i = 0; i < BLOCK; i += WIDE) {
      const Wide weight = exp(load<Wide>(weights + i) - splat_wide(top));
      store(weights + i, weight);
      sums = (sums + lower(weight)) + upper(weight);
    }
    const float fade = before > NEVER ? exp(splat(before - top))[0] : 0.0f;
    float& total = total_.data()[line];
    total = total * fade + sum(sums);
    top_.data()[line] = top;
    return fade;
  }

  // Add a block's values, [64, v_dim], to the outputs of the queries that see any of its tokens.
  template <typename Source>
  void gather(const Source& values, int64_t count, int64_t position) {
    for (int64_t first = 0; first < lines();) {
      const int64_t seen = seen_now(first, count, position);
      int64_t end = first + 1;
      while (end < lines() && end < first + at_once<Source>() &&
             seen_now(end, count, position) >= seen) {
        ++end;
      }
      if (seen > 0) {
        gather_some<at_once<Source>()>(end - first, values, first, 0, seen);
        if constexpr (std::is_same_v<Source, Dense>) {  // a causal diagonal: each sees one more
          for (int64_t line = first + 1; line < end; ++line) {
            const int64_t rest = seen_now(line, count, position);
            if (rest > seen) {
              gather_some<1>(1, values, line, seen, rest);
            }
          }
        }
        first = end;
        continue;
      }
      if constexpr (std::is_same_v<Source, Dense>) {
        if (seen < 0) {
          gather_seen(first, values, count, position);
        }
      }
      ++first;
    }
  }

  // Like `seen_first`, after `weigh`.
  int64_t seen_now(int64_t line, int64_t count, int64_t position) const {
    return fades_.data()[line] == UNSEEN ? 0 : seen_first(line, count, position);
  }

  // Add the tokens [from, to) for `some` queries, at most LINES.
  template <int LINES, typename Source>
  void gather_some(int64_t some, const Source& values, int64_t first, int64_t from, int64_t to) {
    if constexpr (LINES > 1) {
      if (some < LINES) {
        return gather_some<LINES - 1>(some, values, first, from, to);
      }
    }
    constexpr int ACROSS = across(LINES);
    int64_t d = 0;
    for (; d + ACROSS * WIDE <= held_->v_dim; d += ACROSS * WIDE) {
      gather_columns<LINES, ACROSS>(values, first, from, to, d);
    }
    for (; d + WIDE <= held_->v_dim; d += WIDE) {
      gather_columns<LINES, 1>(values, first, from, to, d);
    }
    if constexpr (std::is_same_v<Source, Dense>) {
      for (int64_t line = first; line < first + LINES; ++line) {
        gather_rest(line, values, from, to, d);
      }
    }
  }

  // Adds the values of a block, weighted. Before its first token, the sums of earlier blocks are
  // scaled to the new maximum.
  template <int LINES, int WIDTH, typename Source>
  [[gnu::noinline]] void gather_columns(
      const Source& values, int64_t first, int64_t from, int64_t to, int64_t d) {
    const int64_t size = held_->v_dim;
    const float* weights = weights_.data() + first * BLOCK;
    const float* fades = fades_.data() + first;
    float* out = output_.data() + first * size + d;
    Wide sums[LINES][WIDTH];
#pragma GCC unroll 6
    for (int l = 0; l < LINES; ++l) {
      const Wide fade = splat_wide(from ? 1.0f : fades[l]);
#pragma GCC unroll 4
      for (int i = 0; i < WIDTH; ++i) {
        sums[l][i] = load<Wide>(out + l * size + i * WIDE) * fade;
      }
    }
    for (int64_t t = from; t < to; ++t) {
      Wide some[WIDTH];
#pragma GCC unroll 4
      for (int i = 0; i < WIDTH; ++i) {
        some[i] = in_register(values.at(t, d + i * WIDE));
      }
#pragma GCC unroll 6
      for (int l = 0; l < LINES; ++l) {
        const Wide weight = splat_wide(weights[l * BLOCK + t]);
#pragma GCC unroll 4
        for (int i = 0; i < WIDTH; ++i) {
          sums[l][i] = fma(weight, some[i], sums[l][i]);
        }
      }
    }
#pragma GCC unroll 6
    for (int l = 0; l < LINES; ++l) {
#pragma GCC unroll 4
      for (int i = 0; i < WIDTH; ++i) {
        store(out + l * size + i * WIDE, sums[l][i]);
      }
    }
  }

  // The channels from `first` on, which fill no vector.
  void gather_rest(int64_t line, const Dense& values, int64_t from, int64_t to, int64_t first) {
    const float* weights = weights_.data() + line * BLOCK;
    const float fade = from ? 1.0f : fades_.data()[line];
    float* out = output_.data() + line * held_->v_dim;
    for (int64_t d = first; d < held_->v_dim; ++d) {
      float one = out[d] * fade;
      for (int64_t t = from; t < to; ++t) {
        one = std::fma(weights[t], values.data[t * values.columns + d], one);
      }
      out[d] = one;
    }
  }

  // For a query that does not see the first tokens: hidden tokens are skipped, because their memory may
  // hold anything.
  void gather_seen(int64_t line, const Dense& values, int64_t count, int64_t position) {
    const float* weights = weights_.data() + line * BLOCK;
    float* out = output_.data() + line * held_->v_dim;
    const float fading = fades_.data()[line];
    const F8 fade = splat(fading);
    int64_t d = 0;
    for (; d + LANES <= held_->v_dim; d += LANES) {
      store(out + d, load(out + d) * fade);
    }
    for (; d < held_->v_dim; ++d) {
      out[d] *= fading;
    }
    for (int64_t t = 0; t < count; ++t) {
      if (hidden(lines_[line], position + t)) {
        continue;
      }
      const float* from = values.data + t * values.columns;
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
  Floats keys_, values_, turned_, queries_, output_, top_, total_, fades_, weights_;
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
      attention.begin(held, repeats);
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

// A chunk of one row.
struct ChunkPlace {
  int64_t count;  // tokens
  int64_t pages;  // of the list
  int64_t offset;  // position of its first token
  int64_t start;  // position of the first dense token, which is in no page
  const int32_t* lows;  // first position that each query sees, besides `keep`
};

// Causal attention of a chunk's queries, one "row" for each token. y: [q_heads, count, v_dim].
inline void attend_chunk(
    const Held& held, const Queries& queries, const ChunkPlace& chunk, float* y) {
  const int64_t repeats = held.q_heads / held.kv_heads;
  const int threads = Pool::shared().threads();
  const int64_t lines = chunk.count * held.q_heads;
  // Queries that share a block while it is in the cache. With four pieces for each thread, none
  // waits long for the last one.
  const int64_t most = std::clamp<int64_t>(lines / (4 * threads), 24, 128);
  const int64_t nearly = (chunk.count * repeats + most - 1) / most;
  const int64_t at_once = (chunk.count + nearly - 1) / nearly;  // tokens
  const int64_t parts = (chunk.count + at_once - 1) / at_once;
  auto some = [&](int first, int last) {
    HeadAttention& attention = HeadAttention::own();
    for (int one = first; one < last; ++one) {
      // The last tokens see most, so free threads take the long pieces first.
      const int64_t part = parts - 1 - one / held.kv_heads, head = one % held.kv_heads;
      const int64_t from = part * at_once;
      const int64_t to = std::min(chunk.count, from + at_once);
      attention.begin(held, repeats * (to - from));
      for (int64_t q = head * repeats; q < (head + 1) * repeats; ++q) {
        for (int64_t t = from; t < to; ++t) {
          attention.add(
              queries.data + t * queries.per_row + q * queries.per_head, queries.per_channel,
              {chunk.lows[t], chunk.offset + t}, held.sinks ? held.sinks + q : nullptr);
        }
      }
      attention.pages(0, chunk.pages, head);
      attention.tokens(0, chunk.offset + to - chunk.start, chunk.start, head);
      int64_t line = 0;
      for (int64_t q = head * repeats; q < (head + 1) * repeats; ++q) {
        for (int64_t t = from; t < to; ++t) {
          attention.result(line++, y + (q * chunk.count + t) * held.v_dim);
        }
      }
    }
  };
  const int pieces = static_cast<int>(parts * held.kv_heads);
  const int64_t tokens = chunk.offset - chunk.start + chunk.count / 2 + chunk.pages * BLOCK;
  if (threads == 1 || lines * tokens * (held.k_dim + held.v_dim) < SHARED_WORK) {
    some(0, pieces);
  } else {
    Pool::shared().share(pieces, 1, some);
  }
}

}  // namespace kvd
