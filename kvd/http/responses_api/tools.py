"""The tools of a request, under the names that the model sees."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from kvd.http.responses_api.requests import Kind, RequestTool
from protocol.chat_checks import NAMED
from protocol.errors import InvalidRequest
from protocol.tools import MAX_TOOLS, TOOL_NAME_PATTERN, Grammar, Tool
from protocol.validation import describe_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from msgspec import Raw

T = TypeVar("T")

_KINDS = frozenset({"function", "custom", "namespace"})
_NAME = re.compile(TOOL_NAME_PATTERN)
_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""OpenAI's meaning of a function without ``parameters``."""
_INPUT = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Schema of the arguments of a custom tool: one text."""


@dataclass(frozen=True)
class ToolName:
    """How the client knows a tool."""

    name: str
    namespace: str | None = None
    custom: bool = False


@dataclass(frozen=True)
class Tools:
    """The tools of a request."""

    tools: tuple[Tool, ...]
    names: dict[str, ToolName]
    """By the name that the model sees."""
    ignored: int
    """Tools of kinds that kvd does not have, such as ``web_search``."""

    def known(self, name: str) -> ToolName:
        return self.names.get(name, ToolName(name))


def flat_name(name: str, namespace: str | None) -> str:
    """Return the name that the model sees: models know no namespaces."""
    return f"{namespace}__{name}" if namespace else name


def read_tools(encoded: Iterable[Raw]) -> Tools:
    """Decode the tools of a request; raises `InvalidRequest`."""
    tools: list[Tool] = []
    names: dict[str, ToolName] = {}
    ignored = 0
    for tool, name, place in _flattened(encoded, "tools", None):
        if tool is None:
            ignored += 1
            continue
        if len(tools) == MAX_TOOLS:
            raise InvalidRequest(
                f"tools has more than {MAX_TOOLS} tools; send fewer", field="tools"
            )
        shown = flat_name(name.name, name.namespace)
        if not _NAME.match(shown):
            raise InvalidRequest(
                f"{place}.name is {shown!r}; a tool's name has 1 to 128 letters, digits and _.:/-",
                field=f"{place}.name",
            )
        names[shown] = name
        tools.append(_custom(shown, tool) if name.custom else _function(shown, tool))
    return Tools(tuple(tools), names, ignored)


def _flattened(
    encoded: Iterable[Raw], place: str, namespace: str | None
) -> Iterator[tuple[RequestTool | None, ToolName, str]]:
    """Yield each tool with its names and its place; None for a tool of an unknown kind."""
    for number, raw in enumerate(encoded):
        here = f"{place}[{number}]"
        kind = decode(raw, Kind, here).type
        if kind not in _KINDS or (kind == "namespace" and namespace):
            yield None, ToolName(kind or ""), here
            continue
        tool = decode(raw, RequestTool, here)
        if kind == "namespace":
            yield from _flattened(tool.tools, f"{here}.tools", tool.name)
        else:
            yield tool, ToolName(tool.name, namespace, kind == "custom"), here


def _function(name: str, tool: RequestTool) -> Tool:
    parameters = _NO_ARGUMENTS if tool.parameters is None else tool.parameters
    return Tool(name, tool.description or "", parameters)


def _custom(name: str, tool: RequestTool) -> Tool:
    """Return a tool whose only argument is a text, which matches a grammar if the tool has one."""
    form, description = tool.format, tool.description or ""
    if form is None or form.type == "text":
        return Tool(name, description, _INPUT)
    description += f"\n\nThe input matches this grammar ({form.syntax}):\n{form.definition}"
    grammar = Grammar(form.syntax, form.definition)
    return Tool(name, description.strip(), _INPUT, grammar)


def read_choice(choice: str | dict[str, Any] | None, tools: Tools) -> tuple[str, Tools]:
    """Return the protocol's ``tool_choice``, not checked yet, and the tools that may be called."""
    if choice is None or isinstance(choice, str):
        mode = choice or "auto"
        if mode.startswith(NAMED):
            raise _wrong("must be auto, none, required, or an object that names a tool")
        return mode, tools
    kind = choice.get("type")
    if not isinstance(kind, str):
        raise _wrong("must have a type, which is a text")
    if kind in {"function", "custom"}:
        return NAMED + _chosen(choice), tools
    if kind != "allowed_tools":  # a tool of a kind that kvd does not have
        return "auto", tools
    listed = choice.get("tools")
    allowed = [
        _chosen(one)
        for one in (listed if isinstance(listed, list) else [])
        if isinstance(one, dict) and one.get("type") in ("function", "custom")
    ]
    if unknown := [name for name in allowed if name not in tools.names]:
        raise _wrong(f"allows {unknown[0]!r}, which is not in tools; add it there")
    mode = choice.get("mode", "auto")
    if mode == "required" and len(allowed) == 1:
        return NAMED + allowed[0], tools
    kept = tuple(tool for tool in tools.tools if tool.name in allowed)
    return "required" if mode == "required" else "auto", replace(tools, tools=kept)


def _chosen(choice: dict[str, Any]) -> str:
    return flat_name(str(choice.get("name")), choice.get("namespace"))


def _wrong(text: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice {text}", field="tool_choice")


def decode(raw: Raw, kind: type[T], place: str) -> T:
    """Decode a part of a request; raises `InvalidRequest` with its place."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        field, text = describe_error(str(error), kind)
        text = text.replace(field, f"{place}.{field}", 1) if field else f"{place}: {text}"
        raise InvalidRequest(text, field=f"{place}.{field}" if field else place) from None
    except ValueError as error:
        raise InvalidRequest(f"{place} is not JSON: {error}", field=place) from None
