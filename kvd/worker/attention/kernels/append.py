"""The kernel that writes a step's tokens into tails: one launch for keys and values of a layer.

A kernel's output is a new array, so this one copies the tails, which are small. MLX's own
operations would copy them too, in two launches. The `rotate` kernel includes this work.
"""

from __future__ import annotations

from kvd.worker.attention.kernels.language import Language
from kvd.worker.attention.kernels.text import Text
from protocol.pages import TAIL_TOKENS

THREADS = 256
PIECE = 16
"""Bytes that one thread copies."""


def append_source(
    language: Language, heads: int, k_dim: int, v_dim: int, itemsize: int, *, token_rows: bool
) -> str:
    text = Text(1)
    text.add(language.prologue)
    add_sizes(text, heads, k_dim, v_dim, itemsize)
    text.add(f"int at = block.x * {THREADS} + me;")
    rows = {
        "keys": f"keys + giver * {heads * k_dim}",
        "values": f"values + giver * {heads * v_dim}",
    }
    add_copies(text, language, rows, token_rows=token_rows)
    return str(text)


def add_sizes(text: Text, heads: int, k_dim: int, v_dim: int, itemsize: int) -> None:
    text.add(f"""
constexpr int HEADS = {heads}, TAIL = {TAIL_TOKENS};
constexpr int K_PIECES = {k_dim * itemsize // PIECE}, V_PIECES = {v_dim * itemsize // PIECE};
const int tails = tail_keys_shape[0];
const int keys_end = tails * HEADS * TAIL * K_PIECES;
""")


def token_row_of(tail: str, *, token_rows: bool) -> str:
    return f"givers[{tail}]" if token_rows else tail


def add_copies(text: Text, language: Language, rows: dict[str, str], *, token_rows: bool) -> None:
    """Add the code that copies piece ``at`` of the new tails, from the old tails or a new token.

    ``rows``: for keys and for values, the expression of the address at which batch row ``giver``'s
    new ones begin. If one is missing, other code writes the new tokens of that side. When a row
    commits its oldest 64 tail tokens to a page, the copy starts after those tokens.
    """
    for side, pieces in (("keys", "K_PIECES"), ("values", "V_PIECES")):
        condition = "at < keys_end" if side == "keys" else f"at < tails * HEADS * TAIL * {pieces}"
        text.add(f"""
if ({condition}) {{
  const int piece = at % {pieces}, token = at / {pieces} % TAIL;
  const int head = at / ({pieces} * TAIL) % HEADS, tail = at / ({pieces} * TAIL * HEADS);
  const int told = places[tail];
  const int behind = told >= TAIL && token < TAIL / 2 ? TAIL / 2 * {pieces} : 0;
  GLOBAL uint4* old = (GLOBAL uint4*)tail_{side} + at + behind;
""")
        if side in rows:
            text.add(f"""
  const int giver = {token_row_of("tail", token_rows=token_rows)};
  GLOBAL uint4* taken = (GLOBAL uint4*)({rows[side]}) + head * {pieces} + piece;
  if (told >= 0 && told % TAIL == token) old = taken;
""")
        else:
            text.add("  if (told >= 0 && told % TAIL == token) return;")
        text.add(f"""
  {language.output} uint4* to = ({language.output} uint4*)new_{side} + at;
  *to = *old;
  return;
}}
at -= keys_end;
""")
