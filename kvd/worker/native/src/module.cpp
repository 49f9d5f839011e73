// kvd's own MLX operations for the CPU, and their Python functions.
//
// Each is a regular node of MLX's graph: lazy, in the stream's order, and usable in compiled
// functions. Inputs are float32 unless stated otherwise; Python checks what it passes.

#include <algorithm>
#include <array>
#include <memory>
#include <stdexcept>
#include <vector>

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "mlx/backend/cpu/encoder.h"
#include "mlx/mlx.h"
#include "mlx/primitives.h"

#include "attention.h"
#include "draw.h"
#include "elementwise.h"
#include "products.h"
#include "quantize.h"
#include "whole_layer.h"

namespace nb = nanobind;
namespace mx = mlx::core;
using namespace nb::literals;

namespace {

using Arrays = std::vector<mx::array>;

// The calling thread's stream: MLX has default streams per thread.
mx::Stream cpu() {
  return mx::default_stream(mx::Device(mx::Device::cpu));
}

void check(bool holds, const char* what) {
  if (!holds) {
    throw std::invalid_argument(what);
  }
}

// As contiguous float32; no operation if the array is computed and already is.
mx::array plain(const mx::array& x) {
  if (x.dtype() == mx::float32 && x.is_available() && x.flags().row_contiguous) {
    return x;
  }
  return mx::contiguous(mx::astype(x, mx::float32));
}

// An operation that runs on the CPU's stream and has no derivatives.
class Operation : public mx::Primitive {
 public:
  explicit Operation(mx::Stream stream) : Primitive(stream) {}

  void eval_gpu(const Arrays&, Arrays&) override {
    throw std::runtime_error("kvd's native operations run on the CPU only");
  }

 protected:
  static void make(mx::array& out) {
    out.set_data(mx::allocator::malloc(out.nbytes()));
  }

  template <typename Work>
  void run(Work&& work) {
    mx::cpu::get_command_encoder(stream()).dispatch(std::forward<Work>(work));
  }
};

// Where the rows of an array, [..., size], begin, and whether their elements are contiguous.
class Rows {
 public:
  explicit Rows(const mx::array& from) : data_(from.data<float>()), size_(from.shape(-1)) {
    stride_ = size_ == 1 ? 1 : from.strides(-1);
    count_ = size_ ? from.size() / size_ : 0;
    for (int axis = 0; axis + 1 < from.ndim(); ++axis) {
      shape_.push_back(from.shape(axis));
      strides_.push_back(from.strides(axis));
    }
    whole_ = from.flags().row_contiguous;
  }

  int64_t count() const {
    return count_;
  }

  const float* begin(int64_t row) const {
    if (whole_) {
      return data_ + row * size_;
    }
    int64_t at = 0;
    for (int axis = static_cast<int>(shape_.size()) - 1; axis >= 0; --axis) {
      at += row % shape_[axis] * strides_[axis];
      row /= shape_[axis];
    }
    return data_ + at;
  }

  int64_t size() const {
    return size_;
  }

  int64_t stride() const {
    return stride_;
  }

  // Rows from `row` on, before `last`, that begin one element after another.
  int64_t neighbors(int64_t row, int64_t last) const {
    if (stride_ == 1 || shape_.empty() || strides_.back() != 1) {
      return 1;
    }
    return std::min(last - row, shape_.back() - row % shape_.back());
  }

  // A row's contiguous elements: in place, or copied to `room`.
  const float* row(int64_t row, std::vector<float>& room) const {
    const float* from = begin(row);
    if (stride_ == 1) {
      return from;
    }
    room.resize(size_);
    for (int64_t i = 0; i < size_; ++i) {
      room[i] = from[i * stride_];
    }
    return room.data();
  }

  // All rows contiguous: in place, or copied to `room`.
  const float* all(std::vector<float>& room) const {
    if (whole_) {
      return data_;
    }
    room.resize(count_ * size_);
    for (int64_t r = 0; r < count_; ++r) {
      const float* from = begin(r);
      for (int64_t i = 0; i < size_; ++i) {
        room[r * size_ + i] = from[i * stride_];
      }
    }
    return room.data();
  }

 private:
  const float* data_;
  int64_t size_, stride_, count_;
  bool whole_;
  std::vector<int64_t> shape_, strides_;
};

kvd::Stored stored_as(const mx::array& weight) {
  if (weight.dtype() == mx::float16) {
    return kvd::Stored::HALF;
  }
  return weight.dtype() == mx::bfloat16 ? kvd::Stored::BFLOAT : kvd::Stored::FLOAT;
}

class Multiply : public Operation {
 public:
  using Operation::Operation;
  DEFINE_NAME(KvdMultiply)
  DEFINE_DEFAULT_IS_EQUIVALENT()

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    mx::array& out = outputs[0];
    make(out);
    const mx::array& packed = inputs[1];
    const float* bias = inputs.size() > 2 ? inputs[2].data<float>() : nullptr;
    const int64_t width = inputs[0].shape(-1), outs = out.shape(-1);
    run([x = Rows(inputs[0]), weights = packed.data<void>(), stored = stored_as(packed), bias,
         width, outs, y = out.data<float>()] {
      static thread_local std::vector<float> room;
      const float* from = x.all(room);
      kvd::multiply(from, x.count(), width, {{weights, stored, bias, outs, y}});
    });
  }
};

class Norm : public Operation {
 public:
  Norm(mx::Stream stream, float eps) : Operation(stream), eps_(eps) {}
  DEFINE_NAME(KvdRMSNorm)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape()};
  }

  bool is_equivalent(const Primitive& other) const override {
    return eps_ == static_cast<const Norm&>(other).eps_;
  }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    mx::array& out = outputs[0];
    make(out);
    const float* weight = inputs.size() > 1 ? inputs[1].data<float>() : nullptr;
    run([x = Rows(inputs[0]), weight, eps = eps_, size = int64_t{out.shape(-1)},
         y = out.data<float>()] {
      kvd::share_rows(x.count(), size, [&](int64_t first, int64_t last) {
        thread_local std::vector<float> room;
        for (int64_t row = first; row < last; ++row) {
          kvd::rms_norm(x.row(row, room), weight, eps, size, y + row * size);
        }
      });
    });
  }

 private:
  float eps_;
};

