"""Finds the message or tool of a conversation that a position in its prompt belongs to.

The template is rendered again with a private-use character at the end of each message. If the
result without these characters is the prompt, they show where each message ends. A template that
reacts to them gives another text, and then the place is not known.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from kvd.worker.text.template import ChatTemplate
from protocol.cache_outcome import PromptPlace
from protocol.tools import ChatOptions
from protocol.types import ChatMessage

MAX_MESSAGES = 4096
"""Messages of a conversation whose places are found; each takes 7 us to render."""
_MESSAGE_CHARACTERS = 200
"""Characters for which a message counts besides its texts: about the bytes of an empty one."""
_FIRST_MARK = 0xF0000
_START = "\U00100000"
"""Marks the start of the first message."""
_MARKS = re.compile("[\U000f0000-\U00100000]")


@dataclass(frozen=True)
class Conversation:
    """What a prompt was rendered from."""

    messages: list[ChatMessage]
    chat: ChatOptions

    @cached_property
    def characters(self) -> int:
        """Characters of the messages' texts, without those of tools, and some for each message.

        Computed once: 4000 messages take 5 ms on a busy machine.
        """
        return sum(
            _MESSAGE_CHARACTERS
            + len(message.content)
            + len(message.reasoning)
            + sum(len(call.arguments) for call in message.tool_calls)
            for message in self.messages
        )


def find_place(
    template: ChatTemplate,
    conversation: Conversation,
    prompt: str,
    at: int,
    turn_ends: Sequence[str],
) -> PromptPlace | None:
    """Return the place of the character ``at`` of a rendered conversation; None: not known.

    ``turn_ends``: texts that end a message, such as ``<|im_end|>``. Raises `InvalidRequest` if the
    template refuses the marked messages.
    """
    messages, chat = conversation.messages, conversation.chat
    if len(messages) > MAX_MESSAGES or _MARKS.search(prompt) is not None:
        return None
    if (tool := _tool_at(template, conversation, prompt, at)) is not None:
        return tool
    marked = template.render(
        [
            _marked(message, chr(_FIRST_MARK + index), text=template.messages.arguments_are_text)
            for index, message in enumerate(_with_start(messages))
        ],
        chat,
    )
    if _MARKS.sub("", marked) != prompt:
        return None
    start, ends = _positions(marked, len(messages))
    if at < start:
        return PromptPlace("template")
    number = _message_at(prompt, at, ends, turn_ends)
    if number is None:
        return PromptPlace("template")
    return PromptPlace("message", number + 1, len(messages), messages[number].role)


def _message_at(prompt: str, at: int, ends: dict[int, int], turn_ends: Sequence[str]) -> int | None:
    """Return the index of the message that a position belongs to; None: it comes after all."""
    known = sorted(ends.items(), key=lambda item: item[1])  # results may be next to their calls
    for index, (number, end) in enumerate(known):
        limit = known[index + 1][1] if index + 1 < len(known) else len(prompt)
        found = [prompt.find(text, end, limit) for text in turn_ends if text]
        turn_end = min((one for one in found if one >= 0), default=end)
        if at <= turn_end:
            return number
    return None


def _positions(marked: str, messages: int) -> tuple[int, dict[int, int]]:
    """Return where the first message starts, and where each one ends, in the text without marks."""
    start, ends = 0, {}
    for count, mark in enumerate(_MARKS.finditer(marked)):
        if mark.group() == _START:
            start = mark.start() - count
        else:
            ends[ord(mark.group()) - _FIRST_MARK] = mark.start() - count
    return start, {number: end for number, end in ends.items() if number < messages}


def _with_start(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with a mark at the start of the first one, unless templates may trim it.

    Without that mark, text of the template before the first message counts as a part of it.
    """
    first = messages[0]
    if not first.content or first.content[0].isspace():
        return list(messages)
    return [replace(first, content=_START + first.content), *messages[1:]]


def _marked(message: ChatMessage, mark: str, *, text: bool) -> ChatMessage:
    """Return a message with a mark at its end; ``text``: arguments are rendered unchanged."""
    body, calls = message.content.rstrip(), list(message.tool_calls)
    if calls:
        arguments = calls[-1].arguments
        marked = arguments + mark if text else _marked_json(arguments, mark)
        calls[-1] = replace(calls[-1], arguments=marked)
    content = body + mark + message.content[len(body) :] if body else message.content
    return replace(message, content=content, tool_calls=calls)


def _marked_json(arguments: str, mark: str) -> str:
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments + mark
    if not isinstance(value, dict):
        return arguments + mark
    return json.dumps(_mark_last(value, mark), ensure_ascii=False)


def _mark_last(value: Any, mark: str) -> Any:
    """Return a JSON value with a mark at the end of its last text, or of its last key."""
    if isinstance(value, str):
        return value + mark
    if isinstance(value, list) and value:
        return [*value[:-1], _mark_last(value[-1], mark)]
    if isinstance(value, dict) and value:
        *before, (key, last) = value.items()
        marked = _mark_last(last, mark)
        return dict([*before, (key, marked) if marked != last else (key + mark, last)])
    return value


def _tool_at(
    template: ChatTemplate, conversation: Conversation, prompt: str, at: int
) -> PromptPlace | None:
    """Return the tool at a position, if the position is in what the tools add to the prompt."""
    chat = conversation.chat
    if not chat.tools or chat.tool_choice == "none":
        return None
    without = template.render(conversation.messages, replace(chat, tools=[]))
    start = common(prompt, without)
    after = common(prompt[start:][::-1], without[start:][::-1])
    end = len(prompt) - after
    if not start <= at < end:
        return None
    number, found = 0, start
    for tool in chat.tools:
        found = prompt.find(f'"{tool.name}"', found, end)
        if not 0 <= found <= at:
            break
        number += 1
    return PromptPlace("tools", max(1, number), len(chat.tools))


def common(one: str, other: str) -> int:
    """Return how many leading characters two texts have in common."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
