"""Messages of a chat: OpenAI's form, and the protocol's."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from protocol.errors import InvalidRequest
from protocol.json_values import find_fault
from protocol.tools import ToolCall
from protocol.types import ChatMessage


class Part(msgspec.Struct, frozen=True):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class EarlierFunction(msgspec.Struct, frozen=True):
    """The function of an earlier call."""

    name: str
    arguments: str | dict[str, Any] | None = None
    """JSON as a text; some clients send the object itself."""


class EarlierCall(msgspec.Struct, frozen=True):
    """A call in an earlier answer. Unknown fields are ignored, as in `Message`."""

    function: EarlierFunction
    id: str | None = None
    type: Literal["function"] | None = None


class Message(msgspec.Struct, frozen=True):
    """One message of a chat.

    Unknown fields are ignored, because clients send back earlier answers unchanged, with fields
    such as ``refusal``.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of ``reasoning_content``."""
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    function_call: EarlierFunction | None = None


def chat_messages(messages: list[Message]) -> list[ChatMessage]:
    """Return the messages for the chat template; raises `InvalidRequest`."""
    called: dict[str, str] = {}
    """Names of tools by the ids of calls; templates may need the name for a result."""
    found = []
    for number, message in enumerate(messages):
        place = f"messages[{number}]"
        if message.function_call is not None:
            raise _invalid(f"{place}.function_call", "is deprecated; use tool_calls")
        calls = [_call(call, place) for call in message.tool_calls or ()]
        if calls and message.role != "assistant":
            raise _invalid(f"{place}.tool_calls", "is only for the role assistant")
        called |= {call.id: call.name for call in calls}
        content = text_of(message.content, place, optional=message.role == "assistant")
        is_result = message.role == "tool"
        answers = (message.tool_call_id or "") if is_result else ""
        found.append(
            ChatMessage(
                role="system" if message.role == "developer" else message.role,
                content=content,
                reasoning=message.reasoning_content or message.reasoning or "",
                tool_calls=calls,
                tool_call_id=answers,
                name=(message.name or called.get(answers, "")) if is_result else "",
            )
        )
    return found


def text_of(content: str | list[Part] | None, place: str, *, optional: bool = False) -> str:
    """Return the text of a message's content; parts are joined by line breaks."""
    if isinstance(content, str):
        return content
    if content is None:
        if optional:
            return ""
        raise _invalid(f"{place}.content", "is missing")
    for number, part in enumerate(content):
        if part.type != "text":
            raise _invalid(f"{place}.content[{number}].type", "must be text; kvd accepts only text")
        if part.text is None:
            raise _invalid(f"{place}.content[{number}].text", "is missing")
    return "\n".join(part.text or "" for part in content)


def _call(call: EarlierCall, place: str) -> ToolCall:
    arguments = call.function.arguments
    if isinstance(arguments, dict):
        if fault := find_fault(arguments):
            raise _invalid(f"{place}.tool_calls.function.arguments", fault)
        arguments = msgspec.json.encode(arguments).decode()
    return ToolCall(call.function.name, arguments or "{}", call.id or "")


def _invalid(field: str, text: str) -> InvalidRequest:
    return InvalidRequest(f"{field} {text}", field=field)
