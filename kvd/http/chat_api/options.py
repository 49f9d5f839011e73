"""Tools and reasoning of a chat: the forms that clients use, and the protocol's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvd.http.chat_api.fields import FunctionTool, NamedTool, Reasoning, ToolChoice
from protocol.chat_checks import NAMED, check_chat
from protocol.errors import InvalidRequest
from protocol.json_values import find_fault
from protocol.tools import ChatOptions, Tool

if TYPE_CHECKING:
    from kvd.http.requests import ChatRequest

_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""OpenAI's meaning of a function without ``parameters``."""
_SWITCH = "enable_thinking"


def chat_options(request: ChatRequest) -> ChatOptions:
    """Return the settings of a request; raises `InvalidRequest`."""
    template = dict(request.chat_template_kwargs or {})
    if fault := find_fault(template):
        raise InvalidRequest(f"chat_template_kwargs {fault}", field="chat_template_kwargs")
    nested = request.reasoning or Reasoning()
    switch = template.pop(_SWITCH, request.enable_thinking)
    if switch is not None and not isinstance(switch, bool):
        field = f"chat_template_kwargs.{_SWITCH}"
        raise InvalidRequest(f"{field} must be true or false", field=field)
    switches = [switch, nested.enabled]
    effort = request.reasoning_effort or nested.effort
    budget = nested.max_tokens if request.thinking_budget is None else request.thinking_budget
    if effort == "none" or budget == 0:
        switches.append(False)
    given = [value for value in switches if value is not None]
    options = ChatOptions(
        tools=[_tool(tool, number) for number, tool in enumerate(request.tools or ())],
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=all(given) if given else None,
        effort=None if effort == "none" else effort or None,
        max_reasoning_tokens=budget or None,
        template=template,
    )
    check_chat(options, has_messages=True, place="")
    return options


def _tool(tool: FunctionTool, number: int) -> Tool:
    place = f"tools[{number}]"
    if tool.type != "function":
        raise InvalidRequest(
            f"{place}.type must be function, not {tool.type[:40]}; custom tools are in the "
            "Responses API, /v1/responses",
            field=f"{place}.type",
        )
    function = tool.function
    if function is None:
        raise InvalidRequest(f"{place}.function is missing", field=f"{place}.function")
    parameters = _NO_ARGUMENTS if function.parameters is None else function.parameters
    return Tool(function.name, function.description or "", parameters)


def _choice(choice: ToolChoice | None) -> str:
    return NAMED + choice.function.name if isinstance(choice, NamedTool) else choice or "auto"
