"""Patterns of JSON schemas, in a form that llguidance finds correctly in JSON texts.

llguidance 1.9.1 writes a pattern with JSON's escapes. A class with all control characters but
without ``"`` or without the backslash then matches these two nevertheless: ``[^"]`` matches ``"``.
Without the character NUL, a class matches what it should.
"""

from __future__ import annotations

import re
from typing import Any

_CLASS = re.compile(r"\\.|\[(\^?)(\]?(?:\\.|\[:\^?[a-z]+:\]|[^\]\\])*)\]", re.DOTALL)
_VALUES = {"const", "enum", "default", "examples"}
"""Keywords whose values are data."""
_BY_NAME = {"properties", "$defs", "definitions", "dependentSchemas"}
"""Keywords whose values are schemas by any names."""


def with_exact_patterns(schema: Any) -> Any:
    """Return a schema whose patterns match no more in JSON than they match in texts."""
    if isinstance(schema, list):
        return [with_exact_patterns(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _value(key, value) for key, value in schema.items()}


def _value(key: str, value: Any) -> Any:
    if key == "pattern" and isinstance(value, str):
        return exact(value)
    if isinstance(value, dict) and key == "patternProperties":
        return {exact(name): with_exact_patterns(one) for name, one in value.items()}
    if isinstance(value, dict) and key in _BY_NAME:
        return {name: with_exact_patterns(one) for name, one in value.items()}
    return value if key in _VALUES else with_exact_patterns(value)


def exact(pattern: str) -> str:
    """Return a pattern without NUL in negated classes that exclude ``"`` or the backslash."""
    return _CLASS.sub(_without_nul, pattern) if "[^" in pattern else pattern


def _without_nul(found: re.Match[str]) -> str:
    if not found[1]:  # an escape, or a class that is not negated
        return found[0]
    try:
        has_both = all(re.fullmatch(found[0], one) for one in '"\\')
    except re.error:  # the dialects differ
        has_both = False
    return found[0] if has_both else rf"[^{found[2]}\x00]"
