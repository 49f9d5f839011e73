// A whole decoder layer: norm, queries, keys and values, RoPE, attention, residual, norm, gated MLP,
// residual. Each part computes as the operation of its own does, to the bit. A decode step is one
// operation. A prefill pass is two, before and after the attention of its chunks.
//
// A layer that is divided among ranks ends twice in a sum over all ranks. `AttentionPart` and `Mlp`
// compute this rank's terms of these sums, without biases of the sums and without residuals.

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

// y = a + b, of [rows, size] each.
inline void add(const float* a, const float* b, int64_t rows, int64_t size, float* y) {
  share_rows(rows, size, [&](int64_t first, int64_t last) {
    for (int64_t i = first * size; i < last * size; ++i) {
      y[i] = a[i] + b[i];
    }
  });
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

// Buffers that are kept, because a decode step needs the same ones in each layer.
class Rooms {
 public:
  static Rooms& own() {
    thread_local Rooms rooms;
    return rooms;
  }

  float* of(int number, int64_t size) {
    if (static_cast<int64_t>(rooms_[number].size()) < size) {
      rooms_[number].resize(size);
    }
    return rooms_[number].data();
  }

 private:
  std::array<std::vector<float>, 5> rooms_;
};

// A decode step's positions and rows, and where the rows' tails are.
struct Step {
  const int32_t* offsets;  // positions, [batch] or one for all
  bool each;
  const int32_t* rows;  // those of `attend_rows`
  int64_t count;
  float* tail_keys;
  float* tail_values;
};

// From the first norm to the product after attention.
struct AttentionPart {
  Linear queries, keys, values, out;  // `y` is not used
  Norm before, query, key;
  const float* frequencies;
  int64_t pairs;
  bool interleaved;
  float position_scale;

  // x, y: [batch, hidden].
  void decode(
      const float* x, int64_t batch, const Held& held, const Step& step, float* y) const {
    Rooms& rooms = Rooms::own();
    const int64_t hidden = out.outputs, attended = held.q_heads * held.v_dim;
    float* q = rooms.of(0, batch * queries.outputs);
    float* k = rooms.of(1, batch * keys.outputs);
    float* v = rooms.of(2, batch * values.outputs);
    float* some = rooms.of(3, batch * std::max(hidden, attended));

    before.run(x, batch, hidden, some);
    multiply(some, batch, hidden, {queries.to(q), keys.to(k), values.to(v)});
    turn(step.offsets, step.each, batch);
    rotate_heads(query, batch, held.q_heads, held.k_dim, q);
    rotate_heads(key, batch, held.kv_heads, held.k_dim, k);
    append_rows(k, step.rows, step.count, held.kv_heads, held.room, held.k_dim, step.tail_keys);
    append_rows(v, step.rows, step.count, held.kv_heads, held.room, held.v_dim, step.tail_values);
    attend_rows(held, {q, queries.outputs, held.k_dim, 1}, step.rows, step.count, some);
    std::fill(some + step.count * attended, some + batch * attended, 0.0f);
    multiply(some, batch, attended, {out.to(y)});
  }

  // Floats of temporary memory for each token of `project`.
  int64_t project_room() const {
    return out.outputs + std::max({queries.outputs, keys.outputs, values.outputs});
  }

  // A prefill pass up to its attention. x: [batch, hidden]; offsets: positions, [batch] or one for
  // all; q, k, v: [heads, batch, dim]; room: [batch * project_room()].
  void project(
      const float* x, int64_t batch, const int32_t* offsets, bool each, int64_t q_heads,
      int64_t kv_heads, float* q, float* k, float* v, float* room) const {
    const int64_t hidden = out.outputs;
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

  // The product after a prefill pass's attention. attended: heads of `dim` elements; y:
  // [batch, hidden]; room: [batch * q_heads * dim].
  void finish(
      int64_t batch, const Heads<const float>& attended, int64_t q_heads, int64_t dim, float* y,
      float* room) const {
    const int64_t width = q_heads * dim;
    share_rows(batch, width, [&](int64_t first, int64_t last) {
      for (int64_t token = first; token < last; ++token) {
        for (int64_t head = 0; head < q_heads; ++head) {
          const float* from = attended.at(head, token);
          std::copy(from, from + dim, room + token * width + head * dim);
        }
      }
    });
    multiply(room, batch, width, {out.to(y)});
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

// Norm and gated MLP.
struct Mlp {
  Linear gate, up, down;  // `y` is not used
  Norm norm;

  // Floats of temporary memory for each token.
  int64_t room() const {
    return down.outputs + 2 * gate.outputs;
  }

  // x, y: [batch, hidden]; room: [batch * room()].
  void run(const float* x, int64_t batch, float* y, float* room) const {
    const int64_t hidden = down.outputs, inner = gate.outputs;
    float* gates = room + batch * hidden;
    float* ups = gates + batch * inner;
    norm.run(x, batch, hidden, room);
    multiply(room, batch, hidden, {gate.to(gates), up.to(ups)});
    share_rows(batch, inner, [&](int64_t first, int64_t last) {
      const int64_t at = first * inner;
      swiglu(gates + at, ups + at, (last - first) * inner, gates + at);
    });
    multiply(gates, batch, inner, {down.to(y)});
  }
};

struct WholeLayer {
  AttentionPart attention;
  Mlp mlp;

  // x, y: [batch, hidden].
  void decode(
      const float* x, int64_t batch, const Held& held, const Step& step, float* y) const {
    Rooms& rooms = Rooms::own();
    float* attended = rooms.of(4, batch * mlp.down.outputs);
    attention.decode(x, batch, held, step, attended);
    rest(x, batch, attended, y, rooms.of(0, batch * mlp.room()));
  }

  // Floats of temporary memory for each token of `finish`. width: inputs of the product after
  // attention.
  int64_t finish_room(int64_t width) const {
    return mlp.down.outputs + std::max(width, mlp.room());
  }

  // The rest of a prefill pass. attended: heads of `dim` elements; room:
  // [batch * finish_room(q_heads * dim)].
  void finish(
      const float* x, int64_t batch, const Heads<const float>& attended, int64_t q_heads,
      int64_t dim, float* y, float* room) const {
    float* product = room + batch * std::max(q_heads * dim, mlp.room());
    attention.finish(batch, attended, q_heads, dim, product, room);
    rest(x, batch, product, y, room);
  }

 private:
  // Residual, MLP and residual; `attended`, [batch, hidden], is overwritten.
  void rest(const float* x, int64_t batch, float* attended, float* y, float* room) const {
    const int64_t hidden = mlp.down.outputs;
    add(x, attended, batch, hidden, y);
    mlp.run(y, batch, attended, room);
    add(y, attended, batch, hidden, y);
  }
};

}  // namespace kvd
