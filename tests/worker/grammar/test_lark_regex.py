"""Lark grammars as regular expressions: llguidance accepts the texts that lark's parser accepts."""

from __future__ import annotations

import functools
import json
import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.lark import from_lark
from llguidance import LLMatcher, LLTokenizer

from kvd.worker.grammar.lark_regex import NotRegular, in_lark, regex_of_lark
from kvd.worker.grammar.source import json_grammar
from tests.worker.grammar.patches import PATCH, SAMPLE, matches, parser_of

GRAMMARS = {
    "patch": PATCH,
    "sums": """
        start: sum
        sum: part (("+" | "-") part)* -> whole
        part.2: SIGNED_NUMBER | NAME "(" [sum_of_names] ")"
        sum_of_names: NAME ("," NAME)~0..2
        NAME: "a".."c" DIGIT*
        %import common (SIGNED_NUMBER, DIGIT)
    """,
    "words": r"""
        start: ("select"i | /a[b\/"\\]+;/i) WORD~1..2 "\"\u00e9\x21\\"?
        WORD: /[^\n"]/ | "\t" "x"~2 | CNAME
        %import common.CNAME
    """,
    "spaced": """
        start: "let" WORD "=" (INT | ESCAPED_STRING) ";"
        %import common.WORD
        %import common.INT -> INT
        %import common.ESCAPED_STRING
        %import common.WS
        %ignore WS
    """,
}


@functools.cache
def matcher_of(name: str, *, as_json: bool) -> LLMatcher:
    regex = regex_of_lark(GRAMMARS[name])
    if as_json:
        inner = json_grammar({"type": "string", "pattern": f"^(?:{regex})$"}, "pattern")
    else:
        inner = {"lark_grammar": f"start: /{in_lark(regex)}/"}
    return LLMatcher(LLTokenizer("byte"), json.dumps({"grammars": [inner]}), log_level=0)


def accepts(name: str, text: str, *, as_json: bool) -> bool:
    matcher = matcher_of(name, as_json=as_json).deep_copy()
    written = json.dumps(text, ensure_ascii=False) if as_json else text
    return all(map(matcher.consume_token, written.encode())) and matcher.is_accepting()


def is_plain(text: str) -> bool:
    """Return whether a text is short, and a JSON string of a model may hold it: not DEL."""
    return len(text) < 200 and all(one.isprintable() or one in "\n\t\r\f\b" for one in text)


@pytest.mark.parametrize(("count", "wanted"), [(1, False), (2, True), (29, False), (30, True)])
def test_an_escaped_quote_ends_no_string(count: int, wanted: bool) -> None:
    backslashes = "\\" * count
    text = f'let x = "{backslashes}";'
    assert accepts("spaced", text, as_json=True) == wanted
    assert accepts("spaced", text, as_json=False) == wanted


@pytest.mark.parametrize("name", GRAMMARS)
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(data=st.data())
def test_texts_of_the_grammar_and_no_others_are_accepted(name: str, data: st.DataObject) -> None:
    """Raw and as JSON; other texts are changed ones, which lark's parser judges."""
    text = data.draw(from_lark(parser_of(GRAMMARS[name])).filter(is_plain))
    assert accepts(name, text, as_json=True)
    assert accepts(name, text, as_json=False)
    at = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(at, min(len(text), at + 2)))
    changed = text[:at] + data.draw(st.text('\n"\\ +*@a(1é;', max_size=2)) + text[end:]
    wanted = matches(changed, GRAMMARS[name])
    assert accepts(name, changed, as_json=True) == wanted
    assert accepts(name, changed, as_json=False) == wanted


def test_a_patch_with_quotes_and_other_characters_is_accepted() -> None:
    assert accepts("patch", SAMPLE, as_json=True)
    assert not accepts("patch", SAMPLE.replace("+<a>", "<a>"), as_json=True)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "(" start ")" | "x"', "'start' refers to itself"),
        ('start: a\na: "(" b ")"\nb: a | "x"', "'a' refers to itself"),
        ("start: nothing", "'nothing' is not defined"),
        ("a: /x/", "no rule 'start'"),
        ("start: A\n%import other.A", "another library"),
        ("start: A\n%import common.SPECIAL", "no terminal 'SPECIAL'"),
        ("start: A & B\nA: /x/\nB: /y/", "'& B"),
        ("start[lazy]: /.*x/", "parameters or attributes"),
        ('start: %json {"type": "string"}', "'%json'"),
        ("start: /x/x", "flags 'x'"),
        ("start: ((/x/)", "not closed"),
        ("start: " + "(" * 60 + "/x/" + ")" * 60, "inside each other"),
        ("start: " + "/x/ " * 20_000, "80007 characters"),
        ("start: A~40\nA: B~40\nB: C C C C\nC: D D D D D\n" + "D: " + "/abc/ " * 5000, "more than"),
        ('start: "ab".."c"', "range"),
        ("start: /x/~", "repetitions"),
    ],
)
def test_other_grammars_are_refused_with_the_reason(grammar: str, reason: str) -> None:
    with pytest.raises(NotRegular, match="(?s).*" + reason.replace("(", r"\(")):
        regex_of_lark(grammar)


LONG = f"/{'a' * 24_000}/"


@pytest.mark.parametrize(
    "grammar",
    [
        f"A: {LONG}\nstart: " + "A " * 2000,
        f"A: {LONG}\nstart: " + "|".join("A" * 2000),
        f"%ignore {LONG}\nstart: " + '"" ' * 2000,
        f"A: {LONG}\nstart: A\n" + "%ignore A\n" * 2000,
    ],
)
def test_a_grammar_that_becomes_too_long_takes_little_memory(grammar: str) -> None:
    """Reading it takes 7 MB; 2000 times 24,000 characters would be 48 MB."""
    tracemalloc.start()
    try:
        with pytest.raises(NotRegular, match="more than 50000 characters"):
            regex_of_lark(grammar)
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()
