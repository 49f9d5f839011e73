"""A reply that comes in pieces, wrapped between words on a terminal. Pure: text in, text out.

A word that turns out to be too long for its line is taken back and begun anew on the next one.
"""

from __future__ import annotations

from rich.cells import cell_len


class Wrap:
    """Where the cursor is, and in which word."""

    def __init__(self, width: int) -> None:
        # The last column stays empty: a cursor behind it is nowhere that terminals agree on.
        self._width = max(2, width - 1)
        self._column = 0
        self._word = ""
        """What was written of the word that the cursor stands behind."""

    def add(self, text: str) -> str:
        """Return what to write for the next piece."""
        return "".join(self._char(char) for char in text)

    def _char(self, char: str) -> str:
        size = cell_len(char)
        if char == "\n":
            self._column, self._word = 0, ""
            return char
        if char.isspace():
            self._word = ""
            if self._column + size > self._width:
                self._column = 0
                return "\n"  # the space is the line's end
            self._column += size
            return char
        if self._column + size <= self._width:
            self._column += size
            self._word += char
            return char
        taken, written = self._word, cell_len(self._word)
        if not taken or written == self._column:  # longer than a line: it is cut
            self._column, self._word = size, char
            return "\n" + char
        self._word += char
        self._column = written + size
        return f"\x1b[{written}D\x1b[K\n{taken}{char}"
