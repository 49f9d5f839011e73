// Operations on two halves, the tensor cores' products, and the loads for them. They replace the
// kernels' inline PTX, with the layouts of `mma.m16n8k16`, `wgmma` and `ldmatrix` in the PTX ISA.
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
inline float shim_bfloat_of(unsigned word, int place) {
  return float(__ushort_as_bfloat16((unsigned short)(word >> 16 * place)));
}
template <float (*OF)(unsigned, int)>
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
      const float a = OF(all.values[g * 4 + holder].left[high * 2 + lower], place);
      const float b = OF(all.values[column * 4 + holder].right[high], place);
      sums[one] += a * b;
    }
  }
}
#define MULTIPLY shim_multiply<shim_half_of>
#define MULTIPLY_F16 shim_multiply<shim_half_of>
#define MULTIPLY_BF16 shim_multiply<shim_bfloat_of>
inline unsigned PAIR_F16(float low, float high) {
  return __half_as_ushort(__half(low)) | unsigned(__half_as_ushort(__half(high))) << 16;
}
inline unsigned PAIR_BF16(float low, float high) {
  return shim_to_bfloat(low) | unsigned(shim_to_bfloat(high)) << 16;
}

// `ldmatrix.m8n8.x4`: each lane gives the place of a row; transposed, it gets elements of a column.
inline void shim_load_matrices(
    unsigned (&to)[4], const void* row, bool transposed, unsigned line) {
  if (reinterpret_cast<uintptr_t>(row) % 16) shim_fail("a row of a matrix is not aligned");
  const ShimLanes<const unsigned short*> rows(
      "ldmatrix", line, static_cast<const unsigned short*>(row));
  const unsigned g = shim_lane() / 4, t = shim_lane() % 4;
  for (unsigned matrix = 0; matrix < 4; ++matrix) {
    const auto* of = rows.values + matrix * 8;
    to[matrix] = transposed ? of[2 * t][g] | unsigned(of[2 * t + 1][g]) << 16
                        : of[g][2 * t] | unsigned(of[g][2 * t + 1]) << 16;
  }
}
#define COPY COPY
#define LOAD_MATRICES(to, row) shim_load_matrices(to, row, false, __LINE__)
#define LOAD_TRANSPOSED(to, row) shim_load_matrices(to, row, true, __LINE__)

// `cp.async` at once. The place that is read must be valid, also if zeros are written instead.
inline void COPY(void* to, const void* from, bool real) {
  const uint4 found = *static_cast<const uint4*>(from);
  *static_cast<uint4*>(to) = real ? found : uint4{0, 0, 0, 0};
}
inline void COPIES_WAIT() {}

// `wgmma` with two numbers of 16 bits in a register. Bits 7 to 9 of an address are XORed into
// bits 4 to 6, as in the layout with a swizzle of 128 bytes.
template <float (*OF)(unsigned, int)>
float shim_in_slab(const uint4* matrix, unsigned line, unsigned number) {
  auto at = reinterpret_cast<uintptr_t>(matrix) + line * 128 + number / 64 * 8192 + number % 64 * 2;
  at ^= (at >> 7 & 7) << 4;
  return OF(*reinterpret_cast<const unsigned short*>(at), 0);
}
inline void FENCE_COPIES() {}
template <int N>
void KEEP_LEFT(unsigned (&)[N][4]) {}
template <int N>
void GROUP_BEGIN(float (&)[N][4], unsigned line = __builtin_LINE()) {
  shim_wait(SHIM_SIMD_BARRIER, "wgmma", line);
}
template <int N>
void GROUP_END(float (&)[N][4], unsigned line = __builtin_LINE()) {
  shim_wait(SHIM_SIMD_BARRIER, "wgmma", line);
}
template <float (*OF)(unsigned, int), bool TRANSPOSED, int N>
void shim_group_multiply(
    float (&sums)[N][4], const unsigned (&left)[4], const uint4* right,
    unsigned line = __builtin_LINE()) {
  const ShimOperands mine{{left[0], left[1], left[2], left[3]}, {}};
  const ShimLanes<ShimOperands> all("wgmma", line, mine);
  const unsigned g = shim_lane() / 4, t = shim_lane() % 4;
  for (unsigned n = 0; n < N; ++n) {
    for (unsigned one = 0; one < 4; ++one) {
      const unsigned column = n * 8 + 2 * t + one % 2;
      for (unsigned k = 0; k < 16; ++k) {
        const unsigned* held = all.values[g * 4 + k % 8 / 2].left;
        sums[n][one] += OF(held[k / 8 * 2 + one / 2], k % 2) *
            (TRANSPOSED ? shim_in_slab<OF>(right, k, column) : shim_in_slab<OF>(right, column, k));
      }
    }
  }
}
#define GROUP_SCORES_F16 shim_group_multiply<shim_half_of, false>
#define GROUP_SCORES_BF16 shim_group_multiply<shim_bfloat_of, false>
#define GROUP_SUMS_F16 shim_group_multiply<shim_half_of, true>
#define GROUP_SUMS_BF16 shim_group_multiply<shim_bfloat_of, true>
inline void COPIES_COMMIT() {}
inline void COPIES_WAIT_EXCEPT_LAST() {}
inline bool ANY(bool mine, unsigned line = __builtin_LINE()) {
  const ShimLanes<bool> all("__any_sync", line, mine);
  bool found = false;
  for (const bool one : all.values) found |= one;
  return found;
}

// Reads the first byte, so that prefetching an invalid address is reported.
#define PREFETCH(place) ((void)*(const volatile char*)(place))

#define POWER exp2f
