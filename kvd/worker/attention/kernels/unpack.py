"""The kernel that makes dense copies of the keys and values before a pass's chunks.

It writes them into arrays that all layers of a pass share. With arrays for each layer, a pass over
a long row would hold a copy of the row for each layer. MLX does not know that the kernel writes
these inputs, so dependencies fix the order. Readers take the kernel's one output as an input. The
kernel takes ``after``, which depends on the previous reader.

A block processes one head of a page; a thread reads eight packed numbers at a time. Other blocks
copy tokens, named by places as in `kvd.worker.attention.kernels.pack`.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.worker.attention.kernels.append import PIECE, THREADS
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.pack import NAMES, vector
from kvd.worker.attention.kernels.shape import Side
from kvd.worker.attention.kernels.text import RUN, Text
from kvd.worker.cache.scheme import PAGE_TOKENS

WRITTEN = ("dense_keys", "dense_values")
"""Inputs that the kernel writes."""


def unpack_source(
    language: Language,
    heads: int,
    dims: tuple[int, int],
    levels: Sequence[tuple[Side, Side]],
    itemsize: int,
) -> str:
    """Return the text; ``levels``: how each level of pages packs keys and values."""
    text = Text(1)
    text.add(language.prologue)
    text.add(f"""
constexpr int HEADS = {heads};
const int pages = {"paged_shape[0]" if levels else "0"};
if (block.x == 0 && me == 0) done[0] = 1;
{language.output} T* copied_keys = ({language.output} T*)dense_keys;
{language.output} T* copied_values = ({language.output} T*)dense_values;
if (int(block.x) < pages * HEADS) {{
""")
    if levels:
        text.add("""
  const int head = block.x % HEADS, page = block.x / HEADS;
  const int level = paged[page * 3], row = paged[page * 3 + 2];
  const size_t slot = paged[page * 3 + 1];
""")
    for number, sides in enumerate(levels):
        text.add(f"if (level == {number}) {{")
        for name, dim, side in zip(NAMES, dims, sides, strict=True):
            _add_page(text, name, dim, side, number)
        text.add("}")
    text.add(f"""
  return;
}}
int at = (int(block.x) - pages * HEADS) * {THREADS} + me;
const int count = copied_shape[0];
""")
    for name, dim in zip(NAMES, dims, strict=True):
        pieces = dim * itemsize // PIECE
        text.add(
            f"""
if (at < count * HEADS * {pieces}) {{
  const int piece = at % {pieces}, head = at / {pieces} % HEADS;
  const int token = at / ({pieces} * HEADS), place = copied[token * 2];
  {language.output} uint4* to = ({language.output} uint4*)copied_{name}
      + (copied[token * 2 + 1] * HEADS + head) * {pieces} + piece;
  GLOBAL uint4* from = (GLOBAL uint4*)({vector(name, dim)}) + piece;
  *to = *from;
  return;
}}
at -= count * HEADS * {pieces};
"""
        )
    return str(text)


def blocks(pages: int, tokens: int, heads: int, dims: Sequence[int], itemsize: int) -> int:
    return pages * heads + -(-(tokens * heads * sum(dims) * itemsize // PIECE) // THREADS)


def _add_page(text: Text, name: str, dim: int, side: Side, number: int) -> None:
    lines = dim if side.along_tokens else PAGE_TOKENS
    length = PAGE_TOKENS if side.along_tokens else dim
    runs = length // RUN
    # Threads that follow each other write elements that follow each other, where possible.
    line, run = (
        (f"unit % {lines}", f"unit / {lines}")
        if side.along_tokens
        else (f"unit / {runs}", f"unit % {runs}")
    )
    token = f"run * {RUN} + one" if side.along_tokens else "line"
    channel = "line" if side.along_tokens else f"run * {RUN} + one"
    text.add(f"""
for (int unit = me; unit < {lines * runs}; unit += {THREADS}) {{
  const int line = {line}, run = {run};
  const size_t line_at = (slot * HEADS + head) * {lines} + line;
""")
    if side.packed:
        text.add(f"""
  const size_t scale_at = line_at * {length // side.group} + run / {side.group // RUN};
  const float by = float({name}_scales{number}[scale_at]);
  const float bias = float({name}_biases{number}[scale_at]);
  GLOBAL uint* words = {name}{number} + line_at * {length * side.bits // 32};
#pragma unroll
  for (int one = 0; one < {RUN}; ++one) {{
    const int bit = (run * {RUN} + one) * {side.bits}, shift = bit % 32;
    uint code = words[bit / 32] >> shift;
""")
        if 32 % side.bits:
            text.add(
                f"    if (shift > {32 - side.bits}) code |= words[bit / 32 + 1] << (32 - shift);"
            )
        text.add(f"    const T x = T(float(code & {2**side.bits - 1}u) * by + bias);")
    else:
        text.add(f"""
  GLOBAL T* from = {name}{number} + line_at * {length} + run * {RUN};
#pragma unroll
  for (int one = 0; one < {RUN}; ++one) {{
    const T x = from[one];
""")
    text.add(f"""
    copied_{name}[((row + {token}) * HEADS + head) * {dim} + {channel}] = x;
  }}
}}
""")
