"""Requests to `POST /v1/responses`, and answers of a scripted daemon with parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import httpx

from kvd.http.responses_api import reading
from kvd.http.responses_api.store import Store
from kvd.http.responses_api.wanted import Wanted
from protocol import messages
from protocol.messages import Event, Generate
from protocol.parts import PartStart
from protocol.types import Usage
from tests.http.stage import Script

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Current weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'},
}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "Other agents",
    "tools": [{"type": "function", "name": "close", "parameters": {"type": "object"}}],
}

Part = tuple[str, str] | tuple[str, str, str, str]
"""Kind and text; for a call also its name and id."""


def read(store: Store | None = None, owner: str | None = None, /, **fields: Any) -> Wanted:
    """Read a request for the model ``m``."""
    body = json.dumps({"model": "m", "input": "Hi"} | fields).encode()
    return reading.read(body, store or Store(lambda: 0.0), owner, 1_000)


def parts(*given: Part, cut: int = 3, reason: str = "stop", reasoning_tokens: int = 0) -> Script:
    """Return a script whose answer has these parts, in events of ``cut`` characters."""

    def script(_: Generate) -> Sequence[Event]:
        begun: list[Event] = [messages.Accepted(id="http", prompt_tokens=3, seed=7)]
        usage = Usage(
            prompt_tokens=5,
            completion_tokens=9,
            cached_tokens=2,
            levels=[0],
            reasoning_tokens=reasoning_tokens,
        )
        done = messages.Done(id="http", reason=reason, usage=usage)
        return [*begun, *events_of(given, cut), done]

    return script


def events_of(given: Sequence[Part], cut: int) -> list[Event]:
    text, starts = "", []
    for kind, content, *call in given:
        starts.append(PartStart(len(text.encode()), kind, *call))
        text += content
    found: list[Event] = []
    at = 0
    for index in range(0, max(1, len(text)), cut):
        piece = text[index : index + cut]
        end = at + len(piece.encode())
        last = index + cut >= len(text)
        here = [start for start in starts if start.at < end or last]
        starts = [start for start in starts if start not in here]
        found.append(messages.Tokens(id="http", index=index, tokens=[1], text=piece, parts=here))
        at = end
    return found


async def post(url: str, headers: dict[str, str] | None = None, /, **fields: Any) -> httpx.Response:
    async with httpx.AsyncClient() as client:
        body = {"model": "m", "input": "Hi"} | fields
        return await client.post(f"{url}/v1/responses", json=body, headers=headers)


def events(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream; each has its type in both places, and its number."""
    found = []
    for block in text.split("\n\n")[:-1]:
        kind, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert kind == f"event: {event['type']}"
        assert event["sequence_number"] == len(found)
        found.append(event)
    return found
