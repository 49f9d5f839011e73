"""The kernel that writes a step's tokens into tails: one launch for keys and values of a layer.

What a kernel makes is a new array, so it copies the tails, which are small; MLX's own operations
would as well, in two launches.
"""

from __future__ import annotations

from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.text import Text
from kvd.worker.cache.steps import TAIL_TOKENS

THREADS = 256
PIECE = 16
"""Bytes that a thread copies."""


def append_source(
    language: Language, heads: int, k_dim: int, v_dim: int, itemsize: int, *, givers: bool
) -> str:
    """Return the body; ``givers``: rows are not the tails, in their order."""
    text = Text(1)
    text.add(language.prologue)
    text.add(f"""
constexpr int HEADS = {heads}, TAIL = {TAIL_TOKENS};
constexpr int K_PIECES = {k_dim * itemsize // PIECE}, V_PIECES = {v_dim * itemsize // PIECE};
const int tails = tail_keys_shape[0];
const int keys_end = tails * HEADS * TAIL * K_PIECES;
int at = block.x * {THREADS} + me;
""")
    for what, pieces in (("keys", "K_PIECES"), ("values", "V_PIECES")):
        condition = "at < keys_end" if what == "keys" else f"at < tails * HEADS * TAIL * {pieces}"
        text.add(f"""
if ({condition}) {{
  const int piece = at % {pieces}, token = at / {pieces} % TAIL;
  const int head = at / ({pieces} * TAIL) % HEADS, tail = at / ({pieces} * TAIL * HEADS);
  const int giver = {"givers[tail]" if givers else "tail"};
  GLOBAL uint4* old = (GLOBAL uint4*)tail_{what} + at;
  GLOBAL uint4* taken = (GLOBAL uint4*){what} + (giver * HEADS + head) * {pieces} + piece;
  {language.output} uint4* to = ({language.output} uint4*)new_{what} + at;
  if (places[tail] == token) old = taken;
  *to = *old;
  return;
}}
at -= keys_end;
""")
    return str(text)
