"""Decodes Anthropic's request bodies, and translates them to the protocol."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvd.http import keep_alive
from kvd.http.messages_api import conversation
from kvd.http.messages_api.requests import NO_THINKING
from protocol.chat_checks import NAMED, check_chat
from protocol.errors import InvalidRequest
from protocol.json_values import find_fault
from protocol.messages import Generate, Tokenize
from protocol.tools import ChatOptions, Grammar, Tool
from protocol.types import Sampling

if TYPE_CHECKING:
    from kvd.http.messages_api.requests import MessagesRequest, Thinking
    from protocol.types import ChatMessage

TEMPERATURE = 1.0
"""Anthropic's default."""


@dataclass(frozen=True)
class Wanted:
    """The daemon's request, and the fields of the HTTP request that affect only the answer."""

    call: Generate
    stream: bool
    omits_thinking: bool
    """Whether thinking blocks have a signature and no text."""


def wanted(request: MessagesRequest) -> Wanted:
    """Return what a request asks for; raises `InvalidRequest`."""
    top_p = 1.0 if request.top_p is None else request.top_p
    temperature = TEMPERATURE if request.temperature is None else request.temperature
    if top_p == 0.0:  # only the most likely token
        temperature, top_p = 0.0, 1.0
    call = Generate(
        id="http",
        model=request.model,
        messages=_conversation(request),
        chat=_chat(request),
        grammar=_grammar(request),
        sampling=Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=request.top_k or 0,
            min_p=request.min_p or 0.0,
            seed=request.seed,
        ),
        max_tokens=request.max_tokens,
        stop=request.stop_sequences or [],
        priority=request.priority or 0,
        deadline_s=request.deadline_s,
        prefix_salt=request.cache_salt,
        keep_alive_s=keep_alive.seconds(request.keep_alive),
    )
    omits = request.thinking is not None and request.thinking.display == "omitted"
    return Wanted(call, bool(request.stream), omits)


def text_to_count(request: MessagesRequest) -> Tokenize:
    """Return the prompt that the same request to ``/v1/messages`` would have."""
    messages, chat = _conversation(request), _chat(request)
    return Tokenize(id="http", model=request.model, messages=messages, chat=chat, limit=0)


def _conversation(request: MessagesRequest) -> list[ChatMessage]:
    """Return the messages; raises `InvalidRequest` if the last one cannot be continued."""
    messages = conversation.to_messages(request.system, request.messages)
    last = messages[-1]
    if last.role != "assistant":
        return messages
    formatted = request.output_format or (request.output_config and request.output_config.format)
    fault = ""
    if request.thinking is not None and request.thinking.type not in NO_THINKING:
        fault = "thinking comes before the text; turn thinking off"
    elif formatted:
        fault = "a schema describes the whole text; leave output_config.format out"
    elif request.tool_choice is not None and request.tool_choice.type in ("any", "tool"):
        fault = f"tool_choice {request.tool_choice.type} forces a call; use auto"
    elif last.tool_calls:
        fault = "it has a tool_use block; send the tool's result in a message of the user"
    elif not last.content:
        fault = "it has no text"
    elif last.content != last.content.rstrip():
        fault = "it ends with white space, which most models cannot continue; remove that"
    if fault:
        raise InvalidRequest(
            "messages: the last message is the assistant's, so the answer continues it, but "
            f"{fault}, or let the conversation end with a message of the user",
            field="messages",
        )
    return messages


def _chat(request: MessagesRequest) -> ChatOptions:
    choice = request.tool_choice
    config = request.output_config
    named = "auto"
    if choice is not None:
        named = {"any": "required", "tool": NAMED + choice.name}.get(choice.type, choice.type)
    reasoning, budget = _reasoning(request.thinking)
    chat = ChatOptions(
        tools=_tools(request),
        tool_choice=named,
        parallel_tool_calls=choice is None or not choice.disable_parallel_tool_use,
        reasoning=reasoning,
        effort=None if config is None else config.effort,
        max_reasoning_tokens=budget,
        continue_final=request.messages[-1].role == "assistant",
    )
    check_chat(chat, has_messages=True, place="")
    return chat


def _reasoning(thinking: Thinking | None) -> tuple[bool, int | None]:
    """Return whether the model reasons first, and for how many tokens at most.

    Without the field it does not: clients that have not asked for thinking take the first block for
    the answer.
    """
    if thinking is None or thinking.type in NO_THINKING:
        return False, None
    return True, thinking.budget_tokens


def _tools(request: MessagesRequest) -> list[Tool]:
    tools: list[Tool] = []
    for number, tool in enumerate(request.tools or []):
        if tool.type not in (None, "custom"):
            place = f"tools[{number}]"
            raise InvalidRequest(
                f"{place}.type {tool.type[:40]!r} is a tool of Anthropic's servers or models; "
                "leave it out, or describe a tool of your own with an input_schema",
                field=f"{place}.type",
            )
        tools.append(_tool(tool.name, tool.description or "", tool.input_schema or {}, number))
    return tools


def _tool(name: str, description: str, schema: dict[str, Any], number: int) -> Tool:
    try:
        return msgspec.convert(
            {"name": name, "description": description, "parameters": schema}, Tool
        )
    except msgspec.ValidationError:
        raise InvalidRequest(
            f"tools[{number}].name {name[:128]!r} must have 1 to 128 letters, digits and _.:/-",
            field=f"tools[{number}].name",
        ) from None


def _grammar(request: MessagesRequest) -> Grammar | None:
    config = request.output_config
    format_ = request.output_format if config is None else config.format or request.output_format
    if format_ is None:
        return None
    field = "output_format" if config is None or config.format is None else "output_config.format"
    if fault := find_fault(format_.schema):
        raise InvalidRequest(f"{field}.schema {fault}", field=f"{field}.schema")
    schema = msgspec.json.encode(format_.schema).decode()
    try:
        return msgspec.convert({"kind": "json_schema", "value": schema}, Grammar)
    except msgspec.ValidationError:
        raise InvalidRequest(
            f"{field}.schema has {len(schema)} characters; send a smaller one",
            field=f"{field}.schema",
        ) from None