class Gate : public Operation {
 public:
  using Operation::Operation;
  DEFINE_NAME(KvdSwiGLU)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape()};
  }
  DEFINE_DEFAULT_IS_EQUIVALENT()

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    mx::array& out = outputs[0];
    make(out);
    run([gate = Rows(inputs[0]), x = Rows(inputs[1]), size = int64_t{out.shape(-1)},
         y = out.data<float>()] {
      kvd::share_rows(x.count(), size, [&](int64_t first, int64_t last) {
        thread_local std::vector<float> one, other;
        for (int64_t row = first; row < last; ++row) {
          kvd::swiglu(gate.row(row, one), x.row(row, other), size, y + row * size);
        }
      });
    });
  }
};

class Quantize : public Operation {
 public:
  Quantize(mx::Stream stream, int group, int bits)
      : Operation(stream), group_(group), bits_(bits) {}
  DEFINE_NAME(KvdQuantize)

  bool is_equivalent(const Primitive& other) const override {
    const auto& quantize = static_cast<const Quantize&>(other);
    return group_ == quantize.group_ && bits_ == quantize.bits_;
  }

  // Outputs: words, [..., size * bits / 32] uint32; scales and biases, [..., size / group].
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    for (mx::array& out : outputs) {
      make(out);
    }
    run([x = Rows(inputs[0]), size = int64_t{inputs[0].shape(-1)}, group = int64_t{group_},
         bits = bits_, words = reinterpret_cast<uint8_t*>(outputs[0].data<uint32_t>()),
         scales = outputs[1].data<float>(), biases = outputs[2].data<float>()] {
      const int64_t groups = size / group, bytes = group / 8 * bits;
      kvd::share_rows(x.count(), size, [&](int64_t first, int64_t last) {
        thread_local std::vector<float> room;
        kvd::GroupScale by[kvd::LANES];
        for (int64_t row = first, count; row < last; row += count) {
          // Keys are per channel, and a token's channels are neighbors in memory.
          count = x.neighbors(row, last) >= kvd::LANES ? kvd::LANES : 1;
          const float* from = count == 1 ? x.row(row, room) : x.begin(row);
          for (int64_t g = 0; g < groups; ++g) {
            const int64_t at = row * groups + g;
            if (count == 1) {
              by[0] = kvd::quantize_group(from + g * group, group, bits, words + at * bytes);
            } else {
              kvd::quantize_eight_groups(
                  from + g * group * x.stride(), x.stride(), group, bits, words + at * bytes,
                  groups * bytes, by);
            }
            for (int64_t i = 0; i < count; ++i) {
              scales[at + i * groups] = by[i].scale;
              biases[at + i * groups] = by[i].bias;
            }
          }
        }
      });
    });
  }

 private:
  int group_, bits_;
};

class Rotate : public Operation {
 public:
  Rotate(mx::Stream stream, bool interleaved, float scale)
      : Operation(stream), interleaved_(interleaved), scale_(scale) {}
  DEFINE_NAME(KvdRoPE)

  std::vector<mx::Shape> output_shapes(const Arrays& inputs) override {
    return {inputs[0].shape()};
  }

  bool is_equivalent(const Primitive& other) const override {
    const auto& rotate = static_cast<const Rotate&>(other);
    return interleaved_ == rotate.interleaved_ && scale_ == rotate.scale_;
  }

  // x: [batch, heads, tokens, dim]; offsets: [batch] or [1] int32; frequencies: [pairs].
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    mx::array& out = outputs[0];
    make(out);
    const mx::array& offsets = inputs[1];
    run([x = Rows(inputs[0]), offset = offsets.data<int32_t>(),
         each = offsets.size() > 1 ? int64_t{1} : int64_t{0}, frequencies = inputs[2].data<float>(),
         pairs = int64_t{inputs[2].shape(0)}, heads = int64_t{out.shape(1)},
         tokens = int64_t{out.shape(2)}, dim = int64_t{out.shape(3)}, scale = scale_,
         interleaved = interleaved_, y = out.data<float>()] {
      thread_local kvd::Angles own;
      const int64_t batch = x.count() / (heads * tokens);
      std::vector<float> positions(batch * tokens);
      for (int64_t b = 0; b < batch; ++b) {
        for (int64_t t = 0; t < tokens; ++t) {
          positions[b * tokens + t] = static_cast<float>(offset[b * each] + t) * scale;
        }
      }
      own.turn(positions, frequencies, pairs);
      const kvd::Angles& angles = own;  // of this thread; helpers read it
      kvd::share_rows(x.count(), dim, [&](int64_t first, int64_t last) {
        thread_local std::vector<float> room;
        for (int64_t row = first; row < last; ++row) {
          const int64_t token = row / (heads * tokens) * tokens + row % tokens;
          kvd::rotate(
              x.row(row, room), angles.cosines.data() + token * pairs,
              angles.sines.data() + token * pairs, pairs, dim, interleaved, y + row * dim);
        }
      });
    });
  }

 private:
  bool interleaved_;
  float scale_;
};

// Tails with one more token per row: the same buffers, written in place. The new places are not
// read before, because a row's length bounds what is read of its tail.
class Append : public Operation {
 public:
  using Operation::Operation;
  DEFINE_NAME(KvdAppend)
  DEFINE_DEFAULT_IS_EQUIVALENT()

  // Tails of keys and of values, [slots, heads, tokens, dim]; new tokens, [rows or more, heads, 1,
  // dim]; rows, [rows, 6] int32.
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    const mx::array& about = inputs[4];
    for (int side = 0; side < 2; ++side) {
      outputs[side].copy_shared_buffer(inputs[side]);
      const mx::array& tails = inputs[side];
      run([x = Rows(inputs[2 + side]), about = about.data<int32_t>(), rows = about.shape(0),
           heads = int64_t{tails.shape(1)}, tokens = int64_t{tails.shape(2)},
           dim = int64_t{tails.shape(3)}, to = outputs[side].data<float>()] {
        thread_local std::vector<float> room;
        for (int64_t row = 0; row < rows; ++row) {
          const int32_t* one = about + row * 6;
          for (int64_t head = 0; head < heads; ++head) {
            const float* from = x.row(row * heads + head, room);
            float* at = to + ((one[0] * heads + head) * tokens + one[1] - 1) * dim;
            std::copy(from, from + dim, at);
          }
        }
      });
    }
  }
};

