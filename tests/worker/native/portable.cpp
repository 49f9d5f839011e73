// The native library's loops without MLX, for `test_portable.py`.

#include "attention.h"
#include "products.h"

extern "C" {

// Attention of one chunk after `pages` pages with codes in groups of 64. keys, values: codes,
// [pages, kv_heads, ...]; about: [pages, 3]; scales, biases: of keys, then of values.
void attend(
    int key_bits, int value_bits, int q_heads, int kv_heads, int k_dim, int v_dim, int pages,
    int count, const int32_t* about, const uint8_t* key_codes, const uint8_t* value_codes, const float* const* groups,
    const float* queries, const float* keys, const float* values, const int32_t* lows, int keep,
    float* y) {
  kvd::Held held;
  held.q_heads = q_heads;
  held.kv_heads = kv_heads;
  held.k_dim = k_dim;
  held.v_dim = v_dim;
  held.scale = 0.125f;
  held.keep = keep;
  held.sinks = nullptr;
  held.pages = about;
  held.keys = {{key_bits, 64, k_dim, kvd::BLOCK, false, key_codes, groups[0], groups[1]}};
  held.values = {{value_bits, 64, kvd::BLOCK, v_dim, false, value_codes, groups[2], groups[3]}};
  held.room = count;
  held.dense_keys = {keys, 0, int64_t{count} * k_dim, k_dim};
  held.dense_values = {values, 0, int64_t{count} * v_dim, v_dim};
  const int64_t start = int64_t{pages} * kvd::BLOCK;
  kvd::attend_chunk(
      held, {queries, k_dim, int64_t{count} * k_dim, 1}, {count, pages, start, start, lows}, y);
}

void multiply(
    const float* x, int rows, int inputs, const uint16_t* packed, const float* bias, int outputs,
    float* y) {
  kvd::multiply(x, rows, inputs, {{packed, kvd::Stored::HALF, bias, outputs, y}});
}

void use_threads(int count) {
  kvd::Pool::shared().resize(count);
}
}
