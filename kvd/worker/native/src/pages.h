// Pages of a pool: how codes become floats, 16 at a time.

#pragma once

#include <array>
#include <vector>

#include "simd.h"

namespace kvd {

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

// Of COUNT codes from a byte on: the two bytes that hold each code, as x86 shuffles number them in
// each register of 16 bytes that begins with the same codes.
template <int BITS, int COUNT>
constexpr std::array<int8_t, 4 * COUNT> places() {
  std::array<int8_t, 4 * COUNT> found{};
  for (int i = 0; i < COUNT; ++i) {
    const int first = i * BITS / 8, last = ((i + 1) * BITS - 1) / 8;
    found[4 * i] = static_cast<int8_t>(first);
    found[4 * i + 1] = static_cast<int8_t>(last > first ? last : -1);  // -1: zero
    found[4 * i + 2] = found[4 * i + 3] = -1;
  }
  return found;
}

// Where each code begins in its two bytes.
template <int BITS, int COUNT>
constexpr std::array<int32_t, COUNT> offsets() {
  std::array<int32_t, COUNT> found{};
  for (int i = 0; i < COUNT; ++i) {
    found[i] = i * BITS % 8;
  }
  return found;
}

template <int BITS>
inline F8 codes(const uint8_t* from) {
  if constexpr (BITS == 8) {
    return widen(from);
  } else {
    const uint64_t all = eight<BITS>(from);
#if defined(__AVX2__)
    alignas(32) static constexpr auto bytes = places<BITS, LANES>();
    alignas(32) static constexpr auto first = offsets<BITS, LANES>();
    const __m256i words = _mm256_shuffle_epi8(
        _mm256_set1_epi64x(static_cast<int64_t>(all)),
        *reinterpret_cast<const __m256i*>(bytes.data()));
    const __m256i found = _mm256_and_si256(
        _mm256_srlv_epi32(words, *reinterpret_cast<const __m256i*>(first.data())),
        _mm256_set1_epi32((1 << BITS) - 1));
    return (F8)_mm256_cvtepi32_ps(found);
#else
    const auto low = static_cast<uint32_t>(all), high = static_cast<uint32_t>(all >> (4 * BITS));
    const U8 both = {low, low, low, low, high, high, high, high};
    const U8 shifts = {0, BITS, 2 * BITS, 3 * BITS, 0, BITS, 2 * BITS, 3 * BITS};
    return __builtin_convertvector((I8)((both >> shifts) & ((1u << BITS) - 1)), F8);
#endif
  }
}

// Sixteen codes: 2 * BITS bytes.
template <int BITS>
inline Wide wide_codes(const uint8_t* from) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
  if constexpr (BITS == 8) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return (Wide)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(bytes));
  } else {
    const __m128i bytes =
        _mm_maskz_loadu_epi8(static_cast<__mmask16>((1u << (2 * BITS)) - 1), from);
    alignas(64) static constexpr auto both = places<BITS, WIDE>();
    alignas(64) static constexpr auto first = offsets<BITS, WIDE>();
    const __m512i words = _mm512_shuffle_epi8(
        _mm512_broadcast_i32x4(bytes), _mm512_load_si512(both.data()));
    const __m512i found = _mm512_and_si512(
        _mm512_srlv_epi32(words, _mm512_load_si512(first.data())),
        _mm512_set1_epi32((1 << BITS) - 1));
    return (Wide)_mm512_cvtepi32_ps(found);
  }
#elif defined(__AVX512F__)
  const __m512d low = _mm512_castpd256_pd512((__m256d)codes<BITS>(from));
  return (Wide)_mm512_insertf64x4(low, (__m256d)codes<BITS>(from + BITS), 1);
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

  // All numbers of the page's `count` groups, one after another, as `at` computes them.
  void unpack(int64_t count, float* to) const {
    const uint8_t* from = words;
    for (int64_t group = 0; group < count; ++group) {
      const Wide scale = splat_wide(scales[group]), bias = splat_wide(biases[group]);
      for (int64_t i = 0; i < int64_t{1} << shift; i += WIDE) {
        store(to, wide_codes<BITS>(from) * scale + bias);
        from += 2 * BITS;
        to += WIDE;
      }
    }
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

// Transposes an 8 x 8 block, a register for each row.
inline void transpose_lanes(F8 (&r)[LANES]) {
  F8 s[LANES];
  for (int i = 0; i < LANES; i += 2) {
    s[i] = __builtin_shufflevector(r[i], r[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
    s[i + 1] = __builtin_shufflevector(r[i], r[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
  }
  F8 t[LANES];
  for (int i = 0; i < LANES; i += 4) {
    for (int j = i; j < i + 2; ++j) {
      t[j] = __builtin_shufflevector(s[j], s[j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      t[j + 2] = __builtin_shufflevector(s[j], s[j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  }
  for (int j = 0; j < 4; ++j) {
    r[j] = __builtin_shufflevector(t[j], t[j + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    r[j + 4] = __builtin_shufflevector(t[j], t[j + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

// The same in memory.
inline void transpose_lanes(const float* from, int64_t pitch, float* to, int64_t to_pitch) {
  F8 rows[LANES];
  for (int i = 0; i < LANES; ++i) {
    rows[i] = load(from + i * pitch);
  }
  transpose_lanes(rows);
  for (int i = 0; i < LANES; ++i) {
    store(to + i * to_pitch, rows[i]);
  }
}

// [rows, columns] to [columns, rows]; rows begin every `pitch` and `to_pitch` elements.
inline void transpose(
    const float* from, int64_t rows, int64_t columns, int64_t pitch, float* to, int64_t to_pitch) {
  const int64_t whole_rows = rows / LANES * LANES, whole_columns = columns / LANES * LANES;
  for (int64_t r = 0; r < whole_rows; r += LANES) {
    for (int64_t c = 0; c < whole_columns; c += LANES) {
      transpose_lanes(from + r * pitch + c, pitch, to + c * to_pitch + r, to_pitch);
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) {
      to[c * to_pitch + r] = from[r * pitch + c];
    }
  }
}

}  // namespace kvd