struct Packing {
  int bits, group;
  bool turned;  // values that are stored [dim, 64]
};

// Common to decode and prefill attention: pages of some levels, and their packings.
class Attention : public Operation {
 public:
  Attention(
      mx::Stream stream, float scale, int keep, bool sinks, std::vector<Packing> keys,
      std::vector<Packing> values)
      : Operation(stream), scale_(scale), keep_(keep), sinks_(sinks), keys_(std::move(keys)),
        values_(std::move(values)) {}

  bool is_equivalent(const Primitive&) const override {
    return false;
  }

 protected:
  // Inputs: queries, [pages, 3], dense keys and values, [.., heads, tokens, dim], then sinks if
  // there are any, then the pools' arrays level by level.
  kvd::Held held(const Arrays& inputs) const {
    size_t next = 5;
    return held(inputs, inputs[0].shape(1), next);
  }

  // `next`: the input after the rows; then the one after the pools.
  kvd::Held held(const Arrays& inputs, int q_heads, size_t& next) const {
    kvd::Held found;
    found.q_heads = q_heads;
    found.k_dim = inputs[2].shape(-1);
    found.v_dim = inputs[3].shape(-1);
    found.kv_heads = inputs[2].shape(-3);
    found.room = inputs[2].shape(-2);
    found.scale = scale_;
    found.keep = keep_;
    found.pages = inputs[1].data<int32_t>();
    found.dense_keys = dense(inputs[2]);
    found.dense_values = dense(inputs[3]);
    found.sinks = sinks_ ? inputs[next++].data<float>() : nullptr;
    for (size_t level = 0; level < keys_.size(); ++level) {
      found.keys.push_back(side(inputs, next, keys_[level], found.k_dim, kvd::BLOCK));
      found.values.push_back(
          values_[level].turned ? side(inputs, next, values_[level], found.v_dim, kvd::BLOCK)
                                : side(inputs, next, values_[level], kvd::BLOCK, found.v_dim));
    }
    return found;
  }

 private:
  // Of [slots, heads, tokens, dim] or [heads, tokens, dim].
  static kvd::DenseTokens dense(const mx::array& x) {
    const int64_t per_slot = x.ndim() > 3 ? x.strides(-4) : 0;
    return {x.data<float>(), per_slot, x.strides(-3), x.strides(-2)};
  }

  static kvd::Packed side(
      const Arrays& inputs, size_t& next, Packing packing, int64_t a, int64_t b) {
    kvd::Packed found;
    found.bits = packing.bits;
    found.group = packing.group;
    found.a = a;
    found.b = b;
    found.turned = packing.turned;
    found.words = static_cast<const uint8_t*>(inputs[next++].data<void>());
    if (packing.bits != 16) {
      found.scales = inputs[next++].data<float>();
      found.biases = inputs[next++].data<float>();
    }
    return found;
  }

  float scale_;
  int keep_;
  bool sinks_;
  std::vector<Packing> keys_, values_;
};

// One query per row.
class Decode : public Attention {
 public:
  using Attention::Attention;
  DEFINE_NAME(KvdDecodeAttention)

  // The fifth input: [rows, 6] int32: a row's tail (slot, tokens in it, position of the first one),
  // its pages (first, last + 1), and the first position that its query sees, besides `keep`.
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    mx::array& out = outputs[0];
    make(out);
    const mx::array& queries = inputs[0];
    const kvd::Queries from{
        queries.data<float>(), queries.strides(0), queries.strides(1), queries.strides(3)};
    run([held = held(inputs), from, rows = inputs[4].data<int32_t>(),
         count = int64_t{inputs[4].shape(0)}, all = int64_t{queries.shape(0)},
         y = out.data<float>()] {
      kvd::attend_rows(held, from, rows, count, y);
      const int64_t size = held.q_heads * held.v_dim;
      std::fill(y + count * size, y + all * size, 0.0f);
    });
  }
};

// Linear layers and norms among an operation's inputs.
struct Weights {
  std::vector<int> outputs;  // of the linear layers
  std::vector<bool> biases;
  std::vector<float> eps;  // of the norms
  std::vector<bool> norms;

  // Inputs from `next` on: linear layers; then biases and norms where there are any. Pointers
  // beyond those of the operation are left as they are.
  void read(
      const Arrays& inputs, size_t next, std::initializer_list<kvd::Linear*> linears,
      std::initializer_list<kvd::Norm*> all_norms) const {
    const auto linear = linears.begin();
    for (size_t i = 0; i < outputs.size(); ++i) {
      const mx::array& packed = inputs[next++];
      *linear[i] = {packed.data<void>(), stored_as(packed), nullptr, outputs[i], nullptr};
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      linear[i]->bias = biases[i] ? inputs[next++].data<float>() : nullptr;
    }
    const auto norm = all_norms.begin();
    for (size_t i = 0; i < norms.size(); ++i) {
      if (norms[i]) {
        *norm[i] = {inputs[next++].data<float>(), eps[i]};
      }
    }
  }
};

// A whole layer or its part with attention, except what is in arrays.
struct LayerSettings {
  static constexpr size_t LINEARS = 7, NORMS = 4;  // of a whole layer
  static constexpr size_t ATTENTION_LINEARS = 4, ATTENTION_NORMS = 3;
  int heads;
  bool interleaved;
  float position_scale;
  Weights weights;

  bool whole() const {
    return weights.outputs.size() == LINEARS;
  }

