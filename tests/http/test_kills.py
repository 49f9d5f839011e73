"""Kill -9 of the worker in the middle of reasoning, of a call and of JSON: the stream continues."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx
import pytest

from tests.http.kills import KINDS, deltas, is_new, joined, kill_in_parts, text_of
from tests.http.live import Live
from tests.process.helpers import source, wait_for

KILLS = 10
"""Kills for each kind of part: as many after its first piece as after its second."""
SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string"} for name in ("city", "street", "country")},
}
TOOL = {"type": "function", "function": {"name": "send", "parameters": SCHEMA}}
REASONING = {"tools": [TOOL]}
CALL = {"tools": [TOOL], "tool_choice": "required"}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields"), [("reasoning", REASONING), ("call", CALL), ("json", JSON)]
)
def test_streams_continue_to_the_byte_after_a_kill_9(
    live_alone: Live, kind: str, fields: dict[str, Any]
) -> None:
    live = live_alone
    live.load(source(tps=250), "m")
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


@pytest.mark.mlx
@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_streams_of_a_model_continue_to_the_byte_after_a_kill_9(demo: Live, kind: str) -> None:
    assert len(list(kill_in_parts(demo, kind, 2))) == 2
