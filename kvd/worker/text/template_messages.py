"""Messages as a chat template takes them: templates differ in how they show calls and results."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from kvd.worker.answer.call_ids import ID_LENGTH, short_id
from kvd.worker.answer.forms import CallForm
from kvd.worker.answer.written import arguments_as_object, write_calls
from protocol.tools import ToolCall
from protocol.types import ChatMessage


@dataclass
class TemplateMessages:
    """What one template supports. `kvd.worker.text.template` finds it by trial at load."""

    names_thinking: bool = False
    """Whether reasoning is called ``thinking`` instead of ``reasoning_content``."""
    arguments_are_text: bool = False
    """Whether arguments of calls are JSON text."""
    short_ids: bool = False
    """Whether ids of calls must have `ID_LENGTH` letters and digits, as in Mistral's templates."""
    shows_calls: bool = True
    """Whether the template shows calls. Otherwise they are a part of the answer's text."""
    shows_results: bool = True
    """Whether the template shows results of tools. Otherwise they are notes of the user."""
    single_calls: bool = False
    """Whether a message may have only one call: the template refuses or drops others."""
    form: CallForm | None = None
    """The form in which calls become text."""

    def adapt(self, messages: Iterable[ChatMessage]) -> list[ChatMessage]:
        """Return a conversation in which calls and results that are not shown are text.

        If the template shows only one call of a message, each gets a message of its own.
        """
        shown = [self._shown(message) for message in messages]
        return list(_one_call_each(shown)) if self.single_calls else shown

    def _shown(self, message: ChatMessage) -> ChatMessage:
        if message.role == "tool" and not self.shows_results:
            name = f" of {message.name}" if message.name else ""
            return ChatMessage("user", f"Result{name}: {message.content}")
        if message.tool_calls and not self.shows_calls:
            parts = (message.content, write_calls(self.form, message.tool_calls))
            return replace(message, content="\n".join(filter(None, parts)), tool_calls=[])
        return message

    def convert(self, message: ChatMessage) -> dict[str, Any]:
        """Return a message for the template."""
        content: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning:
            name = "thinking" if self.names_thinking else "reasoning_content"
            content[name] = message.reasoning
        if message.tool_calls:
            content["tool_calls"] = list(map(self._call, message.tool_calls))
        if message.role == "tool":
            content |= {"tool_call_id": self._id(message.tool_call_id), "name": message.name}
        return content

    def _call(self, call: ToolCall) -> dict[str, Any]:
        arguments = call.arguments if self.arguments_are_text else arguments_as_object(call)
        function = {"name": call.name, "arguments": arguments}
        return {"id": self._id(call.id), "type": "function", "function": function}

    def _id(self, given: str) -> str:
        fits = len(given) == ID_LENGTH and given.isascii() and given.isalnum()
        return given if fits or not self.short_ids else short_id(given)


def _one_call_each(messages: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield a message for each call, followed by its results."""
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.tool_calls) < 2:
            yield message
            continue
        start = at
        while at < len(messages) and messages[at].role == "tool":
            at += 1
        yield from _split(message, messages[start:at])


def _split(calling: ChatMessage, results: Sequence[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the calls of a message, each followed by its results.

    If several calls share an id, each gets one result, and the last one gets the rest.
    """
    calls = calling.tool_calls
    last = {call.id: number for number, call in enumerate(calls)}
    queues: dict[str, deque[ChatMessage]] = {call.id: deque() for call in calls}
    unmatched = deque[ChatMessage]()
    for result in results:
        queues.get(result.tool_call_id, unmatched).append(result)
    message = calling
    for number, call in enumerate(calls):
        yield replace(message, tool_calls=[call])
        queue = queues[call.id]
        while queue:
            yield queue.popleft()
            if number < last[call.id]:
                break
        message = ChatMessage("assistant", "")
    yield from unmatched


def joined(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Return the messages, joining successive ones of the user, and of the assistant."""
    return [one for _, group in itertools.groupby(messages, _role) for one in _join(list(group))]


def _role(message: ChatMessage) -> str:
    return message.role


def _join(group: list[ChatMessage]) -> list[ChatMessage]:
    several = len(group) > 1 and sum(bool(one.tool_calls) for one in group) < 2
    if not several or group[0].role not in ("user", "assistant"):
        return group
    return [
        replace(
            group[0],
            content="\n\n".join(one.content for one in group if one.content),
            reasoning="\n\n".join(one.reasoning for one in group if one.reasoning),
            tool_calls=[call for one in group for call in one.tool_calls],
        )
    ]


def with_answers(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    """Return the messages with a blank answer between two of the user that no answer separates."""
    found: list[ChatMessage] = []
    last = ""
    for message in messages:
        if message.role == last == "user":
            found.append(ChatMessage("assistant", " "))
        found.append(message)
        if message.role != "tool" and not message.tool_calls:
            last = message.role
    return found
