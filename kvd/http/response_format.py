"""Fields that say what an answer must match: OpenAI's, and those that vLLM has."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.tools import MAX_GRAMMAR_CHARS

_Text = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]
Schema = dict[str, Any]
Choices = Annotated[list[str], Meta(min_length=1, max_length=1024)]


class JsonSchema(msgspec.Struct, frozen=True):
    """A schema with its name. Unknown fields are ignored."""

    schema: Schema | None = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None
    """Without effect: answers always match the schema."""


class ResponseFormat(msgspec.Struct, frozen=True):
    """OpenAI's form."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's form: one of the fields. Unknown fields are ignored."""

    json: _Text | Schema | None = None
    regex: _Text | None = None
    grammar: _Text | None = None
    choice: Choices | None = None
    json_object: bool | None = None