  // Inputs from `next` on: radians per position; those of `Weights`.
  kvd::WholeLayer layer(const Arrays& inputs, size_t next) const {
    kvd::WholeLayer found;
    kvd::AttentionPart& part = found.attention;
    const mx::array& frequencies = inputs[next++];
    part.frequencies = frequencies.data<float>();
    part.pairs = frequencies.shape(0);
    part.interleaved = interleaved;
    part.position_scale = position_scale;
    kvd::Mlp& mlp = found.mlp;
    weights.read(
        inputs, next,
        {&part.queries, &part.keys, &part.values, &part.out, &mlp.gate, &mlp.up, &mlp.down},
        {&part.before, &part.query, &part.key, &mlp.norm});
    return found;
  }
};

// A decode step of one whole layer, or of its part with attention.
class DecodeLayer : public Attention {
 public:
  DecodeLayer(
      mx::Stream stream, float scale, int keep, std::vector<Packing> keys,
      std::vector<Packing> values, LayerSettings settings)
      : Attention(stream, scale, keep, false, std::move(keys), std::move(values)),
        settings_(std::move(settings)) {}
  DEFINE_NAME(KvdDecodeLayer)

  // Inputs: x, [batch, 1, hidden]; those of attention after the queries; positions; radians per
  // position; linear layers; then biases and norms where there are any.
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    mx::array& out = outputs[0];
    make(out);
    for (int side : {1, 2}) {
      outputs[side].copy_shared_buffer(inputs[side + 1]);
    }
    size_t next = 5;
    const kvd::Held held = this->held(inputs, settings_.heads, next);
    const mx::array& offsets = inputs[next++];
    const kvd::Step step{
        offsets.data<int32_t>(), offsets.size() > 1, inputs[4].data<int32_t>(),
        int64_t{inputs[4].shape(0)}, outputs[1].data<float>(), outputs[2].data<float>()};
    run([x = Rows(inputs[0]), held, step, layer = settings_.layer(inputs, next),
         whole = settings_.whole(), y = out.data<float>()] {
      thread_local std::vector<float> room;
      const float* from = x.all(room);
      if (whole) {
        layer.decode(from, x.count(), held, step, y);
      } else {
        layer.attention.decode(from, x.count(), held, step, y);
      }
    });
  }

 private:
  LayerSettings settings_;
};

float* floats(const mx::allocator::Data& from) {
  mx::allocator::Buffer buffer = from.buffer();
  return static_cast<float*>(buffer.raw_ptr());
}

// A prefill pass of one layer up to its attention.
class LayerInputs : public Operation {
 public:
  LayerInputs(mx::Stream stream, LayerSettings settings)
      : Operation(stream), settings_(std::move(settings)) {}
  DEFINE_NAME(KvdLayerInputs)

  bool is_equivalent(const Primitive&) const override {
    return false;
  }

  // Inputs: x, [batch, 1, hidden]; positions; then those of `LayerSettings`. Outputs: queries, keys
  // and values, [heads, batch, dim].
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    for (mx::array& out : outputs) {
      make(out);
    }
    const mx::array& offsets = inputs[1];
    run([x = Rows(inputs[0]), offset = offsets.data<int32_t>(), each = offsets.size() > 1,
         part = settings_.layer(inputs, 2).attention, heads = int64_t{outputs[0].shape(0)},
         kv_heads = int64_t{outputs[1].shape(0)}, q = outputs[0].data<float>(),
         k = outputs[1].data<float>(), v = outputs[2].data<float>()] {
      thread_local std::vector<float> room;
      const auto temporary =
          mx::allocator::malloc(x.count() * part.project_room() * sizeof(float));
      part.project(
          x.all(room), x.count(), offset, each, heads, kv_heads, q, k, v, floats(temporary));
    });
  }

 private:
  LayerSettings settings_;
};

// A prefill pass of one whole layer from its attention on, or the product after attention.
class LayerOutput : public Operation {
 public:
  LayerOutput(mx::Stream stream, LayerSettings settings)
      : Operation(stream), settings_(std::move(settings)) {}
  DEFINE_NAME(KvdLayerOutput)

  bool is_equivalent(const Primitive&) const override {
    return false;
  }

  // Inputs: x, [batch, 1, hidden]; attended values, [1, heads, batch, dim], contiguous; then those
  // of `LayerSettings`.
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    mx::array& out = outputs[0];
    make(out);
    const mx::array& attended = inputs[1];
    const kvd::Heads<const float> from{
        attended.data<float>(), attended.strides(1), attended.strides(2)};
    run([x = Rows(inputs[0]), from, layer = settings_.layer(inputs, 2),
         whole = settings_.whole(), heads = int64_t{attended.shape(1)},
         dim = int64_t{attended.shape(3)}, y = out.data<float>()] {
      thread_local std::vector<float> room;
      const int64_t each = whole ? layer.finish_room(heads * dim) : heads * dim;
      const auto temporary = mx::allocator::malloc(x.count() * each * sizeof(float));
      if (whole) {
        layer.finish(x.all(room), x.count(), from, heads, dim, y, floats(temporary));
      } else {
        layer.attention.finish(x.count(), from, heads, dim, y, floats(temporary));
      }
    });
  }

 private:
  LayerSettings settings_;
};

// Norm and gated MLP of a layer, without the residual.
class LayerMlp : public Operation {
 public:
  LayerMlp(mx::Stream stream, Weights weights)
      : Operation(stream), weights_(std::move(weights)) {}
  DEFINE_NAME(KvdLayerMlp)

  bool is_equivalent(const Primitive&) const override {
    return false;
  }

  // Inputs: x, [batch, 1, hidden]; then those of `Weights`.
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    mx::array& out = outputs[0];
    make(out);
    kvd::Mlp mlp;
    weights_.read(inputs, 1, {&mlp.gate, &mlp.up, &mlp.down}, {&mlp.norm});
    run([x = Rows(inputs[0]), mlp, y = out.data<float>()] {
      constexpr int64_t KEPT = 1 << 20;  // floats; a prefill pass of long chunks needs more
      thread_local std::vector<float> room;
      const int64_t size = x.count() * mlp.room();
      if (size <= KEPT) {
        mlp.run(x.all(room), x.count(), y, kvd::Rooms::own().of(0, size));
      } else {
        const auto temporary = mx::allocator::malloc(size * sizeof(float));
        mlp.run(x.all(room), x.count(), y, floats(temporary));
      }
    });
  }

 private:
  Weights weights_;
};

