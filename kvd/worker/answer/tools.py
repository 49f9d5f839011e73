"""Tools in the form that chat templates and parsers read."""

from __future__ import annotations

from typing import Any

from protocol.tools import Tool

INPUT = "input"
"""The only argument of a tool that takes one text."""


def parameters_of(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool's arguments, also for a tool that takes one text."""
    if tool.grammar is not None:
        return {
            "type": "object",
            "properties": {INPUT: {"type": "string"}},
            "required": [INPUT],
        }
    return tool.parameters or {"type": "object", "properties": {}}


def as_openai(tool: Tool) -> dict[str, Any]:
    """Return a tool in OpenAI's form."""
    parameters = parameters_of(tool)
    function = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}
