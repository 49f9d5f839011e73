"""litellm, over OpenAI's API and over Ollama's, against a daemon on the fake engine."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.http.live import Live

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]

HELLO = [{"role": "user", "content": 'call weather {"city": "Paris"}'}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@pytest.fixture
def litellm(monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it would ask the network
    installed = str(Path(sys.prefix) / "clients" / "python")
    monkeypatch.setattr(sys, "path", [*sys.path, installed])  # its dependencies replace none
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("litellm")


def of_openai(live: Live, **fields: Any) -> dict[str, Any]:
    return {"model": "openai/fast", "api_base": f"{live.url}/v1", "api_key": "none"} | fields


def test_chats_and_tools(litellm, live: Live):
    asked = of_openai(live, messages=HELLO, tools=[WEATHER], seed=3)
    whole = litellm.completion(**asked).choices[0]
    (call,) = whole.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Paris"}')
    assert whole.finish_reason == "tool_calls"
    chunks = list(litellm.completion(**asked, stream=True))
    joined = litellm.stream_chunk_builder(chunks).choices[0]
    assert joined.message.content == whole.message.content
    assert joined.message.tool_calls[0].function.arguments == call.function.arguments
    assert joined.message.reasoning_content == whole.message.reasoning_content


def test_embeddings(litellm, live: Live):
    answer = litellm.embedding(**of_openai(live, input=["Hello", "there"]))
    with live.client() as kvd:
        wanted = [kvd.embed("fast", text) for text in ("Hello", "there")]
    assert [one["embedding"] for one in answer.data] == wanted
    assert answer.usage.prompt_tokens == 10


def test_ollamas_api(litellm, live: Live):
    asked = {"model": "ollama_chat/fast", "api_base": live.url, "seed": 3, "max_tokens": 8}
    whole = litellm.completion(messages=HELLO, **asked).choices[0].message.content
    chunks = litellm.completion(messages=HELLO, stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole
    answer = litellm.embedding(model="ollama/fast", api_base=live.url, input=["Hello"])
    with live.client() as kvd:
        assert answer.data[0]["embedding"] == kvd.embed("fast", "Hello")
