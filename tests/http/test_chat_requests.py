"""Tools, reasoning and structured output in requests, and what the daemon is asked for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvd.http.reading import calls, hides_reasoning, read
from kvd.http.requests import ChatRequest, CompletionRequest
from protocol.errors import InvalidRequest
from protocol.messages import Generate
from protocol.tools import ChatOptions, Grammar, Tool, ToolCall
from protocol.types import ChatMessage

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather.", "parameters": SCHEMA},
}
TIME = {"type": "function", "function": {"name": "time", "strict": True}, "cache_control": {}}


def chat(**fields: Any) -> Generate:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | fields
    (found,) = calls(read(json.dumps(body).encode(), ChatRequest))
    return found


def options(**fields: Any) -> ChatOptions:
    return chat(**fields).chat


def test_a_request_without_tools_has_no_options() -> None:
    assert options() == options(tools=None, tool_choice="auto", parallel_tool_calls=True)
    assert options() == ChatOptions()
    assert chat().grammar is None


def test_tools() -> None:
    found = options(tools=[WEATHER, TIME], parallel_tool_calls=False)
    no_arguments = {"type": "object", "properties": {}, "additionalProperties": False}
    assert found.tools == [
        Tool("weather", "The weather.", SCHEMA),
        Tool("time", parameters=no_arguments),
    ]
    assert (found.tool_choice, found.parallel_tool_calls) == ("auto", False)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ("none", "none"),
        ("auto", "auto"),
        ("required", "required"),
        ({"type": "function", "function": {"name": "time"}}, "name:time"),
        (None, "auto"),
    ],
    ids=str,
)
def test_tool_choices(choice: Any, expected: str) -> None:
    assert options(tools=[TIME], tool_choice=choice).tool_choice == expected


def test_a_conversation_with_calls_and_results() -> None:
    function = {"name": "weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "Look it up.",
            "tool_calls": [
                {"id": "a1", "type": "function", "function": function, "index": 0},
                {"id": "a2", "function": {"name": "time", "arguments": ""}},
            ],
            "refusal": None,
            "annotations": [],
        },
        {"role": "tool", "tool_call_id": "a1", "content": "rain"},
        {"role": "tool", "tool_call_id": "a2", "content": [{"type": "text", "text": "noon"}]},
        {"role": "assistant", "content": "", "reasoning": "Done."},
    ]
    assert chat(messages=messages).messages == [
        ChatMessage("user", "Hi"),
        ChatMessage(
            "assistant",
            "",
            "Look it up.",
            [ToolCall("weather", '{"city": "Oslo"}', "a1"), ToolCall("time", "{}", "a2")],
        ),
        ChatMessage("tool", "rain", tool_call_id="a1", name="weather"),
        ChatMessage("tool", "noon", tool_call_id="a2", name="time"),
        ChatMessage("assistant", "", "Done."),
    ]


def test_arguments_of_an_earlier_call_may_be_an_object() -> None:
    call = {"id": "a", "function": {"name": "f", "arguments": {"x": [1]}}}
    (message,) = chat(messages=[{"role": "assistant", "tool_calls": [call]}]).messages or []
    assert message.tool_calls == [ToolCall("f", '{"x":[1]}', "a")]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"reasoning_effort": "xhigh"}, ChatOptions(effort="xhigh")),
        ({"reasoning_effort": "none"}, ChatOptions(reasoning=False)),
        ({"chat_template_kwargs": {"enable_thinking": False}}, ChatOptions(reasoning=False)),
        ({"enable_thinking": True}, ChatOptions(reasoning=True)),
        ({"chat_template_kwargs": {"x": [1]}}, ChatOptions(template={"x": [1]})),
        (
            {"reasoning": {"effort": "low", "max_tokens": 9}},
            ChatOptions(effort="low", max_reasoning_tokens=9),
        ),
        ({"reasoning": {"enabled": False, "summary": "auto"}}, ChatOptions(reasoning=False)),
        ({"thinking_budget": 7}, ChatOptions(max_reasoning_tokens=7)),
        ({"thinking_budget": 0}, ChatOptions(reasoning=False)),
    ],
    ids=str,
)  # fmt: skip
def test_reasoning_in_all_its_forms(fields: dict[str, Any], expected: ChatOptions) -> None:
    assert options(**fields) == expected


def test_reasoning_can_be_left_out_of_the_answer() -> None:
    def hidden(**fields: Any) -> bool:
        body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]} | fields
        return hides_reasoning(read(json.dumps(body).encode(), ChatRequest))

    assert hidden(reasoning={"exclude": True})
    assert hidden(include_reasoning=False)
    assert not hidden(include_reasoning=True, reasoning={})


NAMED = {"name": "a", "schema": SCHEMA, "strict": True}
TEXT = json.dumps(SCHEMA, separators=(",", ":"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        (
            {"response_format": {"type": "json_schema", "json_schema": NAMED}},
            Grammar("json_schema", TEXT),
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            Grammar("json_object"),
        ),
        ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
        ({"guided_json": TEXT}, Grammar("json_schema", TEXT)),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"guided_choice": ["a+", "b"]}, Grammar("regex", r"a\+|b")),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
def test_structured_output_in_all_its_forms(
    fields: dict[str, Any], expected: Grammar | None
) -> None:
    assert chat(**fields).grammar == expected
    body = {"model": "m", "prompt": "Hi"} | fields
    (completion,) = calls(read(json.dumps(body).encode(), CompletionRequest))
    assert completion.grammar == expected


DEEP: Any = {}
for _ in range(100):
    DEEP = {"a": DEEP}

WRONG = [
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type", "Responses API"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "is missing"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].name", "repeats"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", ""),
    ({"tools": 5}, "tools", "must be a list"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": DEEP}}]},
     "tools[0].parameters", "nested deeper than"),
    ({"tool_choice": "required"}, "tool_choice", "has no tools"),
    ({"tool_choice": "any"}, "tool_choice", "must be one of"),
    ({"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "x"}}},
     "tool_choice", "it has: time"),
    ({"functions": [{"name": "f"}]}, "functions", "use tools"),
    ({"function_call": {"name": "f"}}, "function_call", "use tools"),
    ({"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": ""}}]},
     "messages[0].function_call", "use tool_calls"),
    ({"messages": [{"role": "user", "content": "", "tool_calls": [{"function": {"name": "f"}}]}]},
     "messages[0].tool_calls", "only for the role assistant"),
    ({"chat_template_kwargs": {"enable_thinking": 1}}, "chat_template_kwargs", "true or false"),
    ({"chat_template_kwargs": {"x": 2**70}}, "chat_template_kwargs", "64 bits"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "is missing"),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": DEEP}}},
     "response_format.json_schema.schema", "nested deeper than"),
    ({"guided_regex": ""}, "guided_regex", "is missing"),
    ({"guided_regex": "a", "guided_json": "{}"}, "guided_json", "exclude each other"),
    ({"guided_choice": []}, "guided_choice", "must not be empty"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field", "says"), WRONG, ids=lambda value: str(value)[:60])
def test_the_error_names_the_field(fields: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.detail["field"].startswith(field)
    assert says in caught.value.message


def test_efforts_that_no_template_knows_are_never_refused() -> None:
    # zed#63216: a client sends the efforts of another server.
    for effort in ("minimal", "low", "medium", "high", "xhigh", "max", "default"):
        assert options(reasoning_effort=effort).effort == effort
