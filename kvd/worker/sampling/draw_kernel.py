"""The kernel that draws the tokens of a step, on Metal and CUDA.

It replaces some thirty operations: the mask of a grammar, the check of the logits, filters, random
numbers, and the maximum. Launching these takes the host of an H200 half a millisecond, a quarter of
a step of a small model. Nothing is sorted: thresholds of top-k and top-p are found by bisection
over the bits of a distance, and each step of it counts or adds the tokens within that distance.

Tokens are those of MLX's operations (`kvd.worker.sampling.draws`), random numbers included:
Threefry-2x32 with 20 rounds (Salmon et al. 2011) over token ids, and the Gumbel maximum.
Scores and sums may differ by rounding, so a tie may go to the other token.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx

from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.launch import Launch, kernel_name
from kvd.worker.attention.kernels.text import Text

THREADS = 512
"""Threads of the block that draws one row."""
_WARPS = THREADS // 32
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
"""Constants of Threefry-2x32."""
_LOG2_E = "1.4426950408889634f"
_LOGARITHM = {"metal": "metal::precise::log", "cuda": "logf"}


def draw_launch(
    language: Language, logits: mx.array, masks: mx.array | None, settings: mx.array, keys: mx.array
) -> Launch:
    """Return the launch that draws a token of each row.

    ``logits``: ``[rows, vocabulary]``. ``masks``: a bit for each token that may be drawn,
    ``[rows, words]`` uint32, the lowest bit first; None: all tokens. ``settings``:
    ``[rows, 4]`` float32, see `kvd.worker.sampling.draws.BatchSampling.direct`.
    ``keys``: ``[rows, 2]`` uint32, the random keys.

    The outputs are the tokens and whether each row's logits are valid
    (`kvd.worker.sampling.valid_logits`), both ``[rows]`` int32. A row without any allowed token has
    token 0.
    """
    rows = logits.shape[0]
    text = draw_source(language, masked=masks is not None)
    arrays = {"logits": logits, "settings": settings, "keys": keys}
    if masks is not None:
        arrays["masks"] = masks
    return Launch(
        name=kernel_name("draw", text),
        input_names=tuple(arrays),
        output_names=("tokens", "valid"),
        source=text,
        header=language.header + _MACROS,
        inputs=list(arrays.values()),
        output_shapes=[(rows,), (rows,)],
        output_dtypes=[mx.int32, mx.int32],
        grid=(rows * THREADS, 1, 1),
        threadgroup=(THREADS, 1, 1),
        template=(("T", logits.dtype),),
    )


@lru_cache(4)
def draw_source(language: Language, *, masked: bool) -> str:
    """Return the text of the kernel; ``masked``: whether it has the input ``masks``."""
    text = Text(1)
    text.add(language.prologue)
    if masked:
        text.add("GLOBAL uint* mask = (GLOBAL uint*)masks + block.x * masks_shape[1];")
    allowed = "(mask[at >> 5] >> (at & 31) & 1)" if masked else "true"
    log = _LOGARITHM[language.name]
    numbers = _NUMBERS.replace("THREEFRY", _threefry()).replace("LOGARITHM", log)
    for part in (_EXTREMES, _LARGEST, _NUCLEUS, _SCORES.replace("NUMBERS", numbers), _BEST):
        text.add(part.replace("ALLOWED", allowed))
    return str(text)


_MACROS = f"""
#define BLOCK_SUM(x) \\
  x = SUM(x); \\
  if (lane == 0) sums[warp] = x; \\
  SYNC_BLOCK(); \\
  x = 0; \\
  for (int other = 0; other < {_WARPS}; other++) x += sums[other]; \\
  SYNC_BLOCK();
#define BETTER(score, token) \\
  if (score > best_score || (score == best_score && token < best_token)) {{ \\
    best_score = score; \\
    best_token = token; \\
  }}
