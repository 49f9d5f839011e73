"""The kernel that quantizes the pages of a prefill pass and copies its new tails: one launch.

MLX's own operations copy and quantize keys and values separately, and copy new tails once for each
length of them.

Tokens are named by *places*, int32. From 0 on, a place is an index in the arrays of the pass. Below
0 it is a token of a tail: ``~place`` is ``slot * 128`` plus the token's index in the tail.

A thread quantizes one group of a page as `mx.quantize` does on the CPU, up to ties. (For a group
of negative numbers, MLX's kernels for GPUs may use a range up to zero.) Other threads copy the
tokens of new tails.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvd.worker.attention.kernels.append import PIECE, THREADS
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.shape import Side
from kvd.worker.attention.kernels.text import Text
from kvd.worker.cache.scheme import PAGE_TOKENS
from protocol.pages import TAIL_TOKENS

NAMES = ("keys", "values")


def pack_source(
    language: Language,
    heads: int,
    dims: tuple[int, int],
    sides: tuple[Side, Side] | None,
    itemsize: int,
) -> str:
    """Return the text; ``sides``: how keys and values are packed, None: the pass fills no page."""
    text = Text(1)
    text.add(language.prologue)
    text.add(f"constexpr int HEADS = {heads};\nint at = block.x * {THREADS} + me;")
    if sides is not None:
        text.add(f"const int pages = paged_shape[0] / {PAGE_TOKENS};")
        for name, dim, side in zip(NAMES, dims, sides, strict=True):
            _add_pages(text, language, name, dim, side)
    text.add("const int count = kept_shape[0];")
    for name, dim in zip(NAMES, dims, strict=True):
        pieces = dim * itemsize // PIECE
        text.add(f"""
if (at < count * HEADS * {pieces}) {{
  const int piece = at % {pieces}, head = at / {pieces} % HEADS;
  const int place = kept[at / ({pieces} * HEADS)];
  GLOBAL uint4* from = (GLOBAL uint4*)({vector(name, dim)}) + piece;
  {language.output} uint4* to = ({language.output} uint4*)kept_{name} + at;
  *to = *from;
  return;
}}
at -= count * HEADS * {pieces};
""")
    return str(text)


def blocks(
    pages: int, kept: int, heads: int, dims: Sequence[int], sides: Sequence[Side], itemsize: int
) -> int:
    groups = 0
    for side, dim in zip(sides, dims, strict=False):
        lines, each, _ = _cut(side, dim)
        groups += pages * heads * lines * each
    copied = kept * heads * sum(dims) * itemsize // PIECE
    return -(-(groups + copied) // THREADS)


def _cut(side: Side, dim: int) -> tuple[int, int, int]:
    """Return the lines of a page of a head, the groups of a line, and the elements of a group."""
    lines, length = (dim, PAGE_TOKENS) if side.along_tokens else (PAGE_TOKENS, dim)
    group = side.group if side.packed else length
    return lines, length // group, group


def vector(name: str, dim: int) -> str:
    """Return the expression of the address of a head's vector at a ``place``."""
    return (
        f"place >= 0 ? {name} + (place * HEADS + head) * {dim} : "
        f"tail_{name} + ((~place / {TAIL_TOKENS} * HEADS + head) * {TAIL_TOKENS}"
        f" + ~place % {TAIL_TOKENS}) * {dim}"
    )


def _add_pages(text: Text, language: Language, name: str, dim: int, side: Side) -> None:
    lines, groups, size = _cut(side, dim)
    # Threads that follow each other read elements that follow each other, where possible.
    line, group = (
        (f"at % {lines}", f"at / {lines} % {groups}")
        if side.along_tokens
        else (f"at / {groups} % {lines}", f"at % {groups}")
    )
    place = "group * GROUP + one" if side.along_tokens else "line"
    channel = "line" if side.along_tokens else "group * GROUP + one"
    text.add(f"""
if (at < pages * HEADS * {lines * groups}) {{
  constexpr int GROUP = {size};
  const int line = {line}, group = {group};
  const int head = at / {lines * groups} % HEADS, page = at / ({lines * groups} * HEADS);
  const int line_at = (page * HEADS + head) * {lines} + line;
""")
    read = f"""
    const int place = paged[page * {PAGE_TOKENS} + {place}];
    GLOBAL T* from = {vector(name, dim)};
    const T x = from[{channel}];
"""
    if side.packed:
        _add_group(text, language, name, side, groups, read)
    else:
        text.add(f"""
  {language.output} T* to = {name}_page + (line_at * {groups} + group) * GROUP;
  for (int one = 0; one < GROUP; ++one) {{
{read}
    to[one] = x;
  }}
""")
    text.add(f"""
  return;
}}
at -= pages * HEADS * {lines * groups};
""")


def _add_group(
    text: Text, language: Language, name: str, side: Side, groups: int, read: str
) -> None:
    """Add the quantization of a group. As in MLX, the end with the larger magnitude is exact."""
    text.add(f"""
  float least = 0, most = 0;
  for (int one = 0; one < GROUP; ++one) {{
{read}
    const float now = float(x);
    least = one && least < now ? least : now;
    most = one && most > now ? most : now;
  }}
  const bool below = (least < 0 ? -least : least) > (most < 0 ? -most : most);
  float width = (most - least) / {2**side.bits - 1}.0f;
  if (!(width > 1e-7f)) width = 1e-7f;
  const float edge = below ? least : most, wanted = below ? width : -width;
  const float steps = ROUND(edge / wanted);
  const float by = steps == 0 ? wanted : edge / steps, bias = steps == 0 ? 0.0f : edge;
  {name}_scales[line_at * {groups} + group] = T(by);
  {name}_biases[line_at * {groups} + group] = T(bias);
  {language.output} uint* to =
      {name}_page + line_at * {groups * side.group * side.bits // 32}
      + group * {side.group * side.bits // 32};
  uint word = 0;
  int filled = 0;
  for (int one = 0; one < GROUP; ++one) {{
{read}
    float code = ROUND((float(x) - bias) / by);
    code = code > 0 ? code : 0.0f;  // also if it is not a number
    const uint bits = uint(code < {2**side.bits - 1}.0f ? code : {2**side.bits - 1}.0f);
    word |= bits << filled;
    filled += {side.bits};
    if (filled >= 32) {{
      *to++ = word;
      filled -= 32;
      word = filled ? bits >> ({side.bits} - filled) : 0u;
    }}
  }}
""")
