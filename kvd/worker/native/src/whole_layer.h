// A whole decoder layer: norm, queries, keys and values, RoPE, attention, residual, norm, gated MLP,
// residual. Each part computes as the operation of its own does, to the bit. A decode step is one
// operation. A prefill pass is two, before and after the attention of its chunks.

#pragma once

#include <array>

#include "attention.h"
#include "elementwise.h"
#include "products.h"

namespace kvd {

// Without a weight there is no norm.
struct Norm {
  const float* weight = nullptr;
  float eps = 0.0f;

  void run(const float* x, int64_t rows, int64_t size, float* y) const {
    share_rows(rows, size, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        rms_norm(x + row * size, weight, eps, size, y + row * size);
      }
    });
  }
};

inline void add(const float* a, const float* b, int64_t size, float* y) {
  for (int64_t i = 0; i < size; ++i) {
    y[i] = a[i] + b[i];
  }
}

// Heads of tokens: head h of token t begins at data[h * per_head + t * per_token].
template <typename Float>
struct Heads {
  Float* data;
  int64_t per_head, per_token;

  Float* at(int64_t head, int64_t token) const {
    return data + head * per_head + token * per_token;
  }
};

// Write one token for each row into its tail; x: [count or more, heads, dim]; rows as in
// `attend_rows`; tails: [slots, heads, room, dim].
inline void append_rows(
    const float* x, const int32_t* rows, int64_t count, int64_t heads, int64_t room, int64_t dim,
    float* tails) {
  for (int64_t row = 0; row < count; ++row) {
    const int32_t* one = rows + row * 6;
    for (int64_t head = 0; head < heads; ++head) {
      const float* from = x + (row * heads + head) * dim;
      std::copy(from, from + dim, tails + ((one[0] * heads + head) * room + one[1] - 1) * dim);
    }
  }
}

struct WholeLayer {
  Linear queries, keys, values, out, gate, up, down;  // `y` is not used
  Norm before, after, query, key;
  const float* frequencies;
  int64_t pairs;
  bool interleaved;
  float position_scale;

  // x, y: [batch, hidden]; offsets: positions, [batch] or one for all; rows: those of `attend_rows`.
  void decode(
      const float* x, int64_t batch, const Held& held, const int32_t* offsets, bool each,
      const int32_t* rows, int64_t count, float* tail_keys, float* tail_values, float* y) const {
    thread_local Rooms rooms;
    const int64_t hidden = down.outputs, inner = gate.outputs;
    const int64_t attended = held.q_heads * held.v_dim;
    float* q = rooms.of(0, batch * queries.outputs);
    float* k = rooms.of(1, batch * keys.outputs);
    float* v = rooms.of(2, batch * values.outputs);
    float* some = rooms.of(3, batch * std::max({hidden, attended, inner}));
    float* other = rooms.of(4, batch * std::max(hidden, inner));

    before.run(x, batch, hidden, some);
    multiply(some, batch, hidden, {queries.to(q), keys.to(k), values.to(v)});
    turn(offsets, each, batch);
    rotate_heads(query, batch, held.q_heads, held.k_dim, q);
    rotate_heads(key, batch, held.kv_heads, held.k_dim, k);
    append_rows(k, rows, count, held.kv_heads, held.room, held.k_dim, tail_keys);
    append_rows(v, rows, count, held.kv_heads, held.room, held.v_dim, tail_values);
    attend_rows(held, {q, queries.outputs, held.k_dim, 1}, rows, count, some);
    std::fill(some + count * attended, some + batch * attended, 0.0f);
    multiply(some, batch, attended, {out.to(other)});
    float* sum = rooms.of(0, batch * hidden);
    add(x, other, batch * hidden, sum);

    after.run(sum, batch, hidden, other);
    float* gates = some;
    float* ups = rooms.of(1, batch * inner);
    multiply(other, batch, hidden, {gate.to(gates), up.to(ups)});
    swiglu(gates, ups, batch * inner, gates);
    multiply(gates, batch, inner, {down.to(other)});
    add(sum, other, batch * hidden, y);
  }

  // Floats of temporary memory for each token. width: inputs of the product after attention.
  int64_t project_room() const {
    return down.outputs + std::max({queries.outputs, keys.outputs, values.outputs});
  }
  int64_t finish_room(int64_t width) const {
    return down.outputs + width + 2 * gate.outputs;
  }

