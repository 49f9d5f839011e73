"""Wraps a reply that arrives in pieces between words. Pure: text in, text out.

If a word turns out to be too long for its line, it is erased and written again on the next line.
"""

from __future__ import annotations

from rich.cells import cell_len


class WordWrap:
    """Keeps the cursor's column and the word that ends there."""

    def __init__(self, width: int) -> None:
        # The last column stays empty: terminals differ in where the cursor is after writing there.
        self._width = max(2, width - 1)
        self._column = 0
        self._word = ""
        """The written part of the current word."""

    def add(self, text: str) -> str:
        """Return what to write for the next piece, with escape sequences."""
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
                return "\n"  # in place of the space
            self._column += size
            return char
        if self._column + size <= self._width:
            self._column += size
            self._word += char
            return char
        word, written = self._word, cell_len(self._word)
        if not word or written == self._column:  # a word longer than a line is cut
            self._column, self._word = size, char
            return "\n" + char
        self._word += char
        self._column = written + size
        return f"\x1b[{written}D\x1b[K\n{word}{char}"
