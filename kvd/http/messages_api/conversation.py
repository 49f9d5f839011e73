"""A conversation of Anthropic's content blocks as messages for the chat template."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvd.http.messages_api import thinking
from protocol.errors import InvalidRequest
from protocol.tools import ToolCall
from protocol.types import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvd.http.messages_api.requests import Block, Message

_ONLY_TEXT = "kvd's models read only text"
_ELSEWHERE = "only Anthropic's servers run such tools"
_ADVICE = {
    "image": f"{_ONLY_TEXT}; describe the image, or leave it out",
    "document": f"{_ONLY_TEXT}; send the document's text in a text block",
    "search_result": f"{_ONLY_TEXT}; send the result's text in a text block",
    "server_tool_use": f"{_ELSEWHERE}; leave the block and its result out",
}
"""Why blocks of some types are refused, and what to do."""


def to_messages(system: str | list[Block] | None, given: Sequence[Message]) -> list[ChatMessage]:
    """Return the conversation; raises `InvalidRequest` for blocks that kvd cannot read.

    A message of role ``system`` stays in its place, because everything before it is then a prefix
    that earlier requests share. Neighbours of one role become one message, as on Anthropic's
    servers: several templates refuse them otherwise.
    """
    groups: list[list[ChatMessage]] = []
    if system:
        groups.append([ChatMessage("system", _joined(system, "system"))])
    names: dict[str, str] = {}
    for number, message in enumerate(given):
        place = f"messages[{number}].content"
        if message.role == "assistant":
            answer = _assistant(message.content, place)
            names |= {call.id: call.name for call in answer.tool_calls}
            _append(groups, answer)
        elif message.role == "system":
            groups.append([ChatMessage("system", _joined(message.content, place))])
        else:
            for one in _user(message.content, place, names):
                _append(groups, one)
    return [_merged(group) for group in groups]


def _append(groups: list[list[ChatMessage]], message: ChatMessage) -> None:
    """Append a message, with the last ones if all are the user's or all the assistant's."""
    last = groups[-1][0] if groups else None
    if last is None or last.role != message.role or last.role in ("system", "tool"):
        groups.append([message])
    else:
        groups[-1].append(message)


def _merged(group: list[ChatMessage]) -> ChatMessage:
    """Return neighbours of one role as one message, joined at once: their number has no limit."""
    if len(group) == 1:
        return group[0]
    return ChatMessage(
        group[0].role,
        _lines(*(one.content for one in group)),
        reasoning=_lines(*(one.reasoning for one in group)),
        tool_calls=[call for one in group for call in one.tool_calls],
    )


def _user(content: str | list[Block], place: str, names: dict[str, str]) -> list[ChatMessage]:
    """Return a user's message as its tool results and texts, in their order."""
    if isinstance(content, str):
        return [ChatMessage("user", content)]
    messages: list[ChatMessage] = []
    for number, block in enumerate(content):
        where = f"{place}[{number}]"
        if block.type == "tool_result":
            result = _joined(block.content or "", f"{where}.content")
            messages.append(
                ChatMessage(
                    "tool",
                    f"Error: {result}" if block.is_error else result,
                    tool_call_id=block.tool_use_id,
                    name=names.get(block.tool_use_id, ""),
                )
            )
        else:
            messages.append(ChatMessage("user", _text(block, where)))
    return messages or [ChatMessage("user", "")]


def _assistant(content: str | list[Block], place: str) -> ChatMessage:
    if isinstance(content, str):
        return ChatMessage("assistant", content)
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    for number, block in enumerate(content):
        where = f"{place}[{number}]"
        match block.type:
            case "thinking":
                reasoning.append(thinking.text_of(block.thinking, block.signature))
            case "redacted_thinking":  # another server's, which only that server can read
                pass
            case "tool_use":
                calls.append(_call(block, where))
            case _:
                texts.append(_text(block, where))
    return ChatMessage("assistant", _lines(*texts), reasoning=_lines(*reasoning), tool_calls=calls)


def _call(block: Block, place: str) -> ToolCall:
    if not block.name:
        raise InvalidRequest(f"{place}.name is missing", field=f"{place}.name")
    arguments = bytes(block.input).decode().strip() or "{}"
    if not arguments.startswith("{"):
        raise InvalidRequest(f"{place}.input must be an object", field=f"{place}.input")
    return ToolCall(block.name, arguments, block.id)


def _joined(content: str | list[Block], place: str) -> str:
    if isinstance(content, str):
        return content
    return _lines(*(_text(block, f"{place}[{n}]") for n, block in enumerate(content)))


def _text(block: Block, place: str) -> str:
    if block.type != "text":
        advice = _ADVICE.get(block.type, f"{_ONLY_TEXT}; send its content as text")
        raise InvalidRequest(
            f"{place}.type {block.type[:40]!r} is not supported here: {advice}",
            field=f"{place}.type",
        )
    if block.text is None:
        raise InvalidRequest(f"{place}.text is missing", field=f"{place}.text")
    return block.text


def _lines(*texts: str) -> str:
    return "\n".join(text for text in texts if text)