  // A prefill pass up to its attention. x: [batch, hidden]; offsets: positions, [batch] or one for
  // all; q, k, v: [heads, batch, dim]; room: [batch * project_room()].
  void project(
      const float* x, int64_t batch, const int32_t* offsets, bool each, int64_t q_heads,
      int64_t kv_heads, float* q, float* k, float* v, float* room) const {
    const int64_t hidden = down.outputs;
    float* normed = room;
    float* flat = room + batch * hidden;
    before.run(x, batch, hidden, normed);
    turn(offsets, each, batch);
    const Angles& turned = angles();  // of this thread; helpers read it
    multiply(normed, batch, hidden, {queries.to(flat)});
    spread(flat, batch, q_heads, queries.outputs / q_heads, &query, &turned, q);
    multiply(normed, batch, hidden, {keys.to(flat)});
    spread(flat, batch, kv_heads, keys.outputs / kv_heads, &key, &turned, k);
    multiply(normed, batch, hidden, {values.to(flat)});
    spread(flat, batch, kv_heads, values.outputs / kv_heads, nullptr, nullptr, v);
  }

  // The rest of a prefill pass. attended: heads of `dim` elements; room:
  // [batch * finish_room(q_heads * dim)].
  void finish(
      const float* x, int64_t batch, const Heads<const float>& attended, int64_t q_heads,
      int64_t dim, float* y, float* room) const {
    const int64_t hidden = down.outputs, inner = gate.outputs, width = q_heads * dim;
    float* other = room;
    float* joined = other + batch * hidden;
    float* gates = joined + batch * width;
    float* ups = gates + batch * inner;
    share_rows(batch, width, [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; ++token) {
        for (int64_t head = 0; head < q_heads; ++head) {
          const float* from = attended.at(head, token);
          std::copy(from, from + dim, joined + token * width + head * dim);
        }
      }
    });
    multiply(joined, batch, width, {out.to(other)});
    share_rows(batch, hidden, [&](int64_t first, int64_t last) {
      add(x + first * hidden, other + first * hidden, (last - first) * hidden, y + first * hidden);
      for (int64_t row = first; row < last; ++row) {
        rms_norm(y + row * hidden, after.weight, after.eps, hidden, other + row * hidden);
      }
    });
    multiply(other, batch, hidden, {gate.to(gates), up.to(ups)});
    share_rows(batch, inner, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        swiglu(gates + row * inner, ups + row * inner, inner, gates + row * inner);
      }
    });
    multiply(gates, batch, inner, {down.to(other)});
    share_rows(batch, hidden, [&](int64_t first, int64_t last) {
      const int64_t at = first * hidden;
      add(y + at, other + at, (last - first) * hidden, y + at);
    });
  }

 private:
  // Tokens' heads, [batch, heads, dim], as [heads, batch, dim], after a norm and RoPE if given.
  void spread(
      const float* x, int64_t batch, int64_t heads, int64_t dim, const Norm* norm,
      const Angles* turned, float* y) const {
    share_rows(batch, heads * dim, [&](int64_t first, int64_t last) {
      thread_local std::vector<float> room;
      room.resize(dim);
      for (int64_t token = first; token < last; ++token) {
        for (int64_t head = 0; head < heads; ++head) {
          const float* from = x + (token * heads + head) * dim;
          float* to = y + (head * batch + token) * dim;
          if (norm && norm->weight) {
            rms_norm(from, norm->weight, norm->eps, dim, room.data());
            from = room.data();
          }
          if (turned) {
            rotate(
                from, turned->cosines.data() + token * pairs, turned->sines.data() + token * pairs,
                pairs, dim, interleaved, to);
          } else {
            std::copy(from, from + dim, to);
          }
        }
      }
    });
  }

  // Buffers that are kept, because a step needs the same ones in each layer.
  class Rooms {
   public:
    float* of(int number, int64_t size) {
      if (static_cast<int64_t>(rooms_[number].size()) < size) {
        rooms_[number].resize(size);
      }
      return rooms_[number].data();
    }

   private:
    std::array<std::vector<float>, 5> rooms_;
  };

  static Angles& angles() {
    thread_local Angles angles;
    return angles;
  }

  void turn(const int32_t* offsets, bool each, int64_t batch) const {
    thread_local std::vector<float> positions;
    positions.resize(batch);
    for (int64_t row = 0; row < batch; ++row) {
      positions[row] = static_cast<float>(offsets[each ? row : 0]) * position_scale;
    }
    angles().turn(positions, frequencies, pairs);
  }

  // Norms and RoPE of heads, [batch, heads, dim], in place.
  void rotate_heads(const Norm& norm, int64_t batch, int64_t heads, int64_t dim, float* x) const {
    if (norm.weight) {
      norm.run(x, batch * heads, dim, x);
    }
    for (int64_t row = 0; row < batch * heads; ++row) {
      const int64_t token = row / heads;
      rotate(
          x + row * dim, angles().cosines.data() + token * pairs,
          angles().sines.data() + token * pairs, pairs, dim, interleaved, x + row * dim);
    }
  }
};

}  // namespace kvd
