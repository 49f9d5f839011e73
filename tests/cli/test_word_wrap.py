"""`WordWrap`: streamed text is wrapped at words, whatever the pieces in which it arrives."""

from __future__ import annotations

import random
import re
import textwrap

import pytest
from rich.cells import cell_len

from kvd.cli.word_wrap import WordWrap

TEXT = "I can recall facts from a long text, copy words, answer short questions and write a few."


def screen(written):
    """Return the lines that a terminal shows. Erasing must not go beyond the current line."""
    lines = [""]
    for part in re.split(r"(\n|\x1b\[\d+D\x1b\[K)", written):
        if part == "\n":
            lines.append("")
        elif part.startswith("\x1b"):
            back = int(re.search(r"\d+", part)[0])
            while back > 0:
                back -= cell_len(lines[-1][-1])
                lines[-1] = lines[-1][:-1]
            assert back == 0
        else:
            lines[-1] += part
    return lines


@pytest.mark.parametrize("width", [12, 20, 40, 79, 200])
@pytest.mark.parametrize("seed", range(3))
def test_words_stay_whole_however_the_text_is_split(width, seed):
    wrap, rest, draw = WordWrap(width), TEXT, random.Random(seed)
    written = ""
    while rest:
        count = draw.randint(1, 9)
        written += wrap.add(rest[:count])
        rest = rest[count:]
    shown = [line.rstrip() for line in screen(written)]
    assert shown == textwrap.wrap(TEXT, width - 1)


def test_line_breaks_and_indents_of_the_text_stay():
    assert screen(WordWrap(20).add("a\n  b c\n\nd")) == ["a", "  b c", "", "d"]


def test_a_word_longer_than_a_line_is_cut():
    lines = screen(WordWrap(11).add("ab " + "x" * 25))
    assert "".join(lines).replace(" ", "") == "ab" + "x" * 25
    assert max(map(len, lines)) == 10


def test_wide_characters_count_twice():
    lines = screen(WordWrap(11).add("\u4f60\u597d " * 6))
    assert max(map(cell_len, lines)) <= 10
    assert [line.strip() for line in lines if line.strip()] == ["\u4f60\u597d \u4f60\u597d"] * 3
