"""Tools, tool choices and grammars that contradict each other, or that no frame can carry."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from actors.router import _size
from protocol import messages
from protocol import worker as wire
from protocol.framing import FrameDecoder, encode_frame
from protocol.json_values import MAX_DEPTH, find_fault, size_of
from protocol.session import ServerSession
from protocol.tools import ChatOptions, Grammar, Tool
from protocol.types import ChatMessage, Sampling


def sent(**fields: Any) -> Any:
    """Return what the daemon makes of a request."""
    request = {"v": 1, "id": "a", "op": "generate", "model": "m"} | fields
    (found,) = ServerSession().receive(msgspec.json.encode(request) + b"\n")
    return found


def chat(**options: Any) -> Any:
    return sent(messages=[{"role": "user", "content": "hi"}], chat=options)


TOOL = {"name": "look"}


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        ({"tools": [TOOL, TOOL]}, "chat.tools[1].name", "repeats 'look'"),
        ({"tool_choice": "required"}, "chat.tool_choice", "the request has no tools"),
        ({"tools": [TOOL], "tool_choice": "any"}, "chat.tool_choice", "not any"),
        ({"tools": [TOOL], "tool_choice": "name:sea"}, "chat.tool_choice", "it has: look"),
        (
            {"tools": [TOOL | {"grammar": {"kind": "lark"}}]},
            "chat.tools[0].grammar.value",
            "is missing for lark",
        ),
        (
            {"tools": [TOOL | {"parameters": {"maximum": 2**70}}]},
            "chat.tools[0].parameters",
            "more than 64 bits",
        ),
        ({"template": {"x": -(2**63) - 1}}, "chat.template", "more than 64 bits"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, Any], field: str, text: str
) -> None:
    found = chat(**options)
    assert isinstance(found, messages.Error)
    assert found.error.code == "invalid_request"
    assert found.error.detail["field"] == field
    assert text in found.error.message


def test_options_need_messages() -> None:
    found = sent(prompt="hi", chat={"tools": [TOOL]})
    assert found.error.message == "chat requires messages"
    found = sent(op="tokenize", prompt="hi", chat={"tools": [TOOL]})
    assert found.error.message == "chat requires messages"


def test_a_grammar_needs_its_value() -> None:
    assert sent(prompt="hi", grammar={"kind": "regex"}).error.detail["field"] == "grammar.value"
    assert sent(prompt="hi", grammar={"kind": "json_object", "value": "{}"}).error is not None
    assert isinstance(sent(prompt="hi", grammar={"kind": "json_object"}), messages.Generate)


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"a": value}
    return value


def test_values_that_pass_can_be_sent_to_a_worker() -> None:
    deepest = {"deep": [nested(MAX_DEPTH - 2)], "big": 2**64 - 1, "small": -(2**63)}
    accepted = chat(tools=[TOOL | {"parameters": deepest}])
    assert isinstance(accepted, messages.Generate)
    submit = wire.Submit(
        rid="r", messages=accepted.messages, chat=accepted.chat, sampling=Sampling()
    )
    assert len(FrameDecoder().receive(encode_frame(submit))) == 1
    assert "nested deeper than" in find_fault(nested(MAX_DEPTH + 1))
    assert find_fault(nested(MAX_DEPTH)) == ""


def test_tools_grammars_and_calls_count_as_size() -> None:
    long = "x" * 10_000
    message = ChatMessage("user", "hi")

    def size(**fields: Any) -> int:
        return _size(wire.Submit(rid="r", sampling=Sampling(), **fields))

    least = size(messages=[message])
    for fields in (
        {"messages": [msgspec.structs.replace(message, reasoning=long)]},
        {"messages": [msgspec.convert({"role": "assistant", "content": "", "tool_calls": [
            {"name": "a", "arguments": long}]}, ChatMessage)]},
        {"grammar": Grammar("regex", long)},
        {"chat": ChatOptions(tools=[Tool("a", long)])},
        {"chat": ChatOptions(tools=[Tool("a", parameters={"a": [{"b": long}]})])},
        {"chat": ChatOptions(tools=[Tool("a", grammar=Grammar("lark", long))])},
        {"chat": ChatOptions(template={long: 1})},
    ):  # fmt: skip
        assert size(**({"messages": [message]} | fields)) > least + 9_000, fields
    assert size_of([{}] * 100) > 100 * size_of({})
