"""Patterns in JSON texts, against Python's `re` on all short texts."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from llguidance import LLMatcher, LLTokenizer

from kvd.worker.grammar.source import inner_grammar
from protocol.tools import Grammar

TOKENIZER = LLTokenizer("byte")


@pytest.mark.parametrize(
    "pattern",
    [
        r'^[^"]*$',
        r"^[^\\]*$",
        r'^[^"\\]+"$',
        r'^"([^"\\]|\\.)*"$',
        r'^([^"\\\n]|\\[^\n])*x$',
        r'^[^]"]+$',
        r'^(?:[^"]|x)*$',
        r'^[^!-~x"]*$',
        r'^\[[^x"]*$',
        r"^[^a]*$",
        r'^[a^"]*$',
    ],
)
def test_a_pattern_matches_the_same_in_json(pattern: str) -> None:
    schema = json.dumps({"type": "string", "pattern": pattern})
    inner = inner_grammar(Grammar("json_schema", schema))
    start = LLMatcher(TOKENIZER, json.dumps({"grammars": [inner]}), log_level=0)
    for length in range(5):
        for letters in itertools.product('"\\ax\n[', repeat=length):
            text = "".join(letters)
            wanted = re.search(pattern.removesuffix("$") + r"\Z", text) is not None
            matcher = start.deep_copy()
            written = json.dumps(text).encode()
            found = matcher.try_consume_tokens(list(written)) == len(written)
            assert (found and matcher.is_accepting()) == wanted, text


def test_only_patterns_are_changed() -> None:
    schema = {
        "properties": {"pattern": {"const": {"pattern": '[^"]'}}, "enum": {"pattern": '[^"]'}},
        "patternProperties": {'^[^"]$': {"enum": ['[^"]']}},
        "additionalProperties": False,
    }
    found = inner_grammar(Grammar("json_schema", json.dumps(schema)))["json_schema"]
    assert found["properties"] == {
        "pattern": {"const": {"pattern": '[^"]'}},
        "enum": {"pattern": r'[^"\x00]'},
    }
    assert found["patternProperties"] == {r'^[^"\x00]$': {"enum": ['[^"]']}}