"""
_EXTREMES = f"""
const int width = logits_shape[1];
GLOBAL T* row = logits + block.x * width;
const float inverse = settings[4 * block.x], least = settings[4 * block.x + 1];
const float top_p = settings[4 * block.x + 2], top_k = settings[4 * block.x + 3];
const float infinite = BITS(0x7f800000u);
SHARED float lows[{_WARPS}];
SHARED float highs[{_WARPS}];
SHARED float peaks[{_WARPS}];
SHARED float sums[{_WARPS}];
SHARED int places[{_WARPS}];
float low = infinite, high = -infinite, peak = -infinite;
for (int at = me; at < width; at += {THREADS}) {{
  const float x = float(row[at]);
  low = x < low ? x : low;
  high = x > high || x != x ? (x != x ? infinite : x) : high;
  peak = ALLOWED && x > peak ? x : peak;
}}
low = -LARGEST(-low);
high = LARGEST(high);
peak = LARGEST(peak);
if (lane == 0) {{
  lows[warp] = low;
  highs[warp] = high;
  peaks[warp] = peak;
}}
SYNC_BLOCK();
for (int at = 0; at < {_WARPS}; at++) {{
  low = lows[at] < low ? lows[at] : low;
  high = highs[at] > high ? highs[at] : high;
  peak = peaks[at] > peak ? peaks[at] : peak;
}}
SYNC_BLOCK();
if (me == 0) valid[block.x] = int(high < infinite && high > -infinite && low < high);
"""
"""All threads find the lowest and the highest logit, and the highest that is allowed. NaN counts as
infinite."""
_LARGEST = f"""
float last = infinite;
int last_place = width;
float finite = 0;
if (inverse != 0 && top_k > 0) {{
  for (int at = me; at < width; at += {THREADS}) {{
    if (ALLOWED && peak - float(row[at]) < infinite) finite += 1;
  }}
  BLOCK_SUM(finite)
}}
if (finite > top_k) {{
  uint from = 0, to = 0x7f7fffffu;
  while (from < to) {{
    const uint middle = (from + to) / 2;
    const float limit = BITS(middle);
    float within = 0;
    for (int at = me; at < width; at += {THREADS}) {{
      if (ALLOWED && peak - float(row[at]) <= limit) within += 1;
    }}
    BLOCK_SUM(within)
    if (within >= top_k) to = middle;
    else from = middle + 1;
  }}
  last = BITS(from);
  float nearer = 0, equal = 0;
  for (int at = me; at < width; at += {THREADS}) {{
    if (ALLOWED && peak - float(row[at]) < last) nearer += 1;
    if (ALLOWED && peak - float(row[at]) == last) equal += 1;
  }}
  BLOCK_SUM(nearer)
  BLOCK_SUM(equal)
  if (nearer + equal > top_k) {{
    int first = 0;
    while (first < last_place) {{
      const int middle = (first + last_place) / 2;
      float within = 0;
      for (int at = me; at <= middle; at += {THREADS}) {{
        if (ALLOWED && peak - float(row[at]) == last) within += 1;
      }}
      BLOCK_SUM(within)
      if (nearer + within >= top_k) last_place = middle;
      else first = middle + 1;
    }}
  }}
}}
"""
"""The distance from the peak of the last of the ``top_k`` largest logits; of those with that
distance, the ones up to ``last_place`` count. If there are fewer, all count."""
_NUCLEUS = f"""
float widest = infinite;
if (inverse != 0 && top_p < 1) {{
  float total = 0;
  for (int at = me; at < width; at += {THREADS}) {{
    if (ALLOWED) total += POWER({_LOG2_E} * (float(row[at]) - peak));
  }}
  BLOCK_SUM(total)
  uint from = 0, to = 0x7f7fffffu;
  while (from < to) {{
    const uint middle = from + (to - from + 1) / 2;
    const float limit = BITS(middle);
    float mass = 0;
    for (int at = me; at < width; at += {THREADS}) {{
      if (ALLOWED && peak - float(row[at]) < limit) {{
        mass += POWER({_LOG2_E} * (float(row[at]) - peak));
      }}
    }}
    BLOCK_SUM(mass)
    if (mass < top_p * total) from = middle;
    else to = middle - 1;
  }}
  widest = BITS(from);
}}
"""
"""The largest distance from the peak at which the nearer tokens' probabilities are below top-p."""
_SCORES = f"""
float best_score = -infinite;
int best_token = width;
if (inverse == 0) {{
  for (int at = me; at < width; at += {THREADS}) {{
    if (ALLOWED && float(row[at]) == peak) {{
      BETTER(peak, at)
      break;
    }}
  }}
}} else {{
  const int pairs = (width + 1) / 2;
  const uint key0 = keys[2 * block.x], key1 = keys[2 * block.x + 1];
  for (int first = me; first < pairs; first += {THREADS}) {{
    float wanted[2];
    for (int n = 0; n < 2; n++) {{
      const int at = first + n * pairs;
      wanted[n] = -infinite;
      if (at < width && ALLOWED) {{
        const float away = peak - float(row[at]);
        const bool kept = away < last || (away == last && at <= last_place);
        if (kept && away <= widest && -away >= least) wanted[n] = -away * inverse;
      }}
    }}
    if (wanted[0] == -infinite && wanted[1] == -infinite) continue;
NUMBERS
  }}
}}
"""
"""Each thread finds the best of its tokens. The random words of a pair are those of the tokens
``first`` and ``first + pairs``."""
_NUMBERS = """
    uint word0 = uint(first) + key0;
    uint word1 = (first + pairs < width ? uint(first + pairs) : 0u) + key1;
THREEFRY
    for (int n = 0; n < 2; n++) {
      if (wanted[n] == -infinite) continue;
      const float number = float(n == 0 ? word0 : word1) * 0x1p-32f, most = 0x1.fffffep-1f;
      const float score = wanted[n] - LOGARITHM(-LOGARITHM(number < most ? number : most));
      BETTER(score, first + n * pairs)
    }
"""
_BEST = f"""
for (int bit = 16; bit; bit /= 2) {{
  const float score = SWAP(best_score, bit);
  const int token = SWAP(best_token, bit);
  BETTER(score, token)
}}
if (lane == 0) {{
  peaks[warp] = best_score;
  places[warp] = best_token;
}}
SYNC_BLOCK();
if (me == 0) {{
  for (int at = 1; at < {_WARPS}; at++) {{
    BETTER(peaks[at], places[at])
  }}
  tokens[block.x] = best_token < width ? best_token : 0;
}}
"""


def _threefry() -> str:
    """Return the lines that turn the counter ``word0``, ``word1`` into random words."""
    lines = [f"    const uint key2 = key0 ^ key1 ^ {_PARITY:#x}u;"]
    for group in range(5):
        for by in _ROTATIONS[group % 2]:
            lines.append("    word0 += word1;")
            lines.append(f"    word1 = (word1 << {by} | word1 >> {32 - by}) ^ word0;")
        added = f"word0 += key{(group + 1) % 3}, word1 += key{(group + 2) % 3} + {group + 1}u;"
        lines.append(f"    {added}")
    return "\n".join(lines)
