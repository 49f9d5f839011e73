"""The decode kernels: split-K flash decoding over pages, written once for Metal and CUDA.

Flash decoding (Dao et al. 2023) with the online softmax of arXiv 1805.02867, on pages whose keys
are quantized per channel (KIVI, arXiv 2402.02750).

A block of threads processes a *split*: some pages of one row, or its tail, for one KV head. Its
warps share the pages. Each warp has a *tile* of up to four query vectors (query heads that share
the KV head, times queries), so each page is loaded once for all of them. A page of 64 tokens takes
three steps:

1. The queries are multiplied with the channels' scales, and then with the packed integers, which
   need not be dequantized (`scores`).
2. Scores become weights, with the running maximum and sum (`scores`).
3. The weights are multiplied with the tokens' scales, and values are summed in registers
   (`values`).

The warps of a block add up their results. A split writes sums, maximum and total into one array
(each array that a kernel creates costs the host 3 µs), and a second kernel combines a row's splits.
The work is proportional to the number of tokens. A row's sums always have the same order, whatever
rows share its batch.
"""

from __future__ import annotations

from dataclasses import replace

from kvd.worker.attention.kernels import matrix
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.paging import advance_page, find_first_page, find_next_page
from kvd.worker.attention.kernels.scores import add_scores, add_softmax, add_tail_scores
from kvd.worker.attention.kernels.shape import LANES, Shape
from kvd.worker.attention.kernels.text import RUN, Text, literal
from kvd.worker.attention.kernels.values import Values
from kvd.worker.cache.scheme import PAGE_TOKENS
from protocol.pages import TAIL_TOKENS

_LOG2_E = 1.4426950408889634
ROW_NUMBERS = 8
"""Numbers of a row (`arguments.Attention.rows`); the last two are the bounds of its splits."""
_LEAST = "-1e30f"
"""Less than any score; finite, so that its difference from itself is 0 instead of NaN."""
_FOLD = 75
"""On CUDA, packed numbers are read as denormal floats (`Language.unit`). Their factors are scaled
by 2 to this power, so that the sums are normal floats."""


def split_source(shape: Shape, language: Language) -> str:
    text = Text(shape.tile)
    _begin(text, shape, language)
    if matrix.fits(shape, language):
        text.add("if (is_tail) {")
        _attend(text, replace(shape, keys=(), values=()), language)
        text.add("} else {")
        matrix.add_pages(text, shape)
        text.add("}")
    else:
        _attend(text, shape, language)
    _end(text, language)
    return str(text)


def _attend(text: Text, shape: Shape, language: Language) -> None:
    """Add the loop over a split's pages, or over blocks of 64 tail tokens."""
    fold = _FOLD if language.unit else 0
    unfold = language.unit - fold
    values = Values(text, shape, fold, unfold)
    text.add(f"""
{text.vector} top;
top@ = LEAST;
""")
    text.zero("total")
    values.declare()
    text.add("""
for (int item = first + part; item < last; item += PARTS) {
const int count = is_tail ? min(PAGE, tail_tokens - item * PAGE) : PAGE;
if (is_tail) start = tail_start + item * PAGE;
""")
    find_next_page(text)
    text.add(f"{text.vector} score0, score1;")
    levels = range(len(shape.keys))
    for level in levels:
        text.add(f"if (level == {level}) {{")
        add_scores(text, shape, level, fold, unfold)
        text.add("}")
    text.add("if (is_tail) {")
    add_tail_scores(text, shape)
    text.add("}")
    add_softmax(text, shape, values.sums)
    for level in levels:
        text.add(f"if (level == {level}) {{")
        values.add_page(level)
        text.add("}")
    text.add("if (is_tail) {")
    values.add_tail()
    text.add("}\nSYNC_WARP();")  # the weights are no longer needed
    advance_page(text)
    text.add("}")
    values.unscale()
    text.add(f"""
total@ = SUM(total@);
if (lane == 0) tops[warp] = top;
SYNC_BLOCK();
{text.vector} most = tops[tile], share;
for (int other = 1; other < PARTS; ++other) {{
most@ = max(most@, tops[other * TILES + tile]@);
}}
share@ = POWER(top@ - most@);
total@ *= share@;
if (lane == 0) totals[warp] = total;
""")
    values.gather()


