"""Fields of a chat that set tools and reasoning."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from protocol.fields import Count
from protocol.tools import MAX_TOOLS, ToolName


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call. Unknown fields are ignored."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Without effect: arguments always match the schema."""


class FunctionTool(msgspec.Struct, frozen=True):
    """A tool. Unknown fields are ignored, since clients mark tools for their own caches."""

    type: str
    function: Function | None = None


class FunctionName(msgspec.Struct, frozen=True):
    """The name of a function that must be called."""

    name: str


class NamedTool(msgspec.Struct, frozen=True):
    """A ``tool_choice`` that names a function."""

    function: FunctionName
    type: Literal["function"] = "function"


class Reasoning(msgspec.Struct, frozen=True):
    """Settings of reasoning in one object. Unknown fields are ignored."""

    effort: str | None = None
    max_tokens: Count | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """Whether the answer leaves out the reasoning."""


Tools = Annotated[list[FunctionTool], Meta(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool
