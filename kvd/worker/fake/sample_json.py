"""JSON that matches a schema, for the answers of the fake model."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from kvd.worker.fake.tokens import word

_MAX_DEPTH = 8
"""Nesting below which optional values are left out, since a schema may refer to itself."""


def sample_json(schema: Any, draw: random.Random) -> str:
    """Return a value of a JSON schema as JSON. Bounds of texts and patterns are not considered."""
    return msgspec.json.encode(_value(schema, schema, draw, 0)).decode()


def _value(schema: Any, root: Any, draw: random.Random, depth: int) -> Any:
    if not isinstance(schema, dict):
        return _text(draw)
    if isinstance(ref := schema.get("$ref"), str):
        return None if depth > 2 * _MAX_DEPTH else _value(_find(ref, root), root, draw, depth + 1)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return draw.choice(schema["enum"])
    if options := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
        return _value(options[-1 if depth > _MAX_DEPTH else 0], root, draw, depth + 1)
    return _typed(schema, root, draw, depth)


def _typed(schema: dict[str, Any], root: Any, draw: random.Random, depth: int) -> Any:
    kind = schema.get("type", "object" if "properties" in schema else "string")
    match kind[0] if isinstance(kind, list) else kind:
        case "object":
            return _object(schema, root, draw, depth)
        case "array":
            count = max(schema.get("minItems", 0), int(depth < _MAX_DEPTH))
            return [_value(schema.get("items"), root, draw, depth + 1) for _ in range(count)]
        case "integer" | "number":
            least = schema.get("minimum", 0)
            return least + draw.randrange(min(100, schema.get("maximum", least + 100) - least) or 1)
        case "boolean":
            return draw.random() < 0.5
        case "null":
            return None
        case _:
            return _text(draw)


def _object(schema: dict[str, Any], root: Any, draw: random.Random, depth: int) -> dict[str, Any]:
    properties = schema.get("properties", {})
    if depth > _MAX_DEPTH:
        properties = {key: properties[key] for key in schema.get("required", properties)}
    if not properties and depth == 0 and schema.get("additionalProperties", True):
        properties = {"text": {"type": "string"}}
    return {key: _value(below, root, draw, depth + 1) for key, below in properties.items()}


def _text(draw: random.Random) -> str:
    return " ".join([word(draw.randrange(256)) for _ in range(draw.randint(1, 3))] + ["né"])


def _find(ref: str, root: Any) -> Any:
    for key in ref.removeprefix("#").split("/")[1:]:
        root = root.get(key, {}) if isinstance(root, dict) else {}
    return root
