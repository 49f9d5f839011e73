// The most multiplications a second that one core fuses with an addition: independent sums in
// registers, and nothing else.

typedef float Vector __attribute__((vector_size(BYTES)));

// Returns the number of multiplications. `sink` keeps the compiler from leaving them out.
double multiply(long rounds, float* sink) {
  enum { SUMS = BYTES == 64 ? 24 : 12, LANES = BYTES / sizeof(float) };
  Vector sums[SUMS], factor, one;
  for (int lane = 0; lane < LANES; ++lane) {
    factor[lane] = sink[0];
    one[lane] = sink[1];
  }
  for (int i = 0; i < SUMS; ++i) {
    sums[i] = one * (float)i;
  }
  for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
    for (int i = 0; i < SUMS; ++i) {
      sums[i] = sums[i] * factor + one;
    }
  }
  for (int i = 0; i < SUMS; ++i) {
    sink[2] += sums[i][i % LANES];
  }
  return (double)rounds * SUMS * LANES;
}
