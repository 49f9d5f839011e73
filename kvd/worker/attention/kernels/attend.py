"""The kernel that attends the chunks of a prefill pass with CUDA's tensor cores.

FlashAttention-2 (arXiv 2307.08691) over several rows at once. A block attends one *tile*: a few
tokens of one chunk, with all query heads that share a KV head. Each warp has at most 16 query
vectors. The block reads keys in *items* of up to 64: first from the dense copies (pages, then a
tail), then from the batch. There, a query sees no key after its own ::

    scores   queries x channels   times   channels x 64 keys
    outputs  queries x 64 keys    times   64 keys  x channels

If there are few tiles and many keys, each tile stands for one *split* of its tokens' keys. For each
query vector it writes sums of values, the maximum and the total, as `kernels.decode` does, whose
second kernel combines them.

Keys and values are loaded while others are multiplied. Sums are float32. Softmax weights are
rounded to the dtype before they are multiplied, as MLX's dense kernels do.

In the registers of a product's result, lane ``4 g + t`` of a warp has two rows: ``g`` (half 0) and
``g + 8`` (half 1). In each row and for each ``n``, it has columns ``8 n + 2 t`` and
``8 n + 2 t + 1``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType

import mlx.core as mx

from kvd.worker.attention.kernels import group_products, warp_products
from kvd.worker.attention.kernels.arguments import Heads
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.shape import LANES
from kvd.worker.attention.kernels.text import Text, literal

COLUMNS = 11
"""Numbers of a tile, see `kernels.arguments.Attend`."""
ENTRY_COLUMN = 9
"""Index of a tile's first entry among these numbers."""
_KEYS = 64
_PIECE_ELEMENTS = 8
"""Elements that are copied at once: 16 bytes."""
_NAMES = {mx.bfloat16: ("BF16", "bf16"), mx.float16: ("F16", "f16")}


@dataclass(frozen=True)
class AttendShape:
    """What the kernel's text depends on."""

    heads: Heads
    warpgroups: bool
    """Whether four warps multiply together, as Hopper's can (`group_products`)."""

    @property
    def products(self) -> ModuleType:
        return group_products if self.warpgroups else warp_products

    @property
    def vectors(self) -> int:
        """Most query vectors of a block."""
        return 16 * self.threads // LANES

    @property
    def threads(self) -> int:
        found: int = self.products.THREADS
        return found

    @property
    def tile_tokens(self) -> int:
        """Most tokens of a tile; 0: there is no kernel for this shape."""
        heads = self.heads
        if heads.dtype not in _NAMES:
            return 0
        fits = all(dim % 16 == 0 and dim <= 128 for dim in (heads.k_dim, heads.v_dim))
        return self.vectors // (heads.q_heads // heads.kv_heads) if fits else 0


def vector_floats(heads: Heads) -> int:
    """Return the floats of a query vector in an entry: sums, maximum (of base-2 logits), total."""
    return heads.v_dim + 2


@lru_cache(256)
def header(shape: AttendShape) -> str:
    """Return the functions that the kernel calls."""
    name, kind = _NAMES[shape.heads.dtype]
    bounds = shape.threads, shape.products.RESIDENT
    # MLX writes the kernel's first line. Redefining `__global__` adds the launch bounds to it.
    return f"""
#ifndef COPY
// Copies 16 bytes, or writes zeros. `COPIES_WAIT` waits for this thread's copies. The `SYNC_BLOCK`
// after it waits for those of all threads.
#define COPY COPY
__device__ inline void COPY(void* to, const void* from, bool real) {{
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
      ::"r"((uint)__cvta_generic_to_shared(to)), "l"(from), "r"(real ? 16 : 0) : "memory");
}}
__device__ inline void COPIES_WAIT() {{ asm volatile("cp.async.wait_all;" ::: "memory"); }}
#define ANY(x) __any_sync(0xffffffffu, x)
__device__ inline uint PAIR_{name}(float low, float high) {{
  uint both;
  asm("cvt.rn.{kind}x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}}
#endif
{shape.products.header(name, kind, shape.heads.v_dim)}
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__{bounds}
"""


