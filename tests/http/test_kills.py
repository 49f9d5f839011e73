"""Kill -9 of the worker in the middle of reasoning, of a call and of JSON: the stream continues."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx
import pytest

from tests.http.live import Live
from tests.process.helpers import source, wait_for

KILLS = 10
"""Kills for each kind of part."""
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("city", "street", "country")},
}
TOOL = {"type": "function", "function": {"name": "send", "parameters": SCHEMA}}
REASONING = {"tools": [TOOL]}
CALL = {"tools": [TOOL], "tool_choice": "required"}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}


def text_of(delta: dict[str, Any], kind: str) -> str:
    """Return what a delta adds to parts of this kind."""
    if kind != "call":
        return delta.get("content" if kind == "json" else "reasoning_content") or ""
    return "".join(call["function"]["arguments"] for call in delta.get("tool_calls", ()))


def deltas(client: httpx.Client, body: dict[str, Any], kill: Any = None) -> list[dict[str, Any]]:
    """Return the deltas of a stream; ``kill`` is called with each of them."""
    found = []
    with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            found.append(chunk["choices"][0]["delta"])
            found[-1] |= {"end": chunk["choices"][0]["finish_reason"]}
            if kill is not None:
                kill(found[-1])
    return found


def is_new(live: Live, name: str, pid: int) -> bool:
    """Return whether the model has another worker than this one."""
    return live.model(name).worker_pid not in {pid, None}


def joined(found: list[dict[str, Any]]) -> tuple[Any, ...]:
    calls = [call for delta in found for call in delta.get("tool_calls", ()) if "id" in call]
    names = [(call["index"], call["function"]["name"]) for call in calls]
    kinds = ("reasoning", "json", "call")
    return (
        names,
        found[-1]["end"],
        *("".join(text_of(it, kind) for it in found) for kind in kinds),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields"), [("reasoning", REASONING), ("call", CALL), ("json", JSON)]
)
def test_streams_continue_to_the_byte_after_a_kill_9(
    live_alone: Live, kind: str, fields: dict[str, Any]
) -> None:
    live = live_alone
    live.load(source(tps=100), "m")
    killed = 0
    with httpx.Client(base_url=live.url, timeout=60) as client:
        for seed in range(KILLS):
            body = {"model": "m", "seed": seed, "messages": [{"role": "user", "content": "Hi"}]}
            expected = joined(deltas(client, body | fields))
            left = 1 + seed % 2  # the kill comes after so many pieces of the part
            pid = live.worker_pid("m")

            def kill(delta: dict[str, Any], pid: int = pid) -> None:
                nonlocal left, killed
                left -= bool(text_of(delta, kind))
                if left == 0:
                    left, killed = -1, killed + 1
                    os.kill(pid, signal.SIGKILL)

            assert joined(deltas(client, body | fields, kill)) == expected
            wait_for("the next worker", lambda pid=pid: is_new(live, "m", pid))
            if kind != "reasoning":
                text = expected[3 if kind == "json" else 4]
                assert json.JSONDecoder().raw_decode(text)[0].keys() == SCHEMA["properties"].keys()
    assert killed == KILLS


SHORT = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "days": {"enum": [3, 5]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
SHORT_TOOL = {"type": "function", "function": {"name": "forecast", "parameters": SHORT}}
SHORT_JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SHORT}}
THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True}


@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("reasoning", THINKING | {"max_tokens": 24}),
        ("json", {"response_format": SHORT_JSON, "max_tokens": 80}),
        ("call", {"tools": [SHORT_TOOL], "tool_choice": "required", "max_tokens": 80}),
    ],
)
def test_streams_of_a_model_continue_to_the_byte_after_a_kill_9(
    demo: Live, kind: str, fields: dict[str, Any]
) -> None:
    name = f"parts-{kind}"
    demo.load("demo", name)
    with httpx.Client(base_url=demo.url, timeout=120) as client:
        body = fields | {"model": name, "seed": 3, "messages": [{"role": "user", "content": "Hi"}]}
        found = deltas(client, body)
        expected = joined(found)
        pieces = sum(bool(text_of(delta, kind)) for delta in found)
        assert pieces > 4, expected
        for left in (1, pieces // 3, pieces // 2):
            pid = demo.worker_pid(name)
            seen = 0

            def kill(delta: dict[str, Any], pid: int = pid, left: int = left) -> None:
                nonlocal seen
                seen += bool(text_of(delta, kind))
                if seen == left and text_of(delta, kind):
                    os.kill(pid, signal.SIGKILL)

            assert joined(deltas(client, body, kill)) == expected
            wait_for("the next worker", lambda pid=pid: is_new(demo, name, pid))
        if kind != "reasoning":
            text = expected[3 if kind == "json" else 4]
            assert json.loads(text).keys() == SHORT["properties"].keys()
    with demo.client() as kvd:
        kvd.unload(name)