def _begin(text: Text, shape: Shape, language: Language) -> None:
    """Declare what all parts use, and load the queries into shared memory."""
    tiles, warps = shape.plan(language)
    constants = {
        "PAGE": PAGE_TOKENS,
        "TAIL": TAIL_TOKENS,
        "K_DIM": shape.k_dim,
        "V_DIM": shape.v_dim,
        "ENTRY": entry(shape),
        "HEADS": shape.kv_heads,
        "VECTORS": shape.vectors,
        "KEEP": shape.keep,
        "TILE": shape.tile,
        "TILES": tiles,
        "PARTS": warps // tiles,
        "THREADS": warps * LANES,
        "REGION": shape.region,
        "RUNS": shape.v_dim // RUN,
        "AT_ONCE": LANES // (shape.v_dim // RUN),
    }
    text.add(language.prologue)
    for name, value in constants.items():
        text.add(f"constexpr int {name} = {value};")
    text.add(f"""
constexpr float LEAST = {_LEAST};
SHARED {text.vector} asked[{tiles * shape.k_dim}];  // the queries, scaled
SHARED {text.vector} work[{warps * shape.region}];  // of each warp
SHARED {text.vector} tops[{warps}];
SHARED {text.vector} totals[{warps}];

const int split = block.x, head = block.y;
const int row = splits[split * 4], is_tail = splits[split * 4 + 3];
if (row < 0) return;
const int tile = warp % TILES, part = warp / TILES;
const int first = splits[split * 4 + 1];
int last = splits[split * 4 + 2];
""")
    find_first_page(text)
    text.add(f"""
const int tail = rows[row * 8], tail_tokens = rows[row * 8 + 1], tail_start = rows[row * 8 + 2];
if (is_tail) last = (tail_tokens + PAGE - 1) / PAGE;
const int low = rows[row * 8 + 5], newest = tail_start + tail_tokens - 1;
const int base = warp * REGION, query = tile * K_DIM;
const int asking = (block.z * TILES + tile) * TILE;
const int c = lane / 8, j = lane % 8;
const int token = 8 * j + (lane & 8) / 2 + (lane & 16) / 8;
const int pass = lane / RUNS, run = lane % RUNS;

for (int at = me; at < TILES * K_DIM; at += THREADS) {{
const int one = (block.z * TILES + at / K_DIM) * TILE;
GLOBAL T* from = queries + (size_t(row) * HEADS + head) * (VECTORS * K_DIM) + at % K_DIM;
const float factor = {literal(shape.scale * _LOG2_E)};
{text.vector} q;
q@ = one + # < VECTORS ? float(from[(one + #) * K_DIM]) * factor : 0.0f;
asked[at] = q;
}}
SYNC_BLOCK();
""")


def _end(text: Text, language: Language) -> None:
    text.add(f"""
SYNC_BLOCK();
for (int at = me; at < TILES * V_DIM; at += THREADS) {{
const int which = at / V_DIM, d = at % V_DIM, one = (block.z * TILES + which) * TILE;
{text.vector} output = work[which * REGION + d];
for (int other = 1; other < PARTS; ++other) {{
const {text.vector} more = work[(other * TILES + which) * REGION + d];
output@ += more@;
}}
{language.output} float* to = parts + (size_t(split) * HEADS + head) * (VECTORS * ENTRY) + d;
if (one + # < VECTORS) to[(one + #) * ENTRY] = output@;
}}
if (me < TILES) {{
const int one = (block.z * TILES + me) * TILE;
{text.vector} highest = tops[me], sum = totals[me];
for (int other = 1; other < PARTS; ++other) {{
highest@ = max(highest@, tops[other * TILES + me]@);
sum@ += totals[other * TILES + me]@;
}}
{language.output} float* to = parts + (size_t(split) * HEADS + head) * (VECTORS * ENTRY) + V_DIM;
if (one + # < VECTORS) to[(one + #) * ENTRY] = highest@;
if (one + # < VECTORS) to[(one + #) * ENTRY + 1] = sum@;
}}
""")


def combine_source(shape: Shape, language: Language) -> str:
    text = Text(1)
    _begin_combine(text, shape, language)
    if shape.sinks:
        text.add(f"""
const float sink = float(sinks[place / {shape.queries}]) * {literal(_LOG2_E)};
top = max(top, sink);
""")
    text.add(f"""
float total = {"lane == 0 ? POWER(sink - top) : 0.0f" if shape.sinks else "0"};
float sum = 0;
for (int begin = 0; begin < count; begin += THREADS) {{
  SYNC_BLOCK();
  if (begin + me < count) {{
    const size_t at = (size_t(first + begin + me) * VECTORS + place) * ENTRY;
    shares[me] = POWER(parts[at + V_DIM] - top);
  }}
  SYNC_BLOCK();
  const int here = min(THREADS, count - begin);
  if (me < V_DIM) {{
#pragma unroll 8
    for (int split = 0; split < here; ++split) {{
      const size_t at = (size_t(first + begin + split) * VECTORS + place) * ENTRY;
      sum += parts[at + me] * shares[split];
    }}
  }}
  if (warp == 0) {{
    for (int split = lane; split < here; split += 32) {{
      const size_t at = (size_t(first + begin + split) * VECTORS + place) * ENTRY;
      total += parts[at + V_DIM + 1] * shares[split];
    }}
  }}
}}
if (warp == 0) {{
  total = SUM(total);
  if (lane == 0) total_of[0] = total;
}}
SYNC_BLOCK();
total = total_of[0];
// As in `attend`, so that one split rounds like none.
const float by = total == 0 ? 0.0f : 1 / total;
if (me < V_DIM) to[me] = T(sum * by);
""")
    return str(text)


def _begin_combine(text: Text, shape: Shape, language: Language) -> None:
    text.add(language.prologue)
    text.add(f"""
constexpr int V_DIM = {shape.v_dim}, VECTORS = {shape.kv_heads * shape.vectors};
constexpr int ENTRY = {entry(shape)};
constexpr int THREADS = {combine_threads(shape)};
const int row = block.x / VECTORS, place = block.x % VECTORS;
{language.output} T* to = out + size_t(block.x) * V_DIM;
if (row >= rows_shape[0]) {{
  if (me < V_DIM) to[me] = T(0.0f);
  return;
}}
const int first = rows[row * 8 + 6], count = rows[row * 8 + 7] - first;
SHARED float shares[THREADS];
SHARED float total_of[1];
float top = {_LEAST};
for (int split = lane; split < count; split += 32) {{
  top = max(top, parts[(size_t(first + split) * VECTORS + place) * ENTRY + V_DIM]);
}}
top = LARGEST(top);
""")


def entry(shape: Shape) -> int:
    """Return the floats that a split writes per query vector: sums of values, maximum, total."""
    return shape.v_dim + 2


def combine_threads(shape: Shape) -> int:
    return LANES * -(-shape.v_dim // LANES)
