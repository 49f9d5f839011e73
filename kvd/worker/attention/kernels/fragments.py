"""CUDA functions that turn packed numbers and floats into operands of the tensor cores.

MLX packs numbers of 2 to 8 bits one after another, little-endian, so a *run* of eight numbers has
as many bytes as a number has bits. A run of 3, 5 or 6 bits can begin at any byte of a word and end
in the next word.

In a half float from 1024 to 2048, the ten bits of the mantissa are an integer. To convert a number,
it is masked into the mantissa of 1024. The result is 1024 plus the number times a power of two.
"""

from __future__ import annotations

FRAGMENTS = """
#ifndef PREFETCH
#define PREFETCH(place) asm volatile("prefetch.global.L2 [%0];" ::"l"(place))
#endif
#ifndef MULTIPLY
__device__ inline void MULTIPLY(float (&sums)[4], const uint (&left)[4], uint right0, uint right1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}
#endif
// The first 11 bits of two floats as halves, or the rest of them.
__device__ inline uint halves(float a, float b, bool rest) {
  const float x = __uint_as_float(__float_as_uint(a) & 0xffffe000u);
  const float y = __uint_as_float(__float_as_uint(b) & 0xffffe000u);
  const __half2 both = __floats2half2_rn(rest ? a - x : x, rest ? b - y : y);
  return *reinterpret_cast<const uint*>(&both);
}
__device__ inline uint fused(uint x, uint factor, uint more) {
  const __half2 found = __hfma2(*reinterpret_cast<__half2*>(&x),
      *reinterpret_cast<__half2*>(&factor), *reinterpret_cast<__half2*>(&more));
  return *reinterpret_cast<const uint*>(&found);
}
// A run's numbers are taken from two words: its first 32 bits, and for the last four numbers of a
// longer run, its last 32 bits. Returns the first bit of a number in its word.
template <int BITS> __device__ constexpr int bit_of(int number) {
  return number * BITS - (BITS > 4 && number >= 4 ? 8 * BITS - 32 : 0);
}
// Within two bytes, a number must end at bit 10, the length of a half's mantissa, or is shifted.
template <int BITS> __device__ constexpr int shift_of(int number) {
  return bit_of<BITS>(number) % 8 + BITS > 10 ? 6 : 0;
}
// The power of two by which `raised` multiplies a number.
template <int BITS> __device__ constexpr int power_of(int number) {
  return bit_of<BITS>(number) % 8 - shift_of<BITS>(number);
}
// Words that contain a run. `more` is 1 if the run ends in the second one.
template <int BITS> __device__ inline uint2 run_in(const uint* words, int more) {
  if (8 % BITS) return make_uint2(words[0], words[more]);
  if (BITS < 8) return make_uint2(words[0], 0);
  return *reinterpret_cast<const uint2*>(words);
}
// A run's first and last 32 bits, of words in which it begins at bit `start`.
template <int BITS> __device__ inline uint2 ends(uint2 words, int start) {
  const uint first = __funnelshift_r(words.x, words.y, start);
  if (BITS <= 4) return make_uint2(first, 0);
  return make_uint2(first, __funnelshift_rc(words.x, words.y, start + 8 * BITS - 32));
}
// The numbers of two runs side by side, as halves: each times a power of two, plus 1024.
template <int BITS>
__device__ inline void raised(
    uint (&pairs)[8], uint2 words_x, uint2 words_y, int start, uint thousand) {
  const uint2 x = ends<BITS>(words_x, start), y = ends<BITS>(words_y, start);
#pragma unroll
  for (int at = 0; at < 8; ++at) {
    const bool last = BITS > 4 && at >= 4;
    const int byte = bit_of<BITS>(at) / 8;
    const uint both = __byte_perm(last ? x.y : x.x, last ? y.y : y.x, 0x5410 + byte * 0x1111);
    const uint mask = ((1u << BITS) - 1) * 0x10001u << power_of<BITS>(at);
    pairs[at] = (both >> shift_of<BITS>(at) & mask) | thousand;
  }
}
// The numbers of two runs side by side, as halves.
template <int BITS>
__device__ inline void beside(
    uint (&pairs)[8], uint2 words_x, uint2 words_y, int start, uint thousand) {
  raised<BITS>(pairs, words_x, words_y, start, thousand);
#pragma unroll
  for (int at = 0; at < 8; ++at) {
    const uint down = 0x04000400u * power_of<BITS>(at);
    pairs[at] = fused(pairs[at], 0x3c003c00u - down, 0xe400e400u - down);
  }
}
"""
