"""Kills of a real worker in the middle of reasoning, of JSON and of a call, and what streams show.

`tests/http/test_kills.py` has two kills of each kind. More of them:

    python -m tests.http.kills --kills 10

starts a daemon with the embedded model, kills its worker 30 times with SIGKILL, prints a line for
each kill, and fails at the first stream that does not continue to the byte.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from kvd.host.home import Home
from tests.http.live import Live, stopped
from tests.process.helpers import wait_for, write_config

SHORT = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 40}, "days": {"enum": [3, 5]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "forecast", "parameters": SHORT}}
_JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SHORT}}
_THINKING = {"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True}
KINDS: dict[str, dict[str, Any]] = {
    "reasoning": _THINKING | {"max_tokens": 24},
    "json": {"response_format": _JSON, "max_tokens": 80},
    "call": {"tools": [_TOOL], "tool_choice": "required", "max_tokens": 80},
}
"""Fields of a request whose answer has a part of this kind."""


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


def kill_in_parts(live: Live, kind: str, kills: int, seed: int = 3) -> Iterator[str]:
    """Kill the embedded model's worker in the middle of answers; yield a line for each kill.

    The kills are spread over the pieces of the part in the first half of the answer. Each stream
    must be that of an undisturbed request, byte for byte, and a call or JSON must parse.
    """
    name = f"parts-{kind}"
    live.load("demo", name)
    with httpx.Client(base_url=live.url, timeout=120) as client:
        ask = {"model": name, "seed": seed, "messages": [{"role": "user", "content": "Hi"}]}
        body = KINDS[kind] | ask
        found = deltas(client, body)
        expected = joined(found)
        pieces = sum(bool(text_of(delta, kind)) for delta in found)
        assert pieces > 4, expected
        for number in range(kills):
            left = 1 + number * (pieces // 2) // kills
            pid = live.worker_pid(name)
            seen = 0

            def kill(delta: dict[str, Any], pid: int = pid, left: int = left) -> None:
                nonlocal seen
                seen += bool(text_of(delta, kind))
                if seen == left and text_of(delta, kind):
                    os.kill(pid, signal.SIGKILL)

            begin = time.monotonic()
            assert joined(deltas(client, body, kill)) == expected, (kind, left)
            wait_for("the next worker", lambda pid=pid: is_new(live, name, pid))
            seconds = time.monotonic() - begin
            yield f"{kind}: killed after piece {left} of {pieces}, same bytes, {seconds:.1f} s"
        if kind != "reasoning":
            text = expected[3 if kind == "json" else 4]
            assert json.loads(text).keys() == SHORT["properties"].keys()
    with live.client() as kvd:
        kvd.unload(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10, help="kills of each kind")
    parser.add_argument("--seed", type=int, default=3, help="seed of the answers")
    options = parser.parse_args()
    root = Path(tempfile.mkdtemp(prefix="kvd-"))
    daemon = Live(write_config(Home(root / "h"), "[http]\nport = 0\n"))
    with stopped(daemon):
        daemon.start()
        count = 0
        for kind in KINDS:
            for line in kill_in_parts(daemon, kind, options.kills, options.seed):
                count += 1
                sys.stdout.write(f"{count:3} {line}\n")
                sys.stdout.flush()
    shutil.rmtree(root, ignore_errors=True)
    sys.stdout.write(f"{count} kills: all streams continued to the byte\n")


if __name__ == "__main__":
    main()
