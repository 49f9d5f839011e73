"""Tools that a model may call, and grammars that its answer must match.

A tool call in an answer is a part of the choice's text (`protocol.parts`): its arguments as JSON.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.fields import PositiveCount

MAX_TOOLS = 512
MAX_GRAMMAR_CHARS = 1 << 20
TOOL_NAME_PATTERN = r"^[A-Za-z0-9_.:/-]{1,128}\Z"

ToolName = Annotated[str, Meta(pattern=TOOL_NAME_PATTERN)]
CallId = Annotated[str, Meta(min_length=1, max_length=256)]


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an answer must match. Reasoning before it is free."""

    kind: Literal["json_object", "json_schema", "regex", "lark"]
    """``json_object``: any JSON object. The others need a value."""
    value: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)] = ""
    """The JSON schema as text, the regular expression, or the Lark grammar in llguidance's form."""


class Tool(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function that the model may call. The client runs it."""

    name: ToolName
    description: str = ""
    parameters: dict[str, Any] = {}
    """JSON schema of the arguments; empty: any object."""
    grammar: Grammar | None = None
    """The tool takes one text instead of arguments, in the argument ``input``; the text matches
    this grammar. ``kind`` is ``regex`` or ``lark``."""


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call in an earlier answer, for the chat template."""

    name: str
    arguments: str = "{}"
    """Arguments as JSON."""
    id: str = ""


class ChatOptions(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Settings of a conversation: all of them require ``messages``."""

    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] = []
    tool_choice: str = "auto"
    """``auto``, ``none``, ``required``, or ``name:`` and a tool's name, which must then be
    called."""
    parallel_tool_calls: bool = True
    """Whether an answer may contain several calls."""
    reasoning: bool | None = None
    """Whether the model reasons first, if its template has a switch; absent: the template's own
    default."""
    effort: str | None = None
    """Reasoning effort. If the template does not know the value, the nearest one it knows is
    used."""
    max_reasoning_tokens: PositiveCount | None = None
    """Tokens of reasoning, after which it is ended and the answer begins; absent: no limit."""
    continue_final: bool = False
    """Whether the answer continues the last message, an assistant's with only text. It has no
    reasoning then, and a grammar describes what follows that text."""
    template: dict[str, Any] = {}
    """Further arguments of the chat template."""
