"""The kernel that writes the new tails of a pass."""

from __future__ import annotations

from kvd.worker.attention.kernels.append import PIECE, THREADS
from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.text import Text
from protocol.pages import TAIL_TOKENS


def put_tails_source(language: Language, heads: int, k_dim: int, v_dim: int, itemsize: int) -> str:
    """Return the text of the kernel that copies all tails, with new tokens at the front of some.

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
