"""Scripted answers of the fake model for tools, reasoning and schemas."""

from __future__ import annotations

import json
import random

import pytest

from kvd.worker.fake.row import prompt_of
from kvd.worker.fake.sample_json import sample_json
from kvd.worker.fake.script import ScriptedToken, script_of
from protocol.tools import ChatOptions, Grammar, Tool, ToolCall
from protocol.types import ChatMessage, Sampling
from protocol.worker import Submit
from tests.cpu_time import takes_less_than

TOOLS = [Tool("look", parameters={"type": "object", "properties": {"word": {"type": "string"}}})]


def script(*messages: ChatMessage, grammar: Grammar | None = None, **chat) -> list[ScriptedToken]:
    request = Submit(
        rid="r",
        messages=list(messages) or [ChatMessage("user", "Hi")],
        chat=ChatOptions(**chat),
        grammar=grammar,
        sampling=Sampling(seed=1),
    )
    return script_of(request, prompt_of(request), 2, 0) or []


def parts(found: list[ScriptedToken]) -> list[list[str]]:
    joined: list[list[str]] = []
    for token in found:
        if token.begins is not None:
            joined.append([token.begins.kind, token.begins.name, ""])
        joined = joined or [["text", "", ""]]
        joined[-1][2] += token.text
    return joined


def test_plain_conversations_have_no_script() -> None:
    assert script() == []


def test_an_answer_with_tools_reasons_speaks_and_calls() -> None:
    found = parts(script(tools=TOOLS))
    assert [kind for kind, *_ in found][:3] == ["reasoning", "text", "call"]
    assert all(json.loads(text).keys() == {"word"} for kind, _, text in found if kind == "call")


def test_a_user_may_write_the_calls() -> None:
    message = ChatMessage("user", 'Please\ncall look {"word": "é"}\ncall unknown {}')
    assert parts(script(message, tools=TOOLS))[2:] == [["call", "look", '{"word": "é"}']]


def test_after_a_result_the_answer_is_text() -> None:
    call = ChatMessage("assistant", "", tool_calls=[ToolCall("look", "{}", "a")])
    result = ChatMessage("tool", "found", tool_call_id="a")
    found = parts(script(ChatMessage("user", "Hi"), call, result, tools=TOOLS))
    assert [kind for kind, *_ in found] == ["reasoning", "text"]


def test_an_answer_with_a_schema_is_json() -> None:
    schema = '{"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"enum": [7]}}}'
    [[kind, _, text]] = parts(script(grammar=Grammar("json_schema", schema)))
    assert (kind, json.loads(text)) == ("text", {"a": 7})


@pytest.mark.parametrize(
    "schema",
    [
        5,
        {"enum": []},
        {"anyOf": 3},
        {"type": "object", "properties": []},
        {"type": "integer", "minimum": "x"},
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"type": "array", "minItems": 10**12},
        {"$ref": "#"},
        {"$ref": "#/a/b"},
        {"type": "object", "properties": {str(at): {"$ref": "#"} for at in range(20)}},
    ],
    ids=str,
)
def test_no_schema_ends_or_delays_the_worker(schema) -> None:
    assert takes_less_than(1, lambda: json.loads(sample_json(schema, random.Random(1))))
