"""Schemas of tools' arguments, as grammars take them."""

from __future__ import annotations

from typing import Any

from kvd.worker.answer.tools import INPUT
from kvd.worker.grammar.source import Source, json_grammar
from kvd.worker.grammar.tool_texts import ToolTexts
from protocol.tools import Tool


def members(value: Any) -> dict[str, Any]:
    """Return an object's members; none for a value that clients' schemas should not have here."""
    return value if isinstance(value, dict) else {}


def lenient(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a tool's schema with unknown keywords ignored: clients' tools have any."""
    options = {"whitespace_pattern": r"( |\n[ \t]{0,40})", "lenient": True}
    return {**schema, "x-guidance": options}


def arguments_of(source: Source, tool: Tool, texts: ToolTexts) -> str:
    """Return the JSON object of a tool's arguments."""
    schema: dict[str, Any] = {"type": "object", **tool.parameters}
    if tool.grammar is not None:
        text: dict[str, Any] = {"type": "string"}
        if (regex := texts.regex(tool)) is not None:
            text["pattern"] = f"^(?:{regex})$"
        schema = {"type": "object", "properties": {INPUT: text}, "required": [INPUT]}
        schema["additionalProperties"] = False
    return source.nest(json_grammar(lenient(schema), "chat.tools"))