// A chunk of one row's queries, [1, heads, tokens, dim], causally.
class Prefill : public Attention {
 public:
  Prefill(
      mx::Stream stream, float scale, int keep, bool sinks, std::vector<Packing> keys,
      std::vector<Packing> values, int pages, int offset, int start)
      : Attention(stream, scale, keep, sinks, std::move(keys), std::move(values)), pages_(pages),
        offset_(offset), start_(start) {}
  DEFINE_NAME(KvdPrefillAttention)

  // The fifth input: [tokens] int32, the first position that each query sees, besides `keep`.
  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    mx::array& out = outputs[0];
    make(out);
    const mx::array& queries = inputs[0];
    const kvd::Queries from{
        queries.data<float>(), queries.strides(2), queries.strides(1), queries.strides(3)};
    const kvd::ChunkPlace chunk{
        queries.shape(2), pages_, offset_, start_, inputs[4].data<int32_t>()};
    run([held = held(inputs), keys = Rows(inputs[2]), values = Rows(inputs[3]), from, chunk,
         y = out.data<float>()]() mutable {
      std::vector<float> key_room, value_room;
      contiguous(held.dense_keys, held.room, keys, key_room);
      contiguous(held.dense_values, held.room, values, value_room);
      kvd::attend_chunk(held, from, chunk, y);
    });
  }

 private:
  int pages_, offset_, start_;

  // Copy tokens whose elements are not contiguous to `room`.
  static void contiguous(
      kvd::DenseTokens& dense, int64_t tokens, const Rows& from, std::vector<float>& room) {
    if (from.stride() != 1) {
      dense = {from.all(room), 0, tokens * from.size(), from.size()};
    }
  }
};

// Logits that one thread draws from without help, about 50 us.
constexpr int64_t DRAWN_ALONE = 50'000;

// Draws a token of each row. Inputs: logits, settings [rows, 4], keys [rows, 2] uint32, and masks
// [rows, bytes] uint8 if there are any.
class Draw : public Operation {
 public:
  using Operation::Operation;
  DEFINE_NAME(KvdDraw)
  DEFINE_DEFAULT_IS_EQUIVALENT()

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    make(outputs[0]);
    make(outputs[1]);
    const bool bound = inputs.size() == 4;
    run([logits = inputs[0].data<float>(), rows = inputs[0].shape(0),
         size = int64_t{inputs[0].shape(1)}, settings = inputs[1].data<kvd::DrawSettings>(),
         keys = inputs[2].data<uint32_t>(), masks = bound ? inputs[3].data<uint8_t>() : nullptr,
         width = bound ? int64_t{inputs[3].shape(1)} : 0, tokens = outputs[0].data<int32_t>(),
         valid = outputs[1].data<int32_t>()] {
      // Other threads help with rows that take longer than to wake them.
      const int together = std::max<int64_t>(1, DRAWN_ALONE / size);
      kvd::Pool::shared().share(rows, together, [&](int first, int last) {
        thread_local std::vector<float> room;
        for (int row = first; row < last; ++row) {
          const kvd::Drawn drawn = kvd::draw(
              logits + row * size, masks ? masks + row * width : nullptr, size, settings[row],
              keys[2 * row], keys[2 * row + 1], room);
          tokens[row] = drawn.token;
          valid[row] = drawn.valid;
        }
      });
    });
  }
};

// Rows of a packed weight, [panels, inputs, 16], by their numbers.
class LookUp : public Operation {
 public:
  LookUp(mx::Stream stream, int rows) : Operation(stream), rows_(rows) {}
  DEFINE_NAME(KvdLookUp)

  bool is_equivalent(const Primitive& other) const override {
    return rows_ == static_cast<const LookUp&>(other).rows_;
  }

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override {
    mx::array& out = outputs[0];
    make(out);
    const mx::array& packed = inputs[1];
    if (packed.dtype() == mx::float16) {
      look_up<kvd::Half>(inputs[0], packed, out);
    } else if (packed.dtype() == mx::bfloat16) {
      look_up<kvd::BFloat>(inputs[0], packed, out);
    } else {
      look_up<float>(inputs[0], packed, out);
    }
  }

 private:
  int rows_;

  template <typename W>
  void look_up(const mx::array& ids, const mx::array& packed, mx::array& out) {
    run([ids = ids.data<int32_t>(), count = int64_t{static_cast<int64_t>(ids.size())},
         weights = static_cast<const W*>(packed.data<void>()), inputs = int64_t{packed.shape(1)},
         rows = int64_t{rows_}, y = out.data<float>()] {
      kvd::share_rows(count, inputs, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) {
          // MLX does not check ids either; here nothing outside the weight is read.
          const int64_t id = std::clamp<int64_t>(ids[i] < 0 ? ids[i] + rows : ids[i], 0, rows - 1);
          const W* from = weights + id / kvd::PANEL * inputs * kvd::PANEL + id % kvd::PANEL;
          for (int64_t k = 0; k < inputs; ++k) {
            y[i * inputs + k] = kvd::widen(from[k * kvd::PANEL]);
          }
        }
      });
    });
  }
};

mx::array multiply(
    const mx::array& x, const mx::array& packed, int outputs, const std::optional<mx::array>& bias) {
  check(x.ndim() > 0 && packed.ndim() == 3 && packed.shape(2) == kvd::PANEL, "no packed weight");
  check(x.shape(-1) == packed.shape(1), "the inputs are not as many as the weight's");
  check(
      outputs > 0 && outputs <= packed.shape(0) * kvd::PANEL, "the weight has not so many outputs");
  mx::Shape shape = x.shape();
  shape.back() = outputs;
  Arrays inputs{mx::astype(x, mx::float32), packed};
  if (bias) {
    check(bias->ndim() == 1 && bias->shape(0) == outputs, "the bias is not as long as the outputs");
    inputs.push_back(plain(*bias));
  }
  return mx::array(shape, mx::float32, std::make_shared<Multiply>(cpu()), std::move(inputs));
}

