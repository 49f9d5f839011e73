"""The part of the split kernel that attends to pages with CUDA's tensor cores.

``mma.m16n8k16`` multiplies 16 x 16 half floats with 16 x 8 and sums in float32. Packed numbers are
its left side: small integers are exact as half floats. Its right side has two columns for each of a
tile's four query vectors: a float rounded to half, and the remainder, so that nothing is lost to
rounding. Both sides may be permuted alike along the summed dimension, so a lane reads whole *runs*
of eight packed numbers. Lane ``4 g + t`` reads the runs that begin at token ``8 g`` (keys) or at
channel ``8 g`` (values). ::

    scores   16 tokens x 16 channels   times   16 channels x 8 columns
    outputs  16 channels x 16 tokens   times   16 tokens   x 8 columns

A lane gets scores of eight tokens, and outputs of all its channels, for vector ``t``.
"""

from __future__ import annotations

import mlx.core as mx

from kvd.worker.attention.kernels.fragments import FRAGMENTS
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.paging import (
    advance_page,
    find_next_page,
    prefetch_keys,
    prefetch_values,
)
from kvd.worker.attention.kernels.shape import FLOATS, Shape, Side
from kvd.worker.attention.kernels.text import Text
from kvd.worker.attention.kernels.unpacking import find_run
from kvd.worker.cache.scheme import PAGE_TOKENS

_KEYS_UP = 6
"""Queries are scaled to at most 1, and then by 2 to this power. So small ones lose little precision
as half floats, and products with key scales up to 1000 do not overflow."""
_WEIGHTS_UP = 7
"""Weights, which are at most 1, are scaled by 2 to this power for the same reasons."""
_IN_FLIGHT = 16
"""Registers per lane for runs that are being loaded."""
_TO_WEIGHTS = """
excess[0] += excess[1];
#pragma unroll
for (int i = 0; i < 8; ++i) {
const float* both = scores[i / 2] + i % 2 * 2;
weight[i] = (both[0] + both[1] - excess[0]) * (1.0f / (1 << power_of<BITS>(i)));
}
"""
_STRIDE = FLOATS // 4
"""Floats between the weights of two vectors: more than 64, so that fewer lanes share a memory bank.
"""
_RESIDENT = 512
"""Threads whose registers must fit a multiprocessor, so that they hide each other's latency."""


