"""`bench.forced` counts the tokens that a grammar forces."""

from __future__ import annotations

import re

from bench.forced import Walk
from kvd.worker.grammar.vocabulary import Vocabulary
from protocol.tools import Grammar

_WORDS = [b"a", b"b", b"ab", b"1", b"2"]


def _encode(text: str) -> list[int]:
    """Return the longest tokens from the left."""
    return [_WORDS.index(one.encode()) for one in re.findall("ab|[ab12]", text)]


def _walk() -> Walk:
    end = len(_WORDS)
    return Walk(
        Vocabulary([*_WORDS, b"<end>"], frozenset({end}), frozenset({end}), _encode, canonical=True)
    )


def test_tokens_after_a_forced_one_are_known() -> None:
    found = _walk().follow(Grammar("regex", "(1|2)ababab(1|2)"), 6, seed=0)
    assert found["tokens"] == 6  # a digit, three pieces of the text, a digit, and the end
    assert found["different"] == 0
    assert found["forced"] == 4  # the end too
    assert found["known"] == 2  # the first forced token depends on the digit before it


def test_no_token_of_a_free_text_is_known() -> None:
    found = _walk().follow(Grammar("regex", "[12]{9,}"), 8, seed=0)
    assert (found["tokens"], found["forced"], found["known"]) == (8, 0, 0)
