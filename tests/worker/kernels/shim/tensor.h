// Operations on two halves, and the tensor cores' product of 16 x 16 and 16 x 8 halves. They
// replace the kernels' inline PTX, with the layout of `mma.m16n8k16` in the PTX ISA.
#pragma once

struct __half2 {
  __half x, y;
};
inline __half2 __floats2half2_rn(float a, float b) { return {__half(a), __half(b)}; }
inline float2 __half22float2(__half2 both) { return {float(both.x), float(both.y)}; }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
  return {__half(fmaf(a.x, b.x, c.x)), __half(fmaf(a.y, b.y, c.y))};
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned pick) {
  const uint64_t both = uint64_t(y) << 32 | x;
  unsigned found = 0;
  for (int at = 0; at < 4; ++at) {
    found |= unsigned(both >> (pick >> (4 * at) & 7) * 8 & 0xff) << (8 * at);
  }
  return found;
}

struct ShimOperands {
  unsigned left[4], right[2];
};
inline float shim_half_of(unsigned word, int place) {
  return float(__ushort_as_half((unsigned short)(word >> 16 * place)));
}
inline void shim_multiply(
    float (&sums)[4], const unsigned (&left)[4], unsigned right0, unsigned right1,
    unsigned line = __builtin_LINE()) {
  const ShimOperands mine{{left[0], left[1], left[2], left[3]}, {right0, right1}};
  const ShimLanes<ShimOperands> all("mma", line, mine);
  const unsigned g = shim_lane() / 4, t = shim_lane() % 4;
  for (unsigned one = 0; one < 4; ++one) {
    const unsigned column = 2 * t + one % 2, lower = one / 2;  // row g, or g + 8
    for (unsigned k = 0; k < 16; ++k) {
      const unsigned high = k / 8, holder = k % 8 / 2, place = k % 2;
      const float a = shim_half_of(all.values[g * 4 + holder].left[high * 2 + lower], place);
      const float b = shim_half_of(all.values[column * 4 + holder].right[high], place);
      sums[one] += a * b;
    }
  }
}
#define MULTIPLY shim_multiply

// Reads the first byte, so that prefetching an invalid address is reported.
#define PREFETCH(place) ((void)*(const volatile char*)(place))

#define POWER exp2f
