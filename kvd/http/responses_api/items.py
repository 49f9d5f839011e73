"""Input items to the protocol's messages.

Consecutive items of the assistant (reasoning, messages and calls) are one message, as one answer
has made them. The system messages at the beginning are one as well, because many chat templates
take only one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

import msgspec

from kvd.http.responses_api.requests import Content, Item, Kind
from kvd.http.responses_api.sealed import unseal
from kvd.http.responses_api.tools import decode, flat_name
from protocol.errors import InvalidRequest
from protocol.tools import ToolCall
from protocol.types import ChatMessage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from msgspec import Raw

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXTS = frozenset({"input_text", "output_text", "text", "summary_text", "reasoning_text"})
_NOT_TEXT = "[{} omitted: the model reads only text]"
_REFERENCE = "item_reference"
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_CALLS = frozenset({"function_call", "custom_tool_call"})
_KINDS = frozenset({"message", "reasoning", "additional_tools"}) | _OUTPUTS | _CALLS


@dataclass
class _Turn:
    """The assistant's message that items still add to."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)

    def message(self) -> ChatMessage | None:
        """Return the message; None if there is only reasoning, which no template can show."""
        if not (self.texts or self.calls):
            return None
        reasoning = "\n".join(self.reasoning)
        return ChatMessage("assistant", "\n".join(self.texts), reasoning, self.calls)


@dataclass
class Conversation:
    """The messages of a request, from its items in order: `add` them, then `finish`."""

    find: Callable[[str], Raw | None]
    """Returns a stored item by its id."""
    messages: list[ChatMessage] = field(default_factory=list)
    ignored_items: int = 0
    """Items of kinds that kvd does not have."""
    foreign_reasoning: int = 0
    """Reasoning that another server has sealed."""
    tools: list[Raw] = field(default_factory=list)
    """Tools that items add."""
    _turn: _Turn = field(default_factory=_Turn)
    _referred: set[str] = field(default_factory=set)
    """Ids of the items that references have named."""
    _names: dict[str, str] = field(default_factory=dict)
    """Tool by the id of its call."""

    def add_system(self, text: str) -> None:
        if text:
            self._add_message("system", text)

    def add(self, raw: Raw, place: str) -> None:
        """Add an item; ``place`` is its path in the request. Raises `InvalidRequest`."""
        kind = decode(raw, Kind, place)
        name = kind.type or ("message" if kind.role else _REFERENCE)
        if name == _REFERENCE:
            self.add(self._found(decode(raw, Item, place).id, place), place)
            return
        if name not in _KINDS:
            self.ignored_items += 1
            return
        item = decode(raw, Item, place)
        if name == "message":
            self._message(item, place)
        elif name == "reasoning":
            self._reasoning(item)
        elif name in _CALLS:
            self._call(item, custom=name == "custom_tool_call")
        elif name in _OUTPUTS:
            self._output(item, place)
        else:
            self.tools += item.tools

    def finish(self) -> list[ChatMessage]:
        self._end_turn()
        return list(_with_joined_systems(self.messages))

    def _found(self, item_id: str | None, place: str) -> Raw:
        """Return a stored item. Each is taken once, or a small body could take any memory."""
        if item_id in self._referred:
            raise InvalidRequest(
                f"{place} refers to the item {item_id!r} again; refer to it once", field=place
            )
        if item_id is not None:
            self._referred.add(item_id)
        found = None if item_id is None else self.find(item_id)
        if found is None:
            raise InvalidRequest(
                f"{place} refers to the item {item_id!r}, which is not stored (any more); send the "
                "item itself",
                field=place,
            )
        return found

    def _message(self, item: Item, place: str) -> None:
        role = _ROLES.get(item.role)
        if role is None:
            known = ", ".join(_ROLES)
            text = f"{place}.role must be one of {known}, not {item.role!r}"
            raise InvalidRequest(text, field=f"{place}.role")
        if item.content is None:
            raise InvalidRequest(f"{place}.content is missing", field=f"{place}.content")
        text = _text(item.content, f"{place}.content")
        if role == "assistant":
            self._turn.texts.append(text)
        else:
            self._add_message(role, text)

    def _add_message(self, role: str, text: str) -> None:
        self._end_turn()
        self.messages.append(msgspec.convert({"role": role, "content": text}, ChatMessage))

    def _reasoning(self, item: Item) -> None:
        sealed = item.encrypted_content
        text = None if sealed is None else unseal(sealed)
        if text is None:
            parts = item.content if isinstance(item.content, list) else None
            if not parts and sealed is None:
                parts = item.summary
            text = "\n".join(part.text for part in parts or [] if part.text)
        if text:
            self._turn.reasoning.append(text)
        elif sealed is not None:
            self.foreign_reasoning += 1

    def _call(self, item: Item, *, custom: bool) -> None:
        arguments = item.arguments
        if custom:
            arguments = msgspec.json.encode({"input": item.input}).decode()
        name = flat_name(item.name, item.namespace)
        self._names[item.call_id] = name
        self._turn.calls.append(ToolCall(name, arguments or "{}", item.call_id))

    def _output(self, item: Item, place: str) -> None:
        self._end_turn()
        output = "" if item.output is None else item.output
        text = _text(output, f"{place}.output", may_omit=True)
        name = self._names.get(item.call_id, item.name)
        call = item.call_id
        self.messages.append(ChatMessage("tool", text, tool_call_id=call, name=name))

    def _end_turn(self) -> None:
        message, self._turn = self._turn.message(), _Turn()
        if message is not None:
            self.messages.append(message)


def _with_joined_systems(messages: list[ChatMessage]) -> Iterator[ChatMessage]:
    """Yield the messages, with neighbours of the role ``system`` as one message."""
    for is_system, group in groupby(messages, key=lambda one: one.role == "system"):
        if is_system:
            yield ChatMessage("system", "\n\n".join(one.content for one in group))
        else:
            yield from group


def add_all(conversation: Conversation, items: Iterable[Raw], place: str) -> None:
    for number, raw in enumerate(items):
        conversation.add(raw, f"{place}[{number}]")


def _text(content: str | list[Content], place: str, *, may_omit: bool = False) -> str:
    """Return the text of a message or an output.

    A tool's output may have parts that are not text: the model reads that they are missing, because
    the agent could not continue its session otherwise.
    """
    if isinstance(content, str):
        return content
    texts = []
    for number, part in enumerate(content):
        text = part.refusal if part.type == "refusal" else part.text
        if part.type in _TEXTS or part.type == "refusal":
            texts.append(text or "")
        elif may_omit:
            texts.append(_NOT_TEXT.format(part.type or "content"))
        else:
            field = f"{place}[{number}].type"
            raise InvalidRequest(
                f"{field} is {part.type!r}; kvd's models read only text: send input_text",
                field=field,
            )
    return "\n".join(texts)