def attend_source(language: Language, shape: AttendShape) -> str:
    heads, products, (name, _) = shape.heads, shape.products, _NAMES[shape.heads.dtype]
    text = Text(1)
    text.add(language.prologue)
    text.add(f"""
constexpr int Q_HEADS = {heads.q_heads}, HEADS = {heads.kv_heads}, GROUP = Q_HEADS / HEADS;
constexpr int K_DIM = {heads.k_dim}, V_DIM = {heads.v_dim};
constexpr int PIECE = {_PIECE_ELEMENTS}, COUNT = {_KEYS};
constexpr int VECTOR_FLOATS = {vector_floats(heads)};
constexpr float BY = {literal(shape.heads.scale * math.log2(math.e))}, LEAST = -1e30f;
""")
    text.add(products.MEMORY)
    text.add(_TILE)
    _load_queries(text, shape)
    text.add(_QUERIES)
    text.add(_ITEMS)
    _add_load(text, shape, "keys", shape.heads.k_dim)
    _add_load(text, shape, "values", shape.heads.v_dim)
    text.add("""
float sums[V_DIM / 8][4] = {}, top[2] = {LEAST, LEAST}, total[2] = {};
if (end > 0) load_keys(0);
for (int item = 0; item < end; ++item) {
COPIES_WAIT();
FENCE_COPIES();
SYNC_BLOCK();
float scores[COUNT / 8][4] = {};
""")
    text.add(products.SCORES.replace("KIND", name))
    text.add(_MASK)
    text.add(_SOFTMAX)
    text.add(_WEIGHTS.replace("KIND", name))
    text.add(products.SUMS.replace("KIND", name))
    text.add("}")
    text.add(_WRITE.replace("KIND", name))
    return str(text)


_TILE = f"""
const int* tile = tiles + block.x * {COLUMNS};
const int first = tile[0], result = tile[1], count = tile[2], seen = tile[3], own = tile[4];
const int pages = tile[5], page_tokens = tile[6], tail = tile[7], tail_tokens = tile[8];
const int entry = tile[9], distance = tile[10];
const int head = block.y, g = lane / 4, t = lane % 4;
const int own_count = max(0, seen + count - 1);
const int tail_at = (page_tokens + COUNT - 1) / COUNT;
const int own_at = tail_at + (tail_tokens + COUNT - 1) / COUNT;
const int end = own_at + (own_count + COUNT - 1) / COUNT;
"""
_QUERIES = """
uint query[K_DIM / 16][4];
#pragma unroll
for (int k = 0; k < K_DIM / 16; ++k) {
  LOAD_MATRICES(query[k], PLACE(shared_queries, warp * 16 + lane % 16, k * 2 + lane / 16, K_DIM));
}
SYNC_BLOCK();
"""
_ITEMS = """
// `begin` returns the index of an item's first key in its source, `length` the number of its keys.
const auto begin = [&](int item) {
  if (item < tail_at) return pages + item * COUNT;
  if (item < own_at) return tail + (item - tail_at) * COUNT;
  return own + (item - own_at) * COUNT;
};
const auto length = [&](int item) {
  if (item < tail_at) return min(COUNT, page_tokens - item * COUNT);
  if (item < own_at) return min(COUNT, tail_tokens - (item - tail_at) * COUNT);
  return min(COUNT, own_count - (item - own_at) * COUNT);
};
"""
_MASK = """
const int number = length(item);
if (number < COUNT || item >= own_at) {
#pragma unroll
for (int half = 0; half < 2; ++half) {
const int token = (warp * 16 + half * 8 + g) / GROUP;
const int visible = item < own_at ? number : min(number, seen + token - (item - own_at) * COUNT);
#pragma unroll
for (int n = 0; n < COUNT / 8; ++n) {
if (n * 8 + 2 * t >= visible) scores[n][2 * half] = LEAST;
if (n * 8 + 2 * t + 1 >= visible) scores[n][2 * half + 1] = LEAST;
}
}
}
"""
_SOFTMAX = """
#pragma unroll
for (int half = 0; half < 2; ++half) {
float largest = top[half];
#pragma unroll
for (int n = 0; n < COUNT / 8; ++n) {
largest = max(largest, max(scores[n][2 * half], scores[n][2 * half + 1]));
}
largest = max(largest, SWAP(largest, 1));
largest = max(largest, SWAP(largest, 2));
const float lower = largest == LEAST ? 0.0f : largest * BY;
const float factor = POWER(top[half] * BY - lower);
top[half] = largest;
float sum = 0;
#pragma unroll
for (int n = 0; n < COUNT / 8; ++n) {
#pragma unroll
for (int one = 2 * half; one < 2 * half + 2; ++one) {
scores[n][one] = POWER(scores[n][one] * BY - lower);
sum += scores[n][one];
}
}
total[half] = total[half] * factor + sum;
if (ANY(factor != 1)) {
#pragma unroll
for (int n = 0; n < V_DIM / 8; ++n) {
sums[n][2 * half] *= factor;
sums[n][2 * half + 1] *= factor;
}
}
}
"""
_WEIGHTS = """
uint weights[COUNT / 16][4];
#pragma unroll
for (int k = 0; k < COUNT / 16; ++k) {
#pragma unroll
for (int one = 0; one < 4; ++one) {
const float* two = scores[2 * k + one / 2] + one % 2 * 2;
weights[k][one] = PAIR_KIND(two[0], two[1]);
}
}
"""
_WRITE = """
#pragma unroll
for (int half = 0; half < 2; ++half) {
total[half] += SWAP(total[half], 1);
total[half] += SWAP(total[half], 2);
const int line = warp * 16 + half * 8 + g, token = line / GROUP;
if (token >= count) continue;
if (entry >= 0) {
float* to = parts
    + (size_t(entry + token * distance) * Q_HEADS + head * GROUP + line % GROUP) * VECTOR_FLOATS;
#pragma unroll
for (int n = 0; n < V_DIM / 8; ++n) {
to[n * 8 + 2 * t] = sums[n][2 * half];
to[n * 8 + 2 * t + 1] = sums[n][2 * half + 1];
}
if (t == 0) to[V_DIM] = top[half] * BY;
if (t == 1) to[V_DIM + 1] = total[half];
continue;
}
// As in the kernel that combines splits, so that both round alike.
const float by = total[half] == 0 ? 0.0f : 1 / total[half];
uint* to = reinterpret_cast<uint*>(
    out + ((result + token) * Q_HEADS + head * GROUP + line % GROUP) * V_DIM);
#pragma unroll
for (int n = 0; n < V_DIM / 8; ++n) {
to[n * 4 + t] = PAIR_KIND(sums[n][2 * half] * by, sums[n][2 * half + 1] * by);
}
}
"""


