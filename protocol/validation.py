"""What is wrong with a value, as a sentence for people: msgspec's message in plain words.

Names the field and says what is allowed there. A message of a form that is not known here comes
out as it is.
"""

from __future__ import annotations

import difflib
import re
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from msgspec import inspect

from protocol.types import ALIAS_PATTERN, ALIAS_RULE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_LONGEST_ECHO = 40
"""A longer value would hide what is said about it."""

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_GIVEN = _KINDS | {"int": "a number", "float": "a number with a fraction", "bool": "a boolean"}
_BOUNDS = {">=": "at least", "<=": "at most", ">": "more than", "<": "less than"}
_RULES = {repr(ALIAS_PATTERN): ALIAS_RULE}

_PLACE = re.compile(r"(?P<reason>.*) - at (?P<key>`key` in )?`\$\.?(?P<place>[^`]*)`", re.DOTALL)
_STEP = re.compile(r"\.?(?P<name>[^.\[\]]+)|\[[^\]]*\]")


def explain(message: str, kind: Any) -> tuple[str, str]:
    """Return the field that msgspec's message speaks of, and the message as a sentence.

    `kind` is the type that was to be decoded; what is allowed is looked up there.
    """
    found = _PLACE.fullmatch(message)
    reason, place = (found["reason"], found["place"]) if found else (message, "")
    key = "a key of " if found and found["key"] else ""
    for form, say in _FORMS:
        if said := form.fullmatch(reason):
            field, text = say(said, place, kind)
            return field, f"{key}{field or 'the value'} {text}"
    return place, message


def _missing(said: re.Match[str], place: str, _kind: Any) -> tuple[str, str]:
    return _inside(place, said["field"]), "is missing"


def _own(said: re.Match[str], place: str, _kind: Any) -> tuple[str, str]:
    """Say what a struct of ours found out about its fields together."""
    return _inside(place, said["field"]), said["text"]


def _unknown(said: re.Match[str], place: str, kind: Any) -> tuple[str, str]:
    known = [field for it in _at(kind, place) for field in _fields(it)]
    near = difflib.get_close_matches(said["field"], known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}"
    return _inside(place, said["field"]), f"is an unknown key; {hint}"


def _choice(said: re.Match[str], place: str, kind: Any) -> tuple[str, str]:
    values = [
        value
        for it in _at(kind, place)
        if isinstance(it, inspect.LiteralType)
        for value in it.values
    ]
    known = ", ".join(map(str, dict.fromkeys(values)))  # several messages may have such a field
    allowed = f"must be one of {known}" if known else "has a wrong value"
    return place, allowed + _echo(said["value"])


def _echo(value: str) -> str:
    return f", not {value}" if len(value) <= _LONGEST_ECHO and value.isprintable() else ""


def _bound(said: re.Match[str], place: str, _kind: Any) -> tuple[str, str]:
    return place, f"must be {_BOUNDS[said['sign']]} {said['bound'].removesuffix('.0')}"


def _length(said: re.Match[str], place: str, _kind: Any) -> tuple[str, str]:
    if (said["sign"], said["bound"]) == (">=", "1"):
        return place, "must not be empty"
    unit = "character" if said["kind"] == "str" else "item"
    plural = "" if said["bound"] == "1" else "s"
    return place, f"must have {_BOUNDS[said['sign']]} {said['bound']} {unit}{plural}"


def _multiple(said: re.Match[str], place: str, _kind: Any) -> tuple[str, str]:
    return place, f"must be a multiple of {said['bound'].removesuffix('.0')}"


def _pattern(said: re.Match[str], place: str, _kind: Any) -> tuple[str, str]:
    return place, _RULES.get(said["pattern"], f"must match the pattern {said['pattern']}")


def _wrong_kind(said: re.Match[str], place: str, _kind: Any) -> tuple[str, str]:
    allowed = [_KINDS.get(name, name) for name in said["kinds"].split(" | ")]
    return place, f"must be {' or '.join(allowed)}, not {_GIVEN.get(said['given'], said['given'])}"


def _too_large(_said: re.Match[str], place: str, _kind: Any) -> tuple[str, str]:
    return place, "is a number too large to be read"


_FORMS: list[tuple[re.Pattern[str], Callable[[re.Match[str], str, Any], tuple[str, str]]]] = [
    (re.compile(r"Object missing required field `(?P<field>[^`]*)`"), _missing),
    (re.compile(r"Object contains unknown field `(?P<field>.*)`", re.DOTALL), _unknown),
    (re.compile(r"Invalid enum value (?P<value>.*)", re.DOTALL), _choice),
    (re.compile(r"Expected `[^`]*` (?P<sign>[<>]=?) (?P<bound>\S+)"), _bound),
    (
        re.compile(r"Expected `(?P<kind>[^`]*)` of length (?P<sign>[<>]=?) (?P<bound>\d+)"),
        _length,
    ),
    (re.compile(r"Expected `[^`]*` that's a multiple of (?P<bound>\S+)"), _multiple),
    (re.compile(r"Expected `str` matching regex (?P<pattern>.*)", re.DOTALL), _pattern),
    (re.compile(r"Expected `(?P<kinds>[^`]*)`, got `(?P<given>[^`]*)`"), _wrong_kind),
    (re.compile(r"Number out of range|Integer value out of range"), _too_large),
    (re.compile(r"(?P<field>[a-z_]+): (?P<text>.+)", re.DOTALL), _own),
]


def _inside(place: str, field: str) -> str:
    return f"{place}.{field}" if place else field


# -- what the type allows at a place --------------------------------------------------------------


@lru_cache(maxsize=8)
def _info(kind: Any) -> inspect.Type:
    return inspect.type_info(kind)


def _at(kind: Any, place: str) -> list[inspect.Type]:
    """Return the types that a value may have at this place, such as ``messages[0].role``."""
    found = list(_flat([_info(kind)]))
    for step in _STEP.finditer(place):
        found = list(_flat(inner for it in found for inner in _into(it, step["name"])))
    return found


def _flat(kinds: Iterable[inspect.Type]) -> Iterable[inspect.Type]:
    for it in kinds:
        if isinstance(it, inspect.UnionType):
            yield from _flat(it.types)
        else:
            yield it


def _into(it: inspect.Type, name: str | None) -> list[inspect.Type]:
    if name is None:
        if isinstance(it, inspect.DictType):
            return [it.value_type]
        return [it.item_type] if isinstance(it, inspect.ListType | inspect.VarTupleType) else []
    if not isinstance(it, inspect.StructType):
        return []
    return [field.type for field in it.fields if field.encode_name == name]


def _fields(it: inspect.Type) -> list[str]:
    return [field.encode_name for field in it.fields] if isinstance(it, inspect.StructType) else []
