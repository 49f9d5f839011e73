"""Tools, reasoning and JSON with the embedded model, which calls tools and reasons by itself."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.http.kills import SHORT, deltas, text_of
from tests.http.live import Live

pytestmark = pytest.mark.mlx

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather", "description": "Get the weather of a city.", "parameters": SCHEMA,
    },
}  # fmt: skip
ASKED = {"role": "user", "content": "What is the weather in Paris?"}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
PARIS = ("get_weather", '{"city": "Paris"}')


@pytest.fixture
def client(demo: Live):
    with httpx.Client(base_url=demo.url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, *more: dict[str, Any], **fields: Any) -> tuple[dict[str, Any], str]:
    """Return the message of a greedy answer, and why it ended."""
    body = {"model": "demo", "messages": [ASKED, *more], "temperature": 0, "max_tokens": 80}
    answer = client.post("/v1/chat/completions", json=body | fields)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["message"], choice["finish_reason"]


def test_the_abilities_are_advertised(client: httpx.Client):
    listed = client.get("/v1/models").json()["data"]
    chat = next(one["kvd"]["chat"] for one in listed if one["id"] == "demo")
    assert chat["tools"] == "json in <tool_call>"
    assert (chat["tool_results"], chat["reasoning_switch"]) == (True, True)
    assert chat["reasoning"] == "<think>"


@pytest.mark.parametrize("choice", ["auto", "required", NAMED])
@pytest.mark.parametrize("thinks", [None, True])
def test_a_call_and_the_answer_after_its_result(client: httpx.Client, choice: Any, thinks: Any):
    fields = {"tools": [TOOL], "tool_choice": choice}
    if thinks:
        fields["chat_template_kwargs"] = {"enable_thinking": True}
    message, end = ask(client, **fields)
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == PARIS
    assert (end, message["content"]) == ("tool_calls", None)
    assert bool(message.get("reasoning_content")) is bool(thinks)
    body = {"model": "demo", "messages": [ASKED], "temperature": 0, "max_tokens": 80}
    found = deltas(client, body | fields)
    pieces = [text for one in found if (text := text_of(one, "call"))]
    assert (len(pieces) > 4, "".join(pieces)) == (True, PARIS[1])
    reasoning = "".join(text_of(one, "reasoning") for one in found)
    assert reasoning == (message.get("reasoning_content") or "")
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny, 21 degrees"}
    message, end = ask(client, message, result, tools=[TOOL])
    assert (message["content"], end) == ("Sunny, 21 degrees.", "stop")


def test_without_a_choice_of_tools_there_is_no_call(client: httpx.Client):
    message, end = ask(client, tools=[TOOL], tool_choice="none")
    assert (message.get("tool_calls"), bool(message["content"]), end) == (None, True, "stop")


@pytest.mark.parametrize("switch", [{}, {"enable_thinking": False}, {"enable_thinking": True}])
def test_json_begins_with_reasoning_only_if_it_is_on(client: httpx.Client, switch: dict[str, Any]):
    schema = SHORT | {"properties": {"city": {"type": "string", "maxLength": 9}}}
    schema["required"] = ["city"]
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    message, _ = ask(client, response_format=form, **switch)
    assert bool(message.get("reasoning_content")) is (switch.get("enable_thinking") is True)
    assert json.loads(message["content"]).keys() == {"city"}
