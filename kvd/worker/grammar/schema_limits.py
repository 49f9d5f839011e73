"""Parts of JSON schemas and Lark grammars whose compilation llguidance itself does not bound.

It computes intersections of patterns and multiples before its own limits apply: twenty patterns in
one ``allOf``, or a prime of six digits as ``multipleOf``, take all memory.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from typing import Any
from urllib.parse import unquote

MAX_TEXT_CHARS = 1 << 16
"""Characters of a pattern, or of a text in ``enum`` or ``const``."""
MAX_MULTIPLE = 9_999
"""Least common multiple of all ``multipleOf``, each without zeros at its end. A regular expression
has as many states (measured: 4.8 MiB for 9,973 and 43 MiB for 99,991)."""
MAX_INTERSECTED = 10
"""Patterns and formats that one text must match together. Time and memory grow exponentially
(measured: 12 take 0.6 MiB, 16 take 13 MiB, 40 take 200 MiB after 12 s)."""
_LITERALS = re.compile(r'//[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])*/')
_JSON = re.compile(r"%json\s*(?=\{)")
_MAX_VISITS = 100_000
"""Schemas that are looked at to count these."""


def fault_of(schema: Any) -> str | None:
    """Return what the schema exceeds, as a sentence; None: nothing."""
    multiple, meetings = 1, _Meetings(schema)
    for one in _objects(schema):
        for text in _texts(one):
            if len(text) > MAX_TEXT_CHARS:
                return f"it has a text of {len(text)} characters; the limit is {MAX_TEXT_CHARS}"
        multiple = math.lcm(multiple, _digits(one.get("multipleOf")))
        if multiple > MAX_MULTIPLE:
            return (
                f"its multipleOf have the common multiple {multiple}; the limit is {MAX_MULTIPLE}"
            )
    try:
        most = max(map(meetings.most, _objects(schema)), default=0)
    except (RecursionError, OverflowError):
        return "its allOf and $ref combine too many schemas"
    if most > MAX_INTERSECTED:
        return f"a text must match {most} patterns or formats; the limit is {MAX_INTERSECTED}"
    return None


def fault_of_lark(grammar: str) -> str | None:
    """Return what a Lark grammar exceeds, as a sentence; None: nothing."""
    if (count := _LITERALS.sub("", grammar).count("&")) > MAX_INTERSECTED:
        return f"its terminals combine {count} expressions with &; the limit is {MAX_INTERSECTED}"
    for found in _JSON.finditer(grammar):
        try:
            schema, _ = json.JSONDecoder().raw_decode(grammar, found.end())
        except (ValueError, RecursionError) as error:
            return f"the schema after %json is not JSON: {error}"
        if (fault := fault_of(schema)) is not None:
            return f"the schema after %json: {fault}"
    return None


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    waiting = [schema]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            yield one
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one


def _texts(schema: dict[str, Any]) -> Iterator[str]:
    named = _members(schema.get("patternProperties"))
    for value in (schema.get("pattern"), schema.get("const"), *_list(schema.get("enum")), *named):
        if isinstance(value, str):
            yield value


def _members(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _digits(value: Any) -> int:
    """Return a number without sign, decimal point and the zeros at its end; 1 for other values."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value:
        return 1
    number = Decimal(repr(value))
    if not number.is_finite():
        return 1
    return int("".join(map(str, number.as_tuple().digits)).rstrip("0") or "1")


class _Meetings:
    """Counts the patterns and formats that one text must match together.

    A reference in a property counts without the properties of its target.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._known: dict[tuple[str, bool], Counter[str]] = {}
        self._visits = 0

    def most(self, schema: dict[str, Any]) -> int:
        """Return the largest count within the schema.

        Raises ``RecursionError`` and ``OverflowError`` if it combines too many schemas.
        """
        # A reference alone combines nothing: its target is looked at by itself.
        if "allOf" not in schema and ("$ref" not in schema or len(schema) == 1):
            return 0
        found = self._of(schema, deep=True)
        return max(found.values(), default=0) + found[".*"]

    def _of(self, schema: Any, *, deep: bool) -> Counter[str]:
        """Return counts by path. ``deep``: those of properties and items as well."""
        self._visits += 1
        if self._visits > _MAX_VISITS:
            raise OverflowError
        found = Counter[str]()
        if not isinstance(schema, dict):
            return found
        if "pattern" in schema or "format" in schema:
            found[""] = 1
        for branch in _list(schema.get("allOf")):
            found.update(self._of(branch, deep=deep))
        if isinstance(ref := schema.get("$ref"), str):
            found.update(self._target(ref, deep=deep))
        for name in ("anyOf", "oneOf"):
            union = Counter[str]()
            for branch in _list(schema.get(name)):
                union |= self._of(branch, deep=deep)
            found.update(union)
        if deep:
            self._add_children(schema, found)
        return found

    def _add_children(self, schema: dict[str, Any], found: Counter[str]) -> None:
        for path, child in _children(schema):
            is_tree = not isinstance(child, dict) or "$ref" not in child
            for below, count in self._of(child, deep=is_tree).items():
                found[path + below] += count
        self._visits += len(found)

    def _target(self, ref: str, *, deep: bool) -> Counter[str]:
        known = self._known.get((ref, deep))
        if known is None:
            self._known[ref, deep] = Counter()  # for a reference to itself
            known = self._known[ref, deep] = self._of(self._find(ref), deep=deep)
        self._visits += len(known)
        return known

    def _find(self, ref: str) -> Any:
        """Return what a reference within the schema refers to; None: nothing."""
        found = self._root
        start, *names = ref.split("/")
        if start != "#":
            return None
        for name in names:
            found = _members(found).get(unquote(name).replace("~1", "/").replace("~0", "~"))
        return found


def _children(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, child in _members(schema.get("properties")).items():
        yield f".{name}", child
    for child in _members(schema.get("patternProperties")).values():
        yield ".*", child
    yield ".*", schema.get("additionalProperties")
    for child in (schema.get("items"), *_list(schema.get("prefixItems"))):
        yield "[]", child