def header(threads: int) -> str:
    """Return the text before a kernel whose blocks have this many threads."""
    blocks = max(1, _RESIDENT // threads)
    # MLX writes the kernel's first line. Redefining `__global__` adds the launch bounds to it.
    return f"""{FRAGMENTS}
#undef __global__
#define __global__ __attribute__((global)) __launch_bounds__({threads}, {blocks})
"""


def fits(shape: Shape, language: Language) -> bool:
    """Return whether pages of all levels can use the tensor cores."""
    return (
        language.matrix
        and bool(shape.keys)
        and shape.dtype != mx.float32
        and shape.k_dim % 16 == 0
        and shape.v_dim % 64 == 0
        and shape.v_dim <= 128  # sums of outputs take `v_dim / 4` registers
        and all(_fits(keys) and keys.along_tokens for keys, _ in shape.every_level)
        and all(_fits(values) and not values.along_tokens for _, values in shape.every_level)
    )


def _fits(side: Side) -> bool:
    return side.packed and side.group == PAGE_TOKENS


def add_pages(text: Text, shape: Shape) -> None:
    """Add the code for the split's pages. Its results are where those of `decode._attend` are."""
    sets = shape.v_dim // 64
    text.add(f"""
constexpr int SETS = {sets};
const int g = lane / 4, t = lane % 4, own = g / 2;
const bool rest = g % 2;
const float* question = reinterpret_cast<const float*>(asked + query) + own % TILE * K_DIM;
float* weights_of = reinterpret_cast<float*>(work + base);
float raise = 0, q[K_DIM / 4];
#pragma unroll
for (int k = 0; k < K_DIM / 4; ++k) {{
q[k] = reinterpret_cast<const float*>(asked + query)[(k * 4 + t) * TILE + own % TILE];
raise = max(raise, fabsf(q[k]));
}}
raise = max(raise, SWAP(raise, 1));
raise = max(raise, SWAP(raise, 2));
{{  // the power of two that brings the largest to 1
const int exponent = int(__float_as_uint(raise) >> 23) - {_KEYS_UP};
raise = raise == 0 ? 1.0f : __uint_as_float(uint(max(1, min(254, 253 - exponent))) << 23);
}}
SYNC_BLOCK();  // queries are put in other places: the channels of a vector side by side
if (part == 0 && own < TILE && !rest) {{
#pragma unroll
for (int k = 0; k < K_DIM / 4; ++k) {{
reinterpret_cast<float*>(asked + query)[own * K_DIM + k * 4 + t] = q[k] * raise;
}}
}}
SYNC_BLOCK();
const float lower = __shfl_sync(0xffffffffu, 1 / raise, 8 * t);
float top = LEAST, total = 0;
float sums[SETS][4][4] = {{}};
float spread[SETS] = {{}};
// 1024 as two halves. As a literal it would take the place of the masks in their instructions, and
// each mask would be moved into a register first, which was an eighth of the loop's instructions.
const uint thousand = 0x64006400u | uint(tail_start) >> 31;
const int ago = {shape.queries - 1} - (asking + t) % {shape.queries};
for (int item = first + part; item < last; item += PARTS) {{
""")
    find_next_page(text)
    prefetch_values(text, shape, "level", "page")
    text.add("""
float weight[8], bias = 0;
""")
    for level, side in enumerate(shape.keys):
        text.add(f"if (level == {level}) {{")
        _scores(text, shape, level, side)
        text.add("}")
    prefetch_keys(text, shape, "next_level", "next_page")
    _softmax(text)
    for level, side in enumerate(shape.values):
        text.add(f"if (level == {level}) {{")
        _values(text, sets, level, side)
        text.add("}")
    text.add("SYNC_WARP();")
    advance_page(text)
    text.add("}")
    _finish(text)


def _scores(text: Text, shape: Shape, level: int, side: Side) -> None:
    steps = shape.k_dim // 16
    batch = max(n for n in range(1, _in_flight(side) + 1) if steps % n == 0)
    text.add(f"""
constexpr int BITS = {side.bits}, STEPS = {steps}, BATCH = {batch}, LINE = 2 * BITS;
{find_run("g", side.bits)}
const uint* words = reinterpret_cast<const uint*>(keys{level})
    + (page * K_DIM + t * 4) * LINE + place;
const uint2* scales = reinterpret_cast<const uint2*>(key_scales{level} + page * K_DIM) + t;
const uint2* biases = reinterpret_cast<const uint2*>(key_biases{level} + page * K_DIM) + t;
const uint thousands[4] = {{thousand, thousand, thousand, thousand}};
float scores[4][4] = {{}}, excess[4] = {{}};
""")
    _begin_batches(text, "uint2", "", _READ_KEYS)
    text.add("""
const float4 q = *reinterpret_cast<const float4*>(question + (begin + at) * 16 + t * 4);
const uint2 s = scales_now[at], b = biases_now[at];
bias += q.x * LOW(b.x) + q.y * HIGH(b.x) + q.z * LOW(b.y) + q.w * HIGH(b.y);
const uint right0 = halves(q.x * LOW(s.x), q.y * HIGH(s.x), rest);
const uint right1 = halves(q.z * LOW(s.y), q.w * HIGH(s.y), rest);
uint pairs0[8], pairs1[8];
raised<BITS>(pairs0, now[at * 4], now[at * 4 + 1], start_bit, thousand);
raised<BITS>(pairs1, now[at * 4 + 2], now[at * 4 + 3], start_bit, thousand);
MULTIPLY(excess, thousands, right0, right1);
#pragma unroll
for (int m = 0; m < 4; ++m) {
const uint left[4] = {pairs0[2 * m], pairs0[2 * m + 1], pairs1[2 * m], pairs1[2 * m + 1]};
MULTIPLY(scores[m], left, right0, right1);
}
}
}
""")
    text.add(_TO_WEIGHTS)


_READ_KEYS = """
#pragma unroll
for (int i = 0; i < 4; ++i) ahead[at * 4 + i] = run_in<BITS>(words + (at * 16 + i) * LINE, more);
"""
_READ_VALUES = """
#pragma unroll
for (int set = 0; set < SETS; ++set) {
#pragma unroll
for (int i = 0; i < 4; ++i) {
ahead[(at * SETS + set) * 4 + i] = run_in<BITS>(words + ((at * 16 + i) * SETS + set) * LINE, more);
}
}
"""


def _begin_batches(text: Text, wide: str, sets: str, read_runs: str) -> None:
    """Begin loops over batches of steps and their steps, in which the next batch is being loaded.

    ``wide``: type of a step's scales. ``sets``: factor of the runs of a step, or empty.
    """
    read = f"""
#pragma unroll
for (int at = 0; at < BATCH; ++at) {{{read_runs}scales_ahead[at] = scales[at * 4];
biases_ahead[at] = biases[at * 4];
}}
"""
    text.add(f"""
uint2 ahead[BATCH * {sets}4];
{wide} scales_ahead[BATCH], biases_ahead[BATCH];
{read}
#pragma unroll
for (int begin = 0; begin < STEPS; begin += BATCH) {{
uint2 now[BATCH * {sets}4];
{wide} scales_now[BATCH], biases_now[BATCH];
#pragma unroll
for (int at = 0; at < BATCH * {sets}4; ++at) now[at] = ahead[at];
#pragma unroll
for (int at = 0; at < BATCH; ++at) {{
scales_now[at] = scales_ahead[at];
biases_now[at] = biases_ahead[at];
}}
if (begin + BATCH < STEPS) {{
words += BATCH * 16 * {sets}LINE;
scales += BATCH * 4;
biases += BATCH * 4;
{read}
}}
#pragma unroll
for (int at = 0; at < BATCH; ++at) {{
""")


def _in_flight(side: Side) -> int:
    """Return how many times four runs a lane loads at once."""
    return _IN_FLIGHT // (4 if side.bits in (2, 4) else 8)


def _softmax(text: Text) -> None:
    """Add the code that turns scores into weights.

    Pages precede all queries, so only a window hides some of their tokens.
    """
    text.add(
        """
bias += SWAP(bias, 1);
bias += SWAP(bias, 2);
bias = __shfl_sync(0xffffffffu, bias, 8 * t);
float peak = top;
#pragma unroll
for (int i = 0; i < 8; ++i) weight[i] = (weight[i] + bias) * lower;
if (start < low) {
#pragma unroll
for (int i = 0; i < 8; ++i) {
const int position = start + 8 * g + i;
if (position < low - ago && position >= KEEP) weight[i] = LEAST;
}
}
#pragma unroll
for (int i = 0; i < 8; ++i) peak = max(peak, weight[i]);
peak = max(peak, SWAP(peak, 4));
peak = max(peak, SWAP(peak, 8));
peak = max(peak, SWAP(peak, 16));
const float fade = POWER(top - peak);
top = peak;
total *= fade;
#pragma unroll
for (int i = 0; i < 8; ++i) {
weight[i] = weight[i] == LEAST ? 0.0f : POWER(weight[i] - peak);
total += weight[i];
weights_of[t * """
        + str(_STRIDE)
        + """ + 8 * g + i] = weight[i];
}
const float fade_own = __shfl_sync(0xffffffffu, fade, own);
#pragma unroll
for (int set = 0; set < SETS; ++set) {
spread[set] *= fade_own;
#pragma unroll
for (int m = 0; m < 4; ++m) {
#pragma unroll
for (int one = 0; one < 4; ++one) sums[set][m][one] *= fade;
}
}
SYNC_WARP();
"""
    )


def _values(text: Text, sets: int, level: int, side: Side) -> None:
    batch = max(1, _in_flight(side) // sets)
    wide = f"uint{2 * sets}"
    text.add(f"""
constexpr int BITS = {side.bits}, STEPS = 4, BATCH = {batch}, LINE = 2 * BITS;
{find_run("g", side.bits)}
const uint* words = reinterpret_cast<const uint*>(values{level})
    + (page * PAGE + t * 4) * (SETS * LINE) + place;
const size_t line = page * (PAGE * SETS);
const {wide}* scales = reinterpret_cast<const {wide}*>(value_scales{level} + line) + t;
const {wide}* biases = reinterpret_cast<const {wide}*>(value_biases{level} + line) + t;
""")
    _begin_batches(text, wide, "SETS * ", _READ_VALUES)
    text.add(f"""
const float4 w = *reinterpret_cast<const float4*>(
    weights_of + own * {_STRIDE} + (begin + at) * 16 + t * 4);
""")
    for number in range(sets):
        _multiply_set(text, sets, number)
    text.add("}\n}")


def _multiply_set(text: Text, sets: int, number: int) -> None:
    """Add the products for set ``number``; a *set* is 64 channels."""
    parts = ["x", "y", "z", "w"][: 2 * sets]
    # A 32-bit word has the scales of two sets for one token, or of the only set for two tokens.
    if sets == 2:
        half = ("LOW", "HIGH")[number]
        words = [f"{half}({{}}.{part})" for part in parts]
    else:
        words = [f"{half}({{}}.{part})" for part in parts for half in ("LOW", "HIGH")]
    scale, bias = (
        [word.format(f"{name}_now[at]") for word in words] for name in ("scales", "biases")
    )
    text.add(f"""
{{
constexpr int set = {number};
spread[set] += w.x * {bias[0]} + w.y * {bias[1]} + w.z * {bias[2]} + w.w * {bias[3]};
const float up = {2**_WEIGHTS_UP}.0f;
const uint right0 = halves(w.x * {scale[0]} * up, w.y * {scale[1]} * up, rest);
const uint right1 = halves(w.z * {scale[2]} * up, w.w * {scale[3]} * up, rest);
const uint2* mine = now + (at * SETS + set) * 4;
uint pairs0[8], pairs1[8];
beside<BITS>(pairs0, mine[0], mine[1], start_bit, thousand);
beside<BITS>(pairs1, mine[2], mine[3], start_bit, thousand);
#pragma unroll
for (int m = 0; m < 4; ++m) {{
const uint left[4] = {{pairs0[2 * m], pairs0[2 * m + 1], pairs1[2 * m], pairs1[2 * m + 1]}};
MULTIPLY(sums[set][m], left, right0, right1);
}}
}}
""")


def _finish(text: Text) -> None:
    text.add(f"""
float* highest = reinterpret_cast<float*>(tops);
total += SWAP(total, 4);
total += SWAP(total, 8);
total += SWAP(total, 16);
if (lane < TILE) highest[warp * TILE + lane] = top;
SYNC_BLOCK();
if (t < TILE) {{
float most = LEAST;
for (int other = 0; other < PARTS; ++other) {{
most = max(most, highest[(other * TILES + tile) * TILE + t]);
}}
top = POWER(top - most);  // the warp's share
}}
if (lane < TILE) reinterpret_cast<float*>(totals)[warp * TILE + lane] = total * top;
#pragma unroll
for (int set = 0; set < SETS; ++set) {{
spread[set] += SWAP(spread[set], 1);
spread[set] += SWAP(spread[set], 2);
const float more = __shfl_sync(0xffffffffu, spread[set], 8 * t);
#pragma unroll
for (int i = 0; i < 8; ++i) {{
const float* both = sums[set][i / 2] + i % 2 * 2;
const float output = (both[0] + both[1]) * {2.0**-_WEIGHTS_UP}f + more;
if (t < TILE) weights_of[(set * 64 + 8 * g + i) * TILE + t] = output * top;
}}
}}
""")
