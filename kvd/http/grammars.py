"""The grammar of a request, from any of the fields that clients use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from kvd.http.response_format import JsonSchema, ResponseFormat, Schema, StructuredOutputs
from protocol.chat_checks import check_grammar
from protocol.errors import InvalidRequest
from protocol.json_values import find_fault
from protocol.tools import Grammar

if TYPE_CHECKING:
    from kvd.http.requests import ChatRequest, CompletionRequest


def grammar_of(request: ChatRequest | CompletionRequest) -> Grammar | None:
    """Return the grammar of a request, if it has one; raises `InvalidRequest` for several."""
    found = {}
    if request.response_format is not None:
        found["response_format"] = _of_format(request.response_format)
    guided = StructuredOutputs(
        json=request.guided_json,
        regex=request.guided_regex,
        grammar=request.guided_grammar,
        choice=request.guided_choice,
    )
    found |= _of_outputs(guided, "guided_")
    found |= _of_outputs(request.structured_outputs or StructuredOutputs(), "structured_outputs.")
    grammars = {field: grammar for field, grammar in found.items() if grammar is not None}
    if len(grammars) > 1:
        fields = " and ".join(grammars)
        raise InvalidRequest(f"{fields} exclude each other; give one of them", field=fields)
    for field, grammar in grammars.items():
        check_grammar(grammar, field)
        return grammar
    return None


def _of_format(response_format: ResponseFormat) -> Grammar | None:
    match response_format:
        case ResponseFormat(type="text"):
            return None
        case ResponseFormat(type="json_object"):
            return Grammar("json_object")
        case ResponseFormat(json_schema=None):
            field = "response_format.json_schema"
            raise InvalidRequest(f"{field} is missing", field=field)
        case ResponseFormat(json_schema=JsonSchema(schema=dict(schema))):
            return of_schema(schema, "response_format.json_schema.schema")
        case _:
            return Grammar("json_object")


def _of_outputs(outputs: StructuredOutputs, place: str) -> dict[str, Grammar | None]:
    found: dict[str, Grammar | None] = {}
    if outputs.json is not None:
        found[f"{place}json"] = of_schema(outputs.json, f"{place}json")
    if outputs.regex is not None:
        found[f"{place}regex"] = Grammar("regex", outputs.regex)
    if outputs.grammar is not None:
        found[f"{place}grammar"] = Grammar("lark", outputs.grammar)
    if outputs.choice is not None:
        found[f"{place}choice"] = Grammar("regex", "|".join(map(re.escape, outputs.choice)))
    if outputs.json_object:
        found[f"{place}json_object"] = Grammar("json_object")
    return found


def of_schema(schema: str | Schema, field: str) -> Grammar:
    """Return the grammar of a schema; raises `InvalidRequest` if the protocol cannot hold it."""
    if isinstance(schema, dict):
        if fault := find_fault(schema):
            raise InvalidRequest(f"{field} {fault}", field=field)
        schema = msgspec.json.encode(schema).decode()
    return Grammar("json_schema", schema)