mx::array look_up(const mx::array& ids, const mx::array& packed, int rows) {
  check(ids.dtype() == mx::int32, "ids are int32");
  check(rows > 0 && rows <= packed.shape(0) * kvd::PANEL, "the weight has not so many rows");
  mx::Shape shape = ids.shape();
  shape.push_back(packed.shape(1));
  return mx::array(shape, mx::float32, std::make_shared<LookUp>(cpu(), rows), {mx::contiguous(ids), packed});
}

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps) {
  check(x.ndim() > 0 && x.dtype() == mx::float32, "norms are of float32");
  Arrays inputs{x};
  if (weight) {
    check(
        weight->ndim() == 1 && weight->shape(0) == x.shape(-1),
        "the weight is not as long as a row");
    inputs.push_back(plain(*weight));
  }
  return mx::array(x.shape(), mx::float32, std::make_shared<Norm>(cpu(), eps), std::move(inputs));
}

mx::array swiglu(const mx::array& gate, const mx::array& x) {
  check(gate.shape() == x.shape() && x.ndim() > 0, "gate and input differ in shape");
  check(gate.dtype() == mx::float32 && x.dtype() == mx::float32, "gates are of float32");
  return mx::array(x.shape(), mx::float32, std::make_shared<Gate>(cpu()), {gate, x});
}

std::tuple<mx::array, mx::array, mx::array> quantize(const mx::array& x, int group, int bits) {
  check(bits >= 2 && bits <= 8, "codes have 2 to 8 bits");
  check(
      x.ndim() > 1 && x.dtype() == mx::float32 && group > 0 && group % 32 == 0 &&
          x.shape(-1) % group == 0,
      "rows of float32 have groups of a multiple of 32 elements");
  mx::Shape words = x.shape(), groups = x.shape();
  words.back() = words.back() / 32 * bits;
  groups.back() /= group;
  Arrays found = mx::array::make_arrays(
      {words, groups, groups}, {mx::uint32, mx::float32, mx::float32},
      std::make_shared<Quantize>(cpu(), group, bits), {x});
  return {found[0], found[1], found[2]};
}

mx::array rope(
    const mx::array& x, const mx::array& offsets, const mx::array& frequencies, bool interleaved,
    float scale) {
  check(x.ndim() == 4 && x.dtype() == mx::float32, "rope takes [batch, heads, tokens, dim] float32");
  check(
      offsets.dtype() == mx::int32 && offsets.ndim() == 1 &&
          (offsets.shape(0) == 1 || offsets.shape(0) == x.shape(0)),
      "offsets are one int32, or one for each sequence");
  check(
      frequencies.ndim() == 1 && frequencies.shape(0) > 0 &&
          2 * frequencies.shape(0) <= x.shape(3),
      "more frequencies than pairs");
  return mx::array(
      x.shape(), mx::float32, std::make_shared<Rotate>(cpu(), interleaved, scale),
      {x, mx::contiguous(offsets), plain(frequencies)});
}

Arrays draw(
    const mx::array& logits, const mx::array& settings, const mx::array& keys,
    const std::optional<mx::array>& masks) {
  check(logits.ndim() == 2 && logits.shape(1) > 0, "draw takes [rows, vocabulary]");
  const int rows = logits.shape(0);
  check(
      settings.ndim() == 2 && settings.shape(0) == rows && settings.shape(1) == 4 &&
          keys.ndim() == 2 && keys.shape(0) == rows && keys.shape(1) == 2,
      "draw takes four settings and two words of a key for each row");
  Arrays inputs{
      plain(logits), plain(settings), mx::contiguous(mx::astype(keys, mx::uint32))};
  if (masks) {
    check(
        masks->ndim() == 2 && masks->shape(0) == rows && masks->dtype() == mx::uint8 &&
            8 * static_cast<int64_t>(masks->shape(1)) >= logits.shape(1),
        "draw takes a bit for each token, [rows, bytes] uint8");
    inputs.push_back(mx::contiguous(*masks));
  }
  return mx::array::make_arrays(
      {{rows}, {rows}}, {mx::int32, mx::int32}, std::make_shared<Draw>(cpu()), std::move(inputs));
}

std::pair<mx::array, mx::array> append(
    const mx::array& tail_keys, const mx::array& tail_values, const mx::array& keys,
    const mx::array& values, const mx::array& rows) {
  Arrays both = mx::array::make_arrays(
      {tail_keys.shape(), tail_values.shape()}, {mx::float32, mx::float32},
      std::make_shared<Append>(cpu()), {tail_keys, tail_values, mx::astype(keys, mx::float32), mx::astype(values, mx::float32),
       rows});
  return {both[0], both[1]};
}

using Told = std::vector<std::tuple<int, int, bool>>;

std::vector<Packing> packings(const Told& told) {
  std::vector<Packing> found;
  for (const auto& [bits, group, turned] : told) {
    found.push_back({bits, group, turned});
  }
  return found;
}

template <typename Kind, typename... Rest>
mx::array attend(
    const mx::array& queries, const mx::array& pages, const mx::array& keys,
    const mx::array& values, const mx::array& about, const Arrays& pools, const Told& key_packings,
    const Told& value_packings, float scale, int keep, const std::optional<mx::array>& sinks,
    Rest... rest) {
  check(queries.ndim() == 4 && queries.shape(1) % keys.shape(-3) == 0, "heads do not divide");
  check(queries.shape(3) == keys.shape(-1), "queries and keys differ in size");
  check(
      keys.dtype() == mx::float32 && values.dtype() == mx::float32,
      "keys and values are float32");
  Arrays inputs{mx::astype(queries, mx::float32), pages, keys, values, about};
  if (sinks) {
    check(sinks->ndim() == 1 && sinks->shape(0) == queries.shape(1), "a sink for each head");
    inputs.push_back(plain(*sinks));
  }
  inputs.insert(inputs.end(), pools.begin(), pools.end());
  mx::Shape shape = queries.shape();
  shape.back() = values.shape(-1);
  return mx::array(
      shape, mx::float32,
      std::make_shared<Kind>(
          cpu(), scale, keep, sinks.has_value(), packings(key_packings), packings(value_packings),
          rest...),
      std::move(inputs));
}

