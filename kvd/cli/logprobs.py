"""Renders logprobs: a table of tokens with their probabilities and alternatives. Pure."""

from __future__ import annotations

import math
import unicodedata

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from kvd.cli.tables import GAP, fixed_column, headed, number_column
from protocol.types import Alternative, TokenLogprob

_MAX_CHARS = 24
"""Characters shown of a token; longer tokens are runs of spaces or dashes."""
_MIN_PERCENT = 0.1
"""Smallest percentage that one decimal can show."""
_ESCAPES = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\\": "\\\\"}


def probabilities(title: str, tokens: list[TokenLogprob], width: int) -> Table:
    """Return the table, ``width`` cells wide; ``title`` heads the column of tokens."""
    rows = [
        (
            quoted(token),
            str(token.token),
            "" if token.logprob is None else f"{token.logprob:.4f}",
            percentage(token),
        )
        for token in tokens
    ]
    heads = (title, "ID", "LOGPROB", "PROB")
    table = headed(fixed_column(title), *map(number_column, heads[1:]))
    if not any(token.top for token in tokens):
        for row in rows:
            table.add_row(*map(Text, row))
        return table
    table.add_column("LIKELIEST", no_wrap=True)
    columns = zip(heads, *rows, strict=True)
    left = width - sum(GAP + max(map(cell_len, column)) for column in columns)
    for row, token in zip(rows, tokens, strict=True):
        others = [f"{quoted(other)} {percentage(other)}" for other in token.top]
        table.add_row(*map(Text, row), Text(_lines(others, left)))
    return table


def _lines(pieces: list[str], width: int) -> str:
    """Join the pieces into lines of this width; lines break only between pieces."""
    lines: list[str] = []
    for piece in pieces:
        if lines and cell_len(lines[-1]) + GAP + cell_len(piece) <= width:
            lines[-1] += " " * GAP + piece
        else:
            lines.append(piece)
    return "\n".join(lines)


def quoted(token: Alternative) -> str:
    """Return a token's text in quotes, with control characters escaped."""
    if token.bytes is not None:
        return "<" + " ".join(f"{byte:02X}" for byte in token.bytes) + ">"
    text = token.text if len(token.text) <= _MAX_CHARS else token.text[: _MAX_CHARS - 1] + "…"
    return "'" + "".join(map(_visible, text)) + "'"


def _visible(char: str) -> str:
    if char in _ESCAPES:
        return _ESCAPES[char]
    return f"\\u{ord(char):04x}" if unicodedata.category(char)[0] == "C" else char


def percentage(token: Alternative) -> str:
    if token.logprob is None:
        return ""
    percent = 100 * math.exp(token.logprob)
    return f"{percent:.1f}%" if percent >= _MIN_PERCENT or percent == 0 else f"<{_MIN_PERCENT}%"
