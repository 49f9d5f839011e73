"""Kernels that gather rows of several arrays, and that write new tails; one launch each."""

from __future__ import annotations

from kvd.worker.attention.kernels.append import PIECE, THREADS
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.text import Text
from protocol.pages import TAIL_TOKENS


def gather_source(language: Language, parts: int, row_bytes: int) -> str:
    """Return the kernel that makes an array of rows of ``part0``, ``part1`` and so on.

    ``rows`` has a part and a row in it for each row of the result; part -1: zeros.
    """
    pieces = row_bytes // PIECE
    text = Text(1)
    text.add(language.prologue)
    text.add(f"""
const int at = block.x * {THREADS} + me;
if (at >= rows_shape[0] * {pieces}) return;
const int part = rows[at / {pieces} * 2];
uint4 found;
found.x = found.y = found.z = found.w = 0;
if (part >= 0) {{
  GLOBAL uint4* from = (GLOBAL uint4*)part0;
""")
    for number in range(1, parts):
        text.add(f"  if (part == {number}) from = (GLOBAL uint4*)part{number};")
    text.add(f"""
  found = from[rows[at / {pieces} * 2 + 1] * {pieces} + at % {pieces}];
}}
{language.output} uint4* to = ({language.output} uint4*)out + at;
*to = found;
""")
    return str(text)


def gather_blocks(rows: int, row_bytes: int) -> int:
    return -(-rows * (row_bytes // PIECE) // THREADS)


def put_tails_source(language: Language, heads: int, k_dim: int, v_dim: int, itemsize: int) -> str:
    """Return the kernel that makes copies of all tails, with new tokens in some of them.

    ``starts`` has, for each tail, the first of its new tokens in ``kept_keys`` and
    ``kept_values``, ``[tokens, heads, dim]``, and their number.
    """
    text = Text(1)
    text.add(language.prologue)
    text.add(f"""
constexpr int HEADS = {heads}, TAIL = {TAIL_TOKENS};
const int tails = tail_keys_shape[0];
int at = block.x * {THREADS} + me;
""")
    for name, dim in (("keys", k_dim), ("values", v_dim)):
        pieces = dim * itemsize // PIECE
        text.add(f"""
if (at < tails * HEADS * TAIL * {pieces}) {{
  const int piece = at % {pieces}, token = at / {pieces} % TAIL;
  const int head = at / ({pieces} * TAIL) % HEADS, tail = at / ({pieces} * TAIL * HEADS);
  GLOBAL uint4* from = (GLOBAL uint4*)tail_{name} + at;
  if (token < starts[tail * 2 + 1]) {{
    from = (GLOBAL uint4*)kept_{name}
        + ((starts[tail * 2] + token) * HEADS + head) * {pieces} + piece;
  }}
  {language.output} uint4* to = ({language.output} uint4*)new_{name} + at;
  *to = *from;
  return;
}}
at -= tails * HEADS * TAIL * {pieces};
""")
    return str(text)
