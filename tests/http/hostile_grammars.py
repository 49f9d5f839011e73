"""Random grammars from clients: valid, invalid and hostile."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from protocol.tools import Grammar
from tests.worker.grammar.json_schemas import random_schema

_ENDLESS = 10**9
_A = {"$ref": "#/$defs/a"}


def random_grammar(seed: int) -> Grammar:
    """Return a grammar."""
    rng = random.Random(seed)
    make = rng.choice(_KINDS)
    return make(rng)


def _schema(value: object) -> Grammar:
    return Grammar("json_schema", json.dumps(value))


def _valid(rng: random.Random) -> Grammar:
    return _schema(random_schema(rng.randrange(10**6)))


def _deep(rng: random.Random) -> Grammar:
    depth = rng.choice([3, 63, 64, 65, 500, 5000])
    opening, closing = rng.choice([('{"items":', "}"), ('{"anyOf":[', "]}"), ('{"not":', "}")])
    return Grammar("json_schema", opening * depth + "{}" + closing * depth)


def _enum(rng: random.Random) -> Grammar:
    count = rng.choice([1, 100, 3000, 20_000])
    return _schema({"enum": [f"{rng.randrange(10**6)}-{number}" for number in range(count)]})


def _properties(rng: random.Random) -> Grammar:
    count = rng.choice([50, 50, 50, 500, 500, 2000])  # the largest takes 0.6 s of CPU time
    return _schema({"type": "object", "properties": {f"k{n}": {} for n in range(count)}})


def _counts(rng: random.Random) -> Grammar:
    count = rng.choice([1000, 10**6, _ENDLESS, 2**52, -1])  # llguidance computes with doubles
    return _schema(
        rng.choice(
            [
                {"type": "array", "minItems": count},
                {"type": "string", "minLength": count},
                {"type": "string", "maxLength": count},
                {"type": "integer", "minimum": count, "maximum": count + 1},
                {"type": "integer", "multipleOf": count},
                {"type": "object", "minProperties": count},
            ]
        )
    )


def _regex(rng: random.Random) -> Grammar:
    return Grammar(
        "regex",
        rng.choice(
            [
                "(a+)+$",
                "((a|a)*)*b",
                "(a?){500}a{500}",
                "(.*a){30}",
                f"a{{{rng.randrange(10**7)}}}",
                "((x{100}){100}){100}",
                "(",
                "[z-a]",
                r"\p{Nothing}",
                "(?=a)b",
                r"(a)\1",
                "[^\\x00-\\x{10FFFF}]",
                "(" * 3000 + ")" * 3000,
                "|".join(f"w{rng.randrange(10**6)}" for _ in range(2000)),
                "x" * rng.choice([1000, 1 << 20]),
            ]
        ),
    )


def _lark(rng: random.Random) -> Grammar:
    return Grammar(
        "lark",
        rng.choice(
            [
                'start: start "a" | "b"',
                'start: a\na: a a | "x"',
                'start: e\ne: e "+" e | e "*" e | /[0-9]/',
                "start: start",
                "start: missing",
                'start: "a"{1000000}',
                "start: " + "(" * 5000 + '"a"' + ")" * 5000,
                "start: " + " | ".join(f'"{number}"' for number in range(5000)),
                'start: a*\na: b*\nb: c*\nc: "x"*',
                "%import common.NOTHING\nstart: NOTHING",
                "no grammar at all {{{",
                '%llguidance {"no_forcing": 7}\nstart: "a"',
                "start: <[99999999]>",
                'start: "\\ud800"',
                "start: //",
                "",
            ]
        ),
    )


def _references(rng: random.Random) -> Grammar:
    return _schema(
        rng.choice(
            [
                {"$ref": "#"},
                {"$ref": "#/nowhere"},
                {"$ref": "http://127.0.0.1:1/x"},
                {"$ref": "file:///etc/passwd"},
                {
                    "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
                    "$ref": "#/$defs/a",
                },
                {"$defs": {"a": {"allOf": [_A]}}, **_A},
                {"type": "array", "items": {"$ref": "#"}, "minItems": 2},
            ]
        )
    )


def _broken(rng: random.Random) -> Grammar:
    texts = ['{"type": "nothing"}', '{"enum": []}', "[]", "7", "nul", '{"a": "\\ud800"}', "\x00"]
    texts += ['{"pattern": "("}', '{"format": "nothing"}', '{"type": [7]}', '{"properties": 7}']
    texts += ['{"const": "\\udc00\\ud800"}', "{" * 100_000, '"' + "x" * (1 << 20)]
    return Grammar("json_schema", rng.choice(texts))


_KINDS: tuple[Callable[[random.Random], Grammar], ...] = (
    *(_valid, _deep, _enum, _properties, _counts, _regex, _lark, _references, _broken),
)
