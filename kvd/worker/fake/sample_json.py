"""JSON that matches a schema, for the answers of the fake model."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import msgspec

from kvd.worker.fake.tokens import word

_MAX_DEPTH = 8
"""Nesting below which optional values are left out, since a schema may refer to itself."""
_MAX_VALUES = 1000
_FAULTS = (TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""What schemas raise that are none, or that need too many values."""


def sample_json(schema: Any, draw: random.Random) -> str:
    """Return a value of a JSON schema as JSON; an empty object if the schema is invalid.

    Bounds of texts and patterns are not considered.
    """
    with suppress(*_FAULTS):
        return msgspec.json.encode(_Sampler(schema, draw).value(schema, 0)).decode()
    return "{}"


class _Sampler:
    def __init__(self, root: Any, draw: random.Random) -> None:
        self._root = root
        self._draw = draw
        self._values = 0

    def value(self, schema: Any, depth: int) -> Any:
        self._values += 1
        if self._values > _MAX_VALUES:
            raise ValueError("the schema needs too many values")
        if not isinstance(schema, dict):
            return self._text()
        if isinstance(ref := schema.get("$ref"), str):
            return None if depth > 2 * _MAX_DEPTH else self.value(self._find(ref), depth + 1)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return self._draw.choice(schema["enum"])
        if options := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
            return self.value(options[-1 if depth > _MAX_DEPTH else 0], depth + 1)
        return self._typed(schema, depth)

    def _typed(self, schema: dict[str, Any], depth: int) -> Any:
        kind = schema.get("type", "object" if "properties" in schema else "string")
        match kind[0] if isinstance(kind, list) else kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                count = max(schema.get("minItems", 0), int(depth < _MAX_DEPTH))
                return [self.value(schema.get("items"), depth + 1) for _ in range(count)]
            case "integer" | "number":
                least = schema.get("minimum", 0)
                span = min(100, schema.get("maximum", least + 100) - least)
                return least + self._draw.randrange(span or 1)
            case "boolean":
                return self._draw.random() < 0.5
            case "null":
                return None
            case _:
                return self._text()

    def _object(self, schema: dict[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties", {})
        if depth > _MAX_DEPTH:
            properties = {key: properties[key] for key in schema.get("required", properties)}
        if not properties and depth == 0 and schema.get("additionalProperties", True):
            properties = {"text": {"type": "string"}}
        return {key: self.value(below, depth + 1) for key, below in properties.items()}

    def _text(self) -> str:
        words = [word(self._draw.randrange(256)) for _ in range(self._draw.randint(1, 3))]
        return " ".join([*words, "né"])

    def _find(self, ref: str) -> Any:
        found = self._root
        for key in ref.removeprefix("#").split("/")[1:]:
            found = found[key]
        return found
