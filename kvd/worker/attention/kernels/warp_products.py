"""Matrix products of attention with ``mma``: each warp multiplies its own 16 query vectors.

``mma.m16n8k16`` multiplies 16 x 16 with 16 x 8 numbers, all in registers. Any device from sm_80 on
can do this.
"""

from __future__ import annotations

THREADS = 128
RESIDENT = 3
"""Blocks that must fit on one multiprocessor (launch bounds); they hide each other's latency."""
MEMORY = """
constexpr int KEYS_BUFFERS = 1, VALUES_BUFFERS = 1, KEYS_SIZE = 0, VALUES_SIZE = 0;
SHARED uint4 memory[COUNT * (K_DIM + V_DIM + 2 * PIECE) / PIECE];
uint4* shared_keys = memory;
uint4* shared_values = shared_keys + COUNT * (K_DIM + PIECE) / PIECE;
uint4* shared_queries = shared_keys;
"""
SCORES = """
load_values(item);
#pragma unroll
for (int k = 0; k < K_DIM / 16; ++k) {
#pragma unroll
for (int n = 0; n < COUNT / 16; ++n) {
uint right[4];
const int line = n * 16 + lane / 16 * 8 + lane % 8;
LOAD_MATRICES(right, PLACE(shared_keys, line, k * 2 + lane / 8 % 2, K_DIM));
MULTIPLY_KIND(scores[2 * n], query[k], right[0], right[1]);
MULTIPLY_KIND(scores[2 * n + 1], query[k], right[2], right[3]);
}
}
COPIES_WAIT();
SYNC_BLOCK();
if (item + 1 < end) load_keys(item + 1);
"""
SUMS = """
#pragma unroll
for (int k = 0; k < COUNT / 16; ++k) {
#pragma unroll
for (int n = 0; n < V_DIM / 16; ++n) {
uint right[4];
LOAD_TRANSPOSED(right, PLACE(shared_values, k * 16 + lane % 16, n * 2 + lane / 16, V_DIM));
MULTIPLY_KIND(sums[2 * n], weights[k], right[0], right[1]);
MULTIPLY_KIND(sums[2 * n + 1], weights[k], right[2], right[3]);
}
}
"""

LOADS = """
#ifndef LOAD_MATRICES
#define LOAD_MATRICES LOAD_MATRICES
// Loads four 8 x 8 matrices of 16-bit numbers. Lane 8 m + r passes the address of row r of matrix
// m. Lane 4 g + t gets numbers 2 t and 2 t + 1 of row g; with LOAD_TRANSPOSED, of column g.
__device__ inline void LOAD_MATRICES(uint (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
      : "r"((uint)__cvta_generic_to_shared(row)));
}
__device__ inline void LOAD_TRANSPOSED(uint (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
      : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
      : "r"((uint)__cvta_generic_to_shared(row)));
}
#endif
"""


def header(name: str, kind: str, _v_dim: int) -> str:
    """Return the functions that the products call.

    ``name``, ``kind``: of the dtype, in the names of functions and of instructions.
    """
    return f"""
// Where a piece of 8 numbers is in shared memory. A line has one piece more than it needs, so that
// eight lines are in different banks.
#define LINE(dim) (dim / 8 + 1)
__device__ inline uint4* PLACE(uint4* of, int line, int piece, int dim) {{
  return of + line * LINE(dim) + piece;
}}
#define FENCE_COPIES()
{LOADS}
#ifndef MULTIPLY_{name}
__device__ inline void MULTIPLY_{name}(
    float (&sums)[4], const uint (&left)[4], uint right0, uint right1) {{
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 "
      "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right0), "r"(right1));
}}
#endif
"""
