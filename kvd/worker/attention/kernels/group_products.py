"""Products of the attention of chunks in which four warps multiply together.

``wgmma`` (PTX ISA, "Asynchronous Warpgroup Level Matrix") multiplies 64 x 16 numbers, in registers,
with 16 x N in shared memory. Only Hopper's multiprocessors can do this, and code for them must be
compiled for ``sm_90a``, which MLX does not do: the kernel needs a module that kvd compiles. A block
has two groups of warps, which share keys and values, because reading these is the limit.

In shared memory, a *slab* has 64 lines of 64 numbers; a line takes 128 bytes. Within a line, the
index of each 16-byte piece is XORed with the last three bits of the line's number (the 128-byte
swizzle of ``wgmma``). Slabs begin at multiples of 1024 bytes.
"""

from __future__ import annotations

from kvd.worker.attention.kernels import warp_products

THREADS = 256
RESIDENT = 1
MEMORY = """
constexpr int SLAB = 64 * 8;
constexpr int KEYS_SIZE = (K_DIM + 63) / 64 * SLAB, VALUES_SIZE = (V_DIM + 63) / 64 * SLAB;
constexpr int KEYS_BUFFERS = 2, VALUES_BUFFERS = 1;
SHARED uint4 memory[KEYS_BUFFERS * KEYS_SIZE + VALUES_SIZE] __attribute__((aligned(1024)));
uint4* shared_keys = memory;
uint4* shared_values = shared_keys + KEYS_BUFFERS * KEYS_SIZE;
uint4* shared_queries = shared_keys;
"""
SCORES = """
load_values(item);
COPIES_COMMIT();
if (item + 1 < end) load_keys(item + 1);
COPIES_COMMIT();
const uint4* keys_now = shared_keys + item % KEYS_BUFFERS * KEYS_SIZE;
GROUP_BEGIN(scores);
#pragma unroll
for (int k = 0; k < K_DIM / 16; ++k) {
GROUP_SCORES_KIND(scores, query[k], keys_now + k / 4 * SLAB + k % 4 * 2);
}
GROUP_END(scores);
"""
SUMS = """
COPIES_WAIT_EXCEPT_LAST();
FENCE_COPIES();
SYNC_BLOCK();
KEEP_LEFT(weights);
GROUP_BEGIN(sums);
#pragma unroll
for (int k = 0; k < COUNT / 16; ++k) GROUP_SUMS_KIND(sums, weights[k], shared_values + k * 16 * 8);
GROUP_END(sums);
"""
_COUNT = 64
"""Keys of a product."""


def header(name: str, kind: str, v_dim: int) -> str:
    """Return the functions that the products call; see `warp_products.header`."""
    return f"""
#define LINE(dim) 8
__device__ inline uint4* PLACE(uint4* of, int line, int piece, int dim) {{
  const int slab = line / 64 * ((dim + 63) / 64) + piece / 8;
  return of + (slab * 64 + line % 64) * 8 + (piece % 8 ^ line % 8);
}}
{warp_products.LOADS}
#ifndef GROUP_SCORES_{name}
// Ends a group of `COPY` calls.
__device__ inline void COPIES_COMMIT() {{ asm volatile("cp.async.commit_group;" ::: "memory"); }}
// Waits for this thread's copies, except those of the last group.
__device__ inline void COPIES_WAIT_EXCEPT_LAST() {{
  asm volatile("cp.async.wait_group 1;" ::: "memory");
}}
// Makes copied data visible to `wgmma`, which reads through the async proxy.
__device__ inline void FENCE_COPIES() {{
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}}
// Returns the descriptor of a matrix: its address, two strides, and the 128-byte swizzle. The
// strides are in units of 16 bytes: from slab to slab, and from eight lines to the next eight.
__device__ inline uint64_t matrix_at(const uint4* place) {{
  const uint64_t at = (__cvta_generic_to_shared(place) & 0x3ffff) >> 4;
  return at | (uint64_t)512 << 16 | (uint64_t)64 << 32 | (uint64_t)1 << 62;
}}
template <int N> __device__ inline void keep(float (&sums)[N][4]) {{
#pragma unroll
  for (int n = 0; n < N; ++n) {{
    asm volatile("" : "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
        :: "memory");
  }}
}}
// Keeps the compiler from computing left sides after the fence.
template <int N> __device__ inline void KEEP_LEFT(uint (&left)[N][4]) {{
#pragma unroll
  for (int n = 0; n < N; ++n) {{
    asm volatile("" : "+r"(left[n][0]), "+r"(left[n][1]), "+r"(left[n][2]), "+r"(left[n][3])
        :: "memory");
  }}
}}
template <int N> __device__ inline void GROUP_BEGIN(float (&sums)[N][4]) {{
  keep(sums);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}}
template <int N> __device__ inline void GROUP_END(float (&sums)[N][4]) {{
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  keep(sums);
}}
{_multiply(f"GROUP_SCORES_{name}", kind, _COUNT, transposed=False)}
{_multiply(f"GROUP_SUMS_{name}", kind, v_dim, transposed=True)}
#endif
"""


def _multiply(name: str, kind: str, columns: int, *, transposed: bool) -> str:
    """Return the function that multiplies.

    ``transposed``: whether a line of the right side in shared memory is one of its rows (as for
    values) instead of one of its columns (as for keys).
    """
    count = columns // 2
    sums = ", ".join(f"%{number}" for number in range(count))
    left = ", ".join(f"%{count + one}" for one in range(4))
    operands = ", ".join(f'"+f"(sums[{n // 4}][{n % 4}])' for n in range(count))
    return f"""
__device__ inline void {name}(
    float (&sums)[{columns // 8}][4], const uint (&left)[4], const uint4* right) {{
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind} "
      "{{{sums}}}, {{{left}}}, %{count + 4}, 1, 1, 1, {transposed:d};"
      : {operands}
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "l"(matrix_at(right)));
}}"""
