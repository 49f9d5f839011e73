"""Random JSON schemas of many kinds, and an independent check of answers by them."""

from __future__ import annotations

import datetime as dt
import json
import random
import re
from decimal import Decimal
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

PATTERNS = (
    "^[a-c]{1,4}$",
    "^(ab|cd)+$",
    "^[A-Z][a-z]{0,6}$",
    "^[0-9]{3}-[0-9]{2}$",
    "^[äöü€]{1,3}$",
    '^[^"]{1,3}$',
    r'^"([^"\\\n]|\\.){0,3}"$',
)
FORMATS = ("date", "time", "date-time", "email", "ipv4", "ipv6", "uuid")
CONSTANTS = (
    None,
    True,
    7,
    -1.5,
    "",
    "x",
    'a "quoted" \\ text',
    "naïve café",
    "日本語 😀",
    [1, "a"],
    {"k": 1},
)
KEYS = ("a", "name", "with space", 'quo"te', "käse", "日本", "x" * 40, "$id_", "0")

_TIME = re.compile(
    r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?(Z|[+-]([01]\d|2[0-3]):[0-5]\d)", re.IGNORECASE
)
CHECKER = FormatChecker()


@CHECKER.checks("date", ValueError)
def _is_date(text: object) -> bool:
    if isinstance(text, str):  # RFC 3339 has a year 0, a leap year, which Python does not have
        dt.date.fromisoformat(text.replace("0000", "2000", 1) if text[:4] == "0000" else text)
    return True


@CHECKER.checks("time")
def _is_time(text: object) -> bool:
    return not isinstance(text, str) or _TIME.fullmatch(text) is not None


@CHECKER.checks("date-time", ValueError)
def _is_date_time(text: object) -> bool:
    if not isinstance(text, str):
        return True
    _is_date(text[:10])
    return text[10:11] in {"T", "t", " "} and _TIME.fullmatch(text[11:]) is not None


def is_valid(schema: str, text: str) -> bool:
    """Return whether a text is JSON that matches a schema; decimal numbers are compared exactly."""
    try:
        value = json.loads(text, parse_float=Decimal, parse_constant=_refuse)
    except ValueError:
        return False
    exact = json.loads(schema, parse_float=Decimal)
    return Draft202012Validator(exact, format_checker=CHECKER).is_valid(value)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def random_schema(seed: int) -> dict[str, Any]:
    """Return a schema that small models can finish: texts and arrays are bounded."""
    rng = random.Random(seed)
    kind = rng.random()
    if kind < 0.1:
        return _recursive(rng)
    return _referring(rng) if kind < 0.2 else _schema(rng, rng.randint(0, 3))


def _schema(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth == 0:
        return rng.choice([_text, _number, _choice])(rng)
    kinds = (_object, _object, _array, _tuple, _any_of, _all_of)
    return rng.choice(kinds)(rng, depth - 1)


def _text(rng: random.Random) -> dict[str, Any]:
    kind = rng.random()
    if kind < 0.3:
        return {"type": "string", "pattern": rng.choice(PATTERNS)}
    if kind < 0.6:
        return {"type": "string", "format": rng.choice(FORMATS)}
    least = rng.choice([0, 0, 1, 5])
    return {"type": "string", "minLength": least, "maxLength": least + rng.choice([0, 1, 7, 12])}


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.choice([-1000, -7, 0, 1, 99])
    high = low + rng.choice([0, 3, 10, 4321])
    if rng.random() < 0.5:
        schema: dict[str, Any] = {"type": "integer"}
        if rng.random() < 0.2:
            return {**schema, "minimum": 0, "maximum": 1000, "multipleOf": rng.choice([2, 5, 7])}
    else:
        schema, low, high = {"type": "number"}, low - 0.25, high + 0.5
    schema["minimum" if rng.random() < 0.7 else "exclusiveMinimum"] = low
    above = "exclusiveMinimum" in schema
    return {**schema, "maximum": high + above}


def _choice(rng: random.Random) -> dict[str, Any]:
    match rng.randrange(4):
        case 0:
            return {"const": rng.choice(CONSTANTS)}
        case 1:
            return {"enum": rng.sample(CONSTANTS, rng.randint(1, 5))}
        case 2:
            return {"type": rng.choice(["boolean", "null"])}
    return {"type": ["boolean", "null"]}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    keys = rng.sample(KEYS, rng.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {key: _schema(rng, rng.randint(0, depth)) for key in keys},
        "required": [key for key in keys if rng.random() < 0.6],
        "additionalProperties": False,
    }
    if rng.random() < 0.15:
        schema["additionalProperties"] = _number(rng)
        schema["required"] = keys  # llguidance counts only properties beyond these
        schema["maxProperties"] = len(keys) + 2
    return schema


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    items = _schema(rng, rng.randint(0, depth))
    return {
        "type": "array",
        "items": items,
        "minItems": least,
        "maxItems": least + rng.randint(0, 3),
    }


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    first = [_schema(rng, rng.randint(0, depth)) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": len(first)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_schema(rng, rng.randint(0, depth)) for _ in range(rng.randint(1, 3))]}


def _all_of(rng: random.Random, depth: int) -> dict[str, Any]:
    one, other = _object(rng, depth), _object(rng, depth)
    for part in (one, other):
        del part["additionalProperties"]
        part.pop("maxProperties", None)
    both = {"allOf": [one, other], "type": "object", "additionalProperties": False}
    keys = {**one["properties"], **other["properties"]}
    shared = one["properties"].keys() & other["properties"].keys()
    for key in shared:  # the two schemas may contradict each other
        other["properties"][key] = one["properties"][key]
    return {**both, "properties": dict.fromkeys(keys, True)}


def _referring(rng: random.Random) -> dict[str, Any]:
    return {
        "$defs": {"one": _schema(rng, rng.randint(0, 2))},
        "type": "array",
        "items": {"$ref": "#/$defs/one"},
        "maxItems": 2,
    }


def _recursive(rng: random.Random) -> dict[str, Any]:
    node = {
        "type": "object",
        "properties": {
            "value": _number(rng),
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {"$defs": {"node": node}, "$ref": "#/$defs/node"}