mx::array decode_attention(
    const mx::array& queries, const mx::array& pages, const mx::array& tail_keys,
    const mx::array& tail_values, const mx::array& rows, const Arrays& pools, const Told& keys,
    const Told& values, float scale, int keep, const std::optional<mx::array>& sinks) {
  return attend<Decode>(
      queries, pages, tail_keys, tail_values, rows, pools, keys, values, scale, keep, sinks);
}

using Optional = std::vector<std::optional<mx::array>>;

// Add the arrays that there are to `inputs`; return which these are.
std::vector<bool> add_present(const Optional& arrays, Arrays& inputs) {
  std::vector<bool> found;
  for (const auto& array : arrays) {
    found.push_back(array.has_value());
    if (array) {
      inputs.push_back(plain(*array));
    }
  }
  return found;
}

void check_one_each(const mx::array& x) {
  check(x.ndim() == 3 && x.shape(1) == 1 && x.dtype() == mx::float32, "x is [batch, 1, hidden]");
}

// `inputs` and `wanted`: sizes of the linear layers from `first` on.
void check_linears(
    const Arrays& linears, const std::vector<int>& outputs, size_t first,
    std::initializer_list<int> inputs, std::initializer_list<int> wanted) {
  for (size_t i = 0; i < inputs.size(); ++i) {
    const mx::array& linear = linears[first + i];
    const int size = outputs[first + i];
    check(
        linear.ndim() == 3 && linear.shape(2) == kvd::PANEL &&
            linear.shape(1) == inputs.begin()[i] && size == wanted.begin()[i] &&
            size <= linear.shape(0) * kvd::PANEL,
        "a linear layer does not fit the others");
  }
}

// Gate, up and down are the linear layers from `first` on.
void check_mlp(
    const Arrays& linears, const std::vector<int>& outputs, size_t first, int hidden) {
  const int inner = outputs[first];
  check_linears(
      linears, outputs, first, {hidden, hidden, inner}, {inner, inner, hidden});
}

// Add the arrays of `Weights` to `inputs`; return the rest.
Weights add_weights(
    Arrays& inputs, const Arrays& linears, const std::vector<int>& outputs,
    const Optional& biases, const Optional& norms, const std::vector<float>& eps) {
  inputs.insert(inputs.end(), linears.begin(), linears.end());
  Weights weights{outputs, {}, eps, {}};
  weights.biases = add_present(biases, inputs);
  weights.norms = add_present(norms, inputs);
  return weights;
}

// Add the arrays of `LayerSettings::layer` to `inputs`; return the rest.
// shape: q_heads, kv_heads, k_dim and v_dim of the attention.
LayerSettings add_layer(
    Arrays& inputs, const mx::array& x, const std::array<int, 4>& shape,
    const mx::array& offsets, const mx::array& frequencies, bool interleaved,
    float position_scale, const Arrays& linears, const std::vector<int>& outputs,
    const Optional& biases, const Optional& norms, const std::vector<float>& eps) {
  const auto [heads, kv_heads, k_dim, v_dim] = shape;
  using Settings = LayerSettings;
  check_one_each(x);
  const bool whole = linears.size() == Settings::LINEARS;
  const size_t count = whole ? Settings::LINEARS : Settings::ATTENTION_LINEARS;
  const size_t norm_count = whole ? Settings::NORMS : Settings::ATTENTION_NORMS;
  check(
      linears.size() == count && outputs.size() == count && biases.size() == count &&
          norms.size() == norm_count && eps.size() == norm_count && norms[0] &&
          (!whole || norms[3]),
      "a layer has seven linear layers and four norms, its part with attention four and three");
  const int out = heads * v_dim, hidden = x.shape(2);
  check_linears(
      linears, outputs, 0, {hidden, hidden, hidden, out},
      {heads * k_dim, kv_heads * k_dim, kv_heads * v_dim, hidden});
  if (whole) {
    check_mlp(linears, outputs, Settings::ATTENTION_LINEARS, hidden);
  }
  check(frequencies.ndim() == 1 && 2 * frequencies.shape(0) <= k_dim, "too many pairs");
  check(
      offsets.dtype() == mx::int32 && offsets.ndim() == 1 &&
          (offsets.shape(0) == 1 || offsets.shape(0) == x.shape(0)),
      "offsets are one int32, or one for each row");
  check(heads % kv_heads == 0, "heads do not divide");
  inputs.push_back(frequencies);
  Weights weights = add_weights(inputs, linears, outputs, biases, norms, eps);
  return {heads, interleaved, position_scale, std::move(weights)};
}

std::tuple<mx::array, mx::array, mx::array> decode_layer(
    const mx::array& x, const mx::array& pages, const mx::array& tail_keys,
    const mx::array& tail_values, const mx::array& rows, const Arrays& pools, const Told& keys,
    const Told& values, float scale, int keep, const mx::array& offsets,
    const mx::array& frequencies, bool interleaved, float position_scale, int heads,
    const Arrays& linears, const std::vector<int>& outputs, const Optional& biases,
    const Optional& norms, const std::vector<float>& eps) {
  Arrays inputs{x, pages, tail_keys, tail_values, rows};
  inputs.insert(inputs.end(), pools.begin(), pools.end());
  inputs.push_back(offsets);
  LayerSettings settings = add_layer(
      inputs, x, {heads, tail_keys.shape(1), tail_keys.shape(3), tail_values.shape(3)}, offsets,
      frequencies, interleaved, position_scale, linears, outputs, biases, norms, eps);
  Arrays found = mx::array::make_arrays(
      {x.shape(), tail_keys.shape(), tail_values.shape()}, {mx::float32, mx::float32, mx::float32},
      std::make_shared<DecodeLayer>(
          cpu(), scale, keep, packings(keys), packings(values), std::move(settings)),
      inputs);
  return {found[0], found[1], found[2]};
}

