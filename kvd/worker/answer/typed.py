"""Types of arguments that a model writes without quotes: the tool's schema decides."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 16
_NAMES = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object",
    list: "array", type(None): "null",
}  # fmt: skip


def types_of(schema: Any, root: Mapping[str, Any] | None = None, depth: int = 0) -> set[str]:
    """Return the JSON types that a schema allows; empty: it does not restrict them.

    Clients' schemas may hold any value anywhere; what is no schema restricts nothing. ``root``: the
    schema that ``$ref`` refers to.
    """
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    found = schema.get("type")
    types = {one for one in [found, *_items(found)] if isinstance(one, str)}
    for value in _items(schema.get("enum")) or ([schema["const"]] if "const" in schema else []):
        types.add(_NAMES[type(value)])
    for key in ("anyOf", "oneOf", "allOf"):
        for option in _items(schema.get(key)):
            types |= types_of(option, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str) and root is not None:
        types |= types_of(_referred(reference, root), root, depth + 1)
    return types


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        if step:
            found = found.get(step) if isinstance(found, Mapping) else None
    return found


def parameter_types(parameters: Mapping[str, Any], name: str) -> set[str]:
    """Return the types that a tool's schema allows for one of its parameters."""
    properties = parameters.get("properties")
    schema = properties.get(name) if isinstance(properties, Mapping) else None
    return types_of(schema, parameters)


def as_allowed(text: str, types: set[str]) -> str:
    """Return a value that was written without quotes as JSON of an allowed type.

    Without types, it is what it looks like. A value of no allowed type becomes a string.
    """
    bare = text.strip()
    word = bare.lower()
    if "boolean" in types and word in ("true", "false"):
        return word
    if "null" in types and word in ("null", "none"):
        return "null"
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(text)
    name = _NAMES[type(value)]
    if name == "number" and "integer" in types and value.is_integer():
        bare, name = str(int(value)), "integer"
    allowed = not types or name in types or (name == "integer" and "number" in types)
    # A string in quotes: the model wrote them as part of the value.
    return bare if allowed and name != "string" else quoted(text)


def as_json(text: str) -> str:
    """Return a value that was written as JSON; a JSON string if it is not valid JSON."""
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return quoted(text)
    return text.strip()


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
