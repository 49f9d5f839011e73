"""msgspec's validation messages as sentences for users."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

from msgspec import inspect

from protocol.errors import shorten
from protocol.fields import ALIAS_PATTERN, ALIAS_RULE, TEXT_PATTERN, TEXT_RULE

_MAX_MESSAGE = 500
"""Characters of msgspec's message that are kept. Unknown keys in it may have megabytes, and the
search for similar keys would then take seconds."""
_MAX_ECHO = 40
"""Maximum characters of a value in a message; a longer value would hide the rest of it."""

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_GIVEN = _TYPES | {"int": "a number", "float": "a number with a fraction", "bool": "a boolean"}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_RULES = {repr(ALIAS_PATTERN): ALIAS_RULE, repr(TEXT_PATTERN): TEXT_RULE}

_AT_PATH = re.compile(r"(?P<reason>.*) - at (?P<key>`key` in )?`\$\.?(?P<path>[^`]*)`", re.DOTALL)
_PATH_STEP = re.compile(r"\.?(?P<name>[^.\[\]]+)|\[[^\]]*\]")


def describe_error(message: str, kind: Any) -> tuple[str, str]:
    """Return the field that msgspec's message is about, and the message as a sentence.

    `kind` is the type to which msgspec decoded; hints about allowed values come from it. A message
    of unknown form is returned unchanged.
    """
    message = shorten(message, _MAX_MESSAGE)
    found = _AT_PATH.fullmatch(message)
    reason, path = (found["reason"], found["path"]) if found else (message, "")
    key = "a key of " if found and found["key"] else ""
    for pattern, describe in _PATTERNS:
        if match := pattern.fullmatch(reason):
            field, text = describe(match, path, kind)
            return field, f"{key}{field or 'the value'} {text}"
    return path, message


def _missing(match: re.Match[str], path: str, _kind: Any) -> tuple[str, str]:
    return _join(path, match["field"]), "is missing"


def _own_check(match: re.Match[str], path: str, _kind: Any) -> tuple[str, str]:
    """Pass on ``field: message`` from a struct's own ``__post_init__``."""
    return _join(path, match["field"]), match["text"]


def _unknown(match: re.Match[str], path: str, kind: Any) -> tuple[str, str]:
    known = [name for found in _types_at(kind, path) for name in _field_names(found)]
    similar = difflib.get_close_matches(match["field"], known, n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"known keys: {', '.join(known)}"
    return _join(path, match["field"]), f"is an unknown key; {hint}"


def _choice(match: re.Match[str], path: str, kind: Any) -> tuple[str, str]:
    values = [
        value
        for found in _types_at(kind, path)
        if isinstance(found, inspect.LiteralType)
        for value in found.values
    ]
    known = ", ".join(map(str, dict.fromkeys(values)))  # several types may have this field
    allowed = f"must be one of {known}" if known else "has an unknown value"
    return path, allowed + _echo(match["value"])


def _echo(value: str) -> str:
    return f", not {value}" if len(value) <= _MAX_ECHO and value.isprintable() else ""


def _bound(match: re.Match[str], path: str, _kind: Any) -> tuple[str, str]:
    return path, f"must be {_BOUNDS[match['sign']]} {match['bound'].removesuffix('.0')}"


def _length(match: re.Match[str], path: str, _kind: Any) -> tuple[str, str]:
    if (match["sign"], match["bound"]) == (">=", "1"):
        return path, "must not be empty"
    unit = "character" if match["kind"] == "str" else "item"
    plural = "" if match["bound"] == "1" else "s"
    return path, f"must have {_BOUNDS[match['sign']]} {match['bound']} {unit}{plural}"


def _multiple(match: re.Match[str], path: str, _kind: Any) -> tuple[str, str]:
    return path, f"must be a multiple of {match['bound'].removesuffix('.0')}"


def _pattern(match: re.Match[str], path: str, _kind: Any) -> tuple[str, str]:
    return path, _RULES.get(match["pattern"], f"must match the pattern {match['pattern']}")


def _wrong_type(match: re.Match[str], path: str, _kind: Any) -> tuple[str, str]:
    allowed = [_TYPES.get(name, name) for name in match["kinds"].split(" | ")]
    given = _GIVEN.get(match["given"], match["given"])
    return path, f"must be {' or '.join(allowed)}, not {given}"


def _out_of_range(_match: re.Match[str], path: str, _kind: Any) -> tuple[str, str]:
    return path, "is a number too large to be read"


_PATTERNS: list[tuple[re.Pattern[str], Callable[[re.Match[str], str, Any], tuple[str, str]]]] = [
    (re.compile(r"Object missing required field `(?P<field>[^`]*)`"), _missing),
    (re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL), _unknown),
    (re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL), _choice),
    (re.compile(r"Expected `[^`]*` (?P<sign>[<>]=?) (?P<bound>\S+)"), _bound),
    (re.compile(r"Expected `(?P<kind>[^`]*)` of length (?P<sign>[<>]=?) (?P<bound>\d+)"), _length),
    (re.compile(r"Expected `[^`]*` that's a multiple of (?P<bound>\S+)"), _multiple),
    (re.compile(r"Expected `str` matching regex (?P<pattern>.*)", re.DOTALL), _pattern),
    (re.compile(r"Expected `(?P<kinds>[^`]*)`, got `(?P<given>[^`]*)`"), _wrong_type),
    (re.compile(r"Number out of range|Integer value out of range"), _out_of_range),
    (re.compile(r"(?P<field>[a-z_]+): (?P<text>.+)", re.DOTALL), _own_check),
]


def _join(path: str, field: str) -> str:
    return f"{path}.{field}" if path else field


# -- types that are allowed at a path -------------------------------------------------------------


@lru_cache(maxsize=8)
def _type_info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _types_at(kind: Any, path: str) -> list[inspect.Type]:
    """Return the types that a value may have at a path such as ``messages[0].role``."""
    found = list(_flatten([_type_info(kind)]))
    for step in _PATH_STEP.finditer(path):
        found = list(_flatten(inner for outer in found for inner in _inner(outer, step["name"])))
    return found


def _flatten(kinds: Iterable[inspect.Type]) -> Iterable[inspect.Type]:
    for kind in kinds:
        if isinstance(kind, inspect.UnionType):
            yield from _flatten(kind.types)
        else:
            yield kind


def _inner(kind: inspect.Type, name: str | None) -> list[inspect.Type]:
    if name is None:
        if isinstance(kind, inspect.DictType):
            return [kind.value_type]
        if isinstance(kind, inspect.ListType | inspect.VarTupleType):
            return [kind.item_type]
        return []
    if not isinstance(kind, inspect.StructType):
        return []
    return [field.type for field in kind.fields if field.encode_name == name]


def _field_names(kind: inspect.Type) -> list[str]:
    if not isinstance(kind, inspect.StructType):
        return []
    return [field.encode_name for field in kind.fields]
