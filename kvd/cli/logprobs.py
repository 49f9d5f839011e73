"""Logprobs for people: a table of tokens, how likely each was, and what else could stand there.

Pure: values in, renderables out.
"""

from __future__ import annotations

import math
import unicodedata

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from protocol.types import Alternative, TokenLogprob

_GAP = 2
_LONGEST = 24
"""Characters of a token; longer ones are runs of spaces or dashes."""
_LEAST = 0.1
"""Percent that one digit can show."""
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}


def probabilities(title: str, tokens: list[TokenLogprob], width: int) -> Table:
    """Return the table, ``width`` cells wide; ``title`` stands above the tokens."""
    rows = [
        (
            shown(one),
            str(one.token),
            "" if one.logprob is None else f"{one.logprob:.4f}",
            share(one),
        )
        for one in tokens
    ]
    heads = (title, "ID", "LOGPROB", "PROB")
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="dim", pad_edge=False)
    for at, head in enumerate(heads):
        table.add_column(head, justify="right" if at else "left", no_wrap=True)
    if not any(one.top for one in tokens):
        for row in rows:
            table.add_row(*map(Text, row))
        return table
    table.add_column("LIKELIEST", no_wrap=True)
    columns = zip(heads, *rows, strict=True)
    left = width - sum(_GAP + max(map(cell_len, column)) for column in columns)
    for row, one in zip(rows, tokens, strict=True):
        others = [f"{shown(other)} {share(other)}" for other in one.top]
        table.add_row(*map(Text, row), Text(_lines(others, left)))
    return table


def _lines(pieces: list[str], width: int) -> str:
    """Return the pieces in lines of this width, broken between two of them only."""
    lines: list[str] = []
    for piece in pieces:
        if lines and cell_len(lines[-1]) + _GAP + cell_len(piece) <= width:
            lines[-1] += " " * _GAP + piece
        else:
            lines.append(piece)
    return "\n".join(lines)


def shown(token: Alternative) -> str:
    """Return a token between quotes, on one line and without what moves the cursor."""
    if token.bytes is not None:
        return "<" + " ".join(f"{byte:02X}" for byte in token.bytes) + ">"
    text = token.text if len(token.text) <= _LONGEST else token.text[: _LONGEST - 1] + "…"
    return "'" + "".join(map(_visible, text)) + "'"


def _visible(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    return f"\\u{ord(char):04x}" if unicodedata.category(char)[0] == "C" else char


def share(token: Alternative) -> str:
    """Return a token's probability."""
    if token.logprob is None:
        return ""
    percent = 100 * math.exp(token.logprob)
    return f"{percent:.1f}%" if percent >= _LEAST or percent == 0 else f"<{_LEAST}%"