std::tuple<mx::array, mx::array, mx::array> layer_inputs(
    const mx::array& x, const mx::array& offsets, const std::array<int, 4>& shape,
    const mx::array& frequencies, bool interleaved, float position_scale, const Arrays& linears,
    const std::vector<int>& outputs, const Optional& biases, const Optional& norms,
    const std::vector<float>& eps) {
  Arrays inputs{x, offsets};
  LayerSettings settings = add_layer(
      inputs, x, shape, offsets, frequencies, interleaved, position_scale, linears, outputs,
      biases, norms, eps);
  const auto [heads, kv_heads, k_dim, v_dim] = shape;
  const int batch = x.shape(0);
  Arrays found = mx::array::make_arrays(
      {{heads, batch, k_dim}, {kv_heads, batch, k_dim}, {kv_heads, batch, v_dim}},
      {mx::float32, mx::float32, mx::float32},
      std::make_shared<LayerInputs>(cpu(), std::move(settings)), inputs);
  return {found[0], found[1], found[2]};
}

mx::array layer_output(
    const mx::array& x, const mx::array& attended, const mx::array& offsets,
    const std::array<int, 4>& shape, const mx::array& frequencies, bool interleaved,
    float position_scale, const Arrays& linears, const std::vector<int>& outputs,
    const Optional& biases, const Optional& norms, const std::vector<float>& eps) {
  check(
      attended.ndim() == 4 && attended.dtype() == mx::float32 && attended.shape(0) == 1 &&
          attended.shape(1) == shape[0] && attended.shape(2) == x.shape(0) &&
          attended.shape(3) == shape[3],
      "attended values are [1, heads, batch, dim]");
  Arrays inputs{x, mx::contiguous(attended)};
  LayerSettings settings = add_layer(
      inputs, x, shape, offsets, frequencies, interleaved, position_scale, linears, outputs,
      biases, norms, eps);
  return mx::array(
      x.shape(), mx::float32, std::make_shared<LayerOutput>(cpu(), std::move(settings)),
      std::move(inputs));
}

mx::array layer_mlp(
    const mx::array& x, const Arrays& linears, const std::vector<int>& outputs,
    const Optional& biases, const Optional& norms, const std::vector<float>& eps) {
  check_one_each(x);
  check(
      linears.size() == 3 && outputs.size() == 3 && biases.size() == 3 && norms.size() == 1 &&
          eps.size() == 1 && norms[0] && norms[0]->ndim() == 1 &&
          norms[0]->shape(0) == x.shape(2),
      "an MLP has three linear layers and a norm of a token's size");
  check_mlp(linears, outputs, 0, x.shape(2));
  Arrays inputs{x};
  Weights weights = add_weights(inputs, linears, outputs, biases, norms, eps);
  return mx::array(
      x.shape(), mx::float32, std::make_shared<LayerMlp>(cpu(), std::move(weights)),
      std::move(inputs));
}

mx::array prefill_attention(
    const mx::array& queries, const mx::array& pages, const mx::array& keys,
    const mx::array& values, const mx::array& lows, const Arrays& pools, const Told& key_packings,
    const Told& value_packings, float scale, int keep, const std::optional<mx::array>& sinks,
    int count, int offset, int start) {
  return attend<Prefill>(
      queries, pages, mx::astype(keys, mx::float32), mx::astype(values, mx::float32), lows, pools,
      key_packings, value_packings, scale, keep, sinks, count, offset, start);
}

}  // namespace

NB_MODULE(kvd_native, m) {
  m.def("multiply", &multiply, "x"_a, "packed"_a, "outputs"_a, "bias"_a.none() = nb::none());
  m.def("look_up", &look_up, "ids"_a, "packed"_a, "rows"_a);
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a.none(), "eps"_a);
  m.def("draw", &draw, "logits"_a, "settings"_a, "keys"_a, "masks"_a.none() = nb::none());
  m.def("quantize", &quantize, "x"_a, "group"_a, "bits"_a);
  m.def("swiglu", &swiglu, "gate"_a, "x"_a);
  m.def("rope", &rope, "x"_a, "offsets"_a, "frequencies"_a, "interleaved"_a, "scale"_a);
  m.def("append", &append, "tail_keys"_a, "tail_values"_a, "keys"_a, "values"_a, "rows"_a);
  m.def(
      "decode_attention", &decode_attention, "queries"_a, "pages"_a, "tail_keys"_a,
      "tail_values"_a, "rows"_a, "pools"_a, "keys"_a, "values"_a, "scale"_a, "keep"_a,
      "sinks"_a.none());
  m.def(
      "decode_layer", &decode_layer, "x"_a, "pages"_a, "tail_keys"_a, "tail_values"_a, "rows"_a,
      "pools"_a, "keys"_a, "values"_a, "scale"_a, "keep"_a, "offsets"_a, "frequencies"_a,
      "interleaved"_a, "position_scale"_a, "heads"_a, "linears"_a, "outputs"_a, "biases"_a,
      "norms"_a, "eps"_a);
  m.def(
      "layer_inputs", &layer_inputs, "x"_a, "offsets"_a, "shape"_a, "frequencies"_a,
      "interleaved"_a, "position_scale"_a, "linears"_a, "outputs"_a, "biases"_a, "norms"_a,
      "eps"_a);
  m.def(
      "layer_output", &layer_output, "x"_a, "attended"_a, "offsets"_a, "shape"_a,
      "frequencies"_a, "interleaved"_a, "position_scale"_a, "linears"_a, "outputs"_a, "biases"_a,
      "norms"_a, "eps"_a);
  m.def(
      "layer_mlp", &layer_mlp, "x"_a, "linears"_a, "outputs"_a, "biases"_a, "norms"_a, "eps"_a);
  m.def(
      "prefill_attention", &prefill_attention, "queries"_a, "pages"_a, "keys"_a, "values"_a,
      "lows"_a, "pools"_a, "key_packings"_a, "value_packings"_a, "scale"_a, "keep"_a,
      "sinks"_a.none(), "count"_a, "offset"_a, "start"_a);
  m.def("threads", [] { return kvd::Pool::shared().threads(); });
  m.def("use_threads", [](int count) { kvd::Pool::shared().resize(count); }, "count"_a);
}
