"""A value of a wrong type in any field of any request is an error of that request, and no bug."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from msgspec.structs import fields

from kvd.http import embeddings, reading
from kvd.http.messages_api import reading as messages_reading
from kvd.http.messages_api.requests import MessagesRequest
from kvd.http.ollama_api import reading as ollama_reading
from kvd.http.ollama_api import requests as ollama_requests
from kvd.http.requests import ChatRequest, CompletionRequest
from kvd.http.responses_api import reading as responses_reading
from kvd.http.responses_api.requests import ResponsesRequest
from kvd.http.responses_api.store import Store
from kvd.http.tokenizing import TokenizeRequest
from protocol.errors import InvalidRequest

Read = Callable[[bytes], Any]
HI = [{"role": "user", "content": "Hi"}]
WRONG = [
    None, True, -1, 0, 3, 1e308, 10**30, "", "\x00", "x" * 5000, "auto", [], {}, [[]], [None], [""],
    {"a": {}}, {"type": "x"}, {"type": None}, [{"type": "function"}], [{"role": "assistant"}],
    [{"role": "user", "content": [{"type": "text"}]}], [1, "a"], msgspec.Raw(b'"\\ud800"'),
    msgspec.Raw(b"1e999"), {"type": "json_schema", "json_schema": {"schema": {"type": 7}}},
]  # fmt: skip


def openai(kind: type[ChatRequest | CompletionRequest]) -> Read:
    return lambda body: reading.calls(reading.read(body, kind))


def anthropic(read: Callable[[MessagesRequest], Any]) -> Read:
    return lambda body: read(reading.decode(body, MessagesRequest))


def ollama(kind: type[Any]) -> Read:
    return lambda body: ollama_reading.call(reading.decode(body, kind), "m")


KINDS: dict[type[msgspec.Struct], tuple[dict[str, Any], list[Read]]] = {
    ChatRequest: ({"messages": HI}, [openai(ChatRequest)]),
    CompletionRequest: ({"prompt": "Hi"}, [openai(CompletionRequest)]),
    ResponsesRequest: (
        {"input": "Hi"},
        [lambda body: responses_reading.read(body, Store(lambda: 0.0), None, 0)],
    ),
    MessagesRequest: (
        {"messages": HI},
        [anthropic(messages_reading.wanted), anthropic(messages_reading.text_to_count)],
    ),
    embeddings.EmbeddingRequest: (
        {"input": "Hi"},
        [lambda body: reading.decode(body, embeddings.EmbeddingRequest).calls],
    ),
    TokenizeRequest: (
        {"prompt": "Hi"},
        [lambda body: reading.decode(body, TokenizeRequest).call],
    ),
    ollama_requests.ChatRequest: (
        {"messages": HI},
        [ollama(ollama_requests.ChatRequest)],
    ),
    ollama_requests.GenerateRequest: (
        {"prompt": "Hi"},
        [ollama(ollama_requests.GenerateRequest)],
    ),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_a_wrong_value_is_an_invalid_request(kind):
    valid, reads = KINDS[kind]
    refused: list[str] = []
    for field in fields(kind):
        for value in WRONG:
            body = msgspec.json.encode({"model": "m"} | valid | {field.encode_name: value})
            for read in reads:
                try:
                    read(body)
                except InvalidRequest as error:
                    refused.append(error.message)
    assert len(refused) > len(WRONG)
    assert all(refused)