def _load_queries(text: Text, shape: AttendShape) -> None:
    text.add(f"""
for (int one = me; one < {shape.vectors} * K_DIM / PIECE; one += {shape.threads}) {{
  const int line = one / (K_DIM / PIECE), piece = one % (K_DIM / PIECE), token = line / GROUP;
  const bool real = token < count;  // the others are zeros
  const int vector = (first + (real ? token : 0)) * Q_HEADS + head * GROUP + line % GROUP;
  COPY(PLACE(shared_queries, line, piece, K_DIM), queries + vector * K_DIM + piece * PIECE, real);
}}
COPIES_WAIT();
FENCE_COPIES();
SYNC_BLOCK();
""")


def _add_load(text: Text, shape: AttendShape, side: str, dim: int) -> None:
    """Add the function that loads the keys or values of an item.

    A thread copies the same piece of every n-th line, so that it computes few addresses. n is a
    multiple of 8, because `PLACE` of `group_products` depends on the line's number modulo 8.
    """
    pieces, letter = dim // _PIECE_ELEMENTS, side[0]
    lines = min(_KEYS, shape.threads // pieces // 8 * 8)
    steps = -(-_KEYS // lines)
    loads = [] if lines * pieces == shape.threads else [f"{letter}_line < {lines}"]
    loads += [] if lines * steps == _KEYS else [f"line < {_KEYS}"]
    text.add(f"""
const int {letter}_line = me / {pieces}, {letter}_piece = me % {pieces};
const int {letter}_to = PLACE(memory, {letter}_line, {letter}_piece, {dim}) - memory;
const int {letter}_from = {letter}_line * {dim} * HEADS + {letter}_piece * {_PIECE_ELEMENTS};
const auto load_{side} = [&](int item) {{
  uint4* to = shared_{side} + item % {side.upper()}_BUFFERS * {side.upper()}_SIZE + {letter}_to;
  const int number = length(item);
  const T* from = item < own_at ? dense_{side} : {side};
  from += (begin(item) * HEADS + head) * {dim};
#pragma unroll
  for (int step = 0; step < {steps}; ++step) {{
    const int line = {letter}_line + step * {lines};
    const bool real = line < number;
    const int at = real ? {letter}_from + step * {lines * dim} * HEADS : 0;
    if ({" && ".join(loads) or "true"}) COPY(to + step * {lines} * LINE({dim}), from + at, real);
  }}
}};
""")
