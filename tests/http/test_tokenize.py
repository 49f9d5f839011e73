"""``/v1/tokenize`` and ``/tokenize``, against a daemon on the fake engine and a scripted one."""

from __future__ import annotations

import httpx
import pytest

from protocol.tools import Tool
from protocol.types import ChatMessage
from tests.http.live import Live
from tests.http.stage import serving

HELLO = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("path", ["/v1/tokenize", "/tokenize"])
def test_tokens_of_a_prompt(client: httpx.Client, path: str):
    reply = client.post(path, json={"model": "fast", "prompt": "Hi", "add_special_tokens": True})
    assert reply.json() == {
        "count": 2,
        "max_model_len": 16_384,
        "tokens": [72, 105],
        "token_strs": None,
    }


def test_texts_of_tokens_and_a_limit(client: httpx.Client):
    body = {"model": "fast", "prompt": "Hello", "return_token_strs": True, "limit": 2}
    reply = client.post("/v1/tokenize", json=body).json()
    assert (reply["count"], reply["tokens"]) == (5, [72, 101])
    assert reply["token_strs"] == ["H", "e"]


def test_messages_are_counted_as_a_chat_counts_them(live: Live, client: httpx.Client):
    counted = client.post("/v1/tokenize", json={"model": "fast", "messages": HELLO}).json()
    chat = {"model": "fast", "messages": HELLO, "max_tokens": 1}
    answer = client.post("/v1/chat/completions", json=chat).json()
    assert counted["count"] == answer["usage"]["prompt_tokens"]


def test_an_unloaded_model_is_loaded(live_alone: Live):
    with httpx.Client(base_url=live_alone.url, timeout=30) as client:
        reply = client.post("/v1/tokenize", json={"model": "on-demand", "prompt": "Hi"}).json()
    assert (reply["count"], reply["max_model_len"]) == (2, 16_384)


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({}, 400, "exactly one of prompt and messages"),
        ({"prompt": "Hi", "messages": HELLO}, 400, "exactly one of prompt and messages"),
        ({"prompt": "Hi", "model": "nope"}, 404, "no model"),
        ({"messages": [{"role": "user"}]}, 400, "messages[0].content is missing"),
        ({"promt": "Hi"}, 400, "did you mean prompt?"),
    ],
)
def test_refused(client: httpx.Client, fields, status: int, message: str):
    reply = client.post("/v1/tokenize", json={"model": "fast"} | fields)
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]


async def test_tools_and_settings_of_the_conversation_count(home):
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    body = {"model": "m", "messages": HELLO, "tools": [tool], "enable_thinking": False}
    async with serving(home) as stage, httpx.AsyncClient() as client:
        assert (await client.post(f"{stage.url}/v1/tokenize", json=body)).status_code == 200
    (asked,) = stage.backend.texts
    assert asked.messages == [ChatMessage("user", "Hi")]
    assert asked.chat.tools == [Tool("weather", "", {"type": "object"})]
    assert asked.chat.reasoning is False
