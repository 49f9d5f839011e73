"""Codex CLI: a recorded request, and the program itself where npm has installed it.

`make clients` installs it. `codex_turn.json` is the second request of a session of version
0.169.0, with other texts and fewer properties.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvd.http.responses_api.answer import ResponseAnswer
from protocol import messages
from protocol.tools import ToolCall
from protocol.types import ChatMessage, Usage
from tests.http.live import Live
from tests.http.responses_api.asked import events, events_of, read
from tests.process.helpers import source

ROOT = Path(__file__).parents[3]
TURN: dict[str, Any] = json.loads((Path(__file__).parent / "codex_turn.json").read_text())
INSTALLED = ROOT / ".venv" / "clients" / "node_modules" / ".bin" / "codex"
CODEX = str(INSTALLED) if INSTALLED.exists() else shutil.which("codex")
PATCH = "*** Begin Patch\n*** Update File: hello.txt\n@@\n-Hello\n+Hello, world\n*** End Patch\n"

USAGE = Usage(prompt_tokens=1, completion_tokens=1)

needs_codex = pytest.mark.skipif(CODEX is None, reason="needs codex: `make clients`")


def test_a_recorded_turn_is_read_completely():
    wanted = read(**TURN)
    assert wanted.ignored == {"item": 0, "reasoning": 0, "tool": 1}, "web_search"
    assert wanted.call.messages == [
        ChatMessage(
            "system",
            "You are a coding agent. Work in the user's project.\n\nSkills: none are installed.\n"
            "Rules of the sandbox, part 1.",
        ),
        ChatMessage("user", "The working directory is /project, the shell is bash."),
        ChatMessage("user", "Greet the world in hello.txt."),
        ChatMessage(
            "assistant",
            "I change the file.",
            "A greeting needs a comma.",
            [
                ToolCall(
                    "apply_patch", json.dumps({"input": PATCH}, separators=(",", ":")), "a1b2c3d4e"
                )
            ],
        ),
        ChatMessage(
            "tool",
            "Exit code: 0\nOutput:\nhello.txt is changed.\n",
            tool_call_id="a1b2c3d4e",
            name="apply_patch",
        ),
    ]
    names = {tool.name: tool for tool in wanted.call.chat.tools}
    assert names["apply_patch"].grammar.kind == "lark"
    assert "multi_agent_v1__close_agent" in names
    assert wanted.summary
    assert wanted.sealed
    assert not wanted.store


def test_a_grammar_of_a_custom_tool_reaches_the_model_and_its_input_comes_back():
    """Servers that drop the tool leave Codex without edits, silently."""
    answer = ResponseAnswer(read(**TURN), 0.0, lambda: 1)
    call = ("call", json.dumps({"input": PATCH}), "apply_patch", "z9")
    data = b"".join(answer.handle(0, event, 0.0) for event in events_of([call], 5))
    data += answer.handle(0, messages.Done(id="h", reason="stop", usage=USAGE), 0.0)
    found = events(data.decode())
    inputs = [it["delta"] for it in found if it["type"] == "response.custom_tool_call_input.delta"]
    assert "".join(inputs) == PATCH
    done = next(it["item"] for it in found if it["type"] == "response.output_item.done")
    assert (done["type"], done["input"], done["call_id"]) == ("custom_tool_call", PATCH, "z9")


def test_a_recorded_turn_is_answered_by_a_daemon(live: Live):
    body = TURN | {"model": "fast"}
    with httpx.Client(timeout=30) as client:
        found = events(client.post(f"{live.url}/v1/responses", json=body).text)
        metrics = client.get(f"{live.url}/metrics").text
    assert found[-1]["type"] == "response.completed"
    assert found[-1]["response"]["output"]
    assert 'kvd_http_ignored_total{path="/v1/responses",what="tool"}' in metrics


class Session:
    """Runs Codex in a folder, with a configuration that points at a daemon, or at ``url``."""

    def __init__(self, live: Live, root: Path, model: str, url: str | None = None) -> None:
        self.folder = root / "project"
        self.folder.mkdir()
        self._home = root / "codex"
        self._home.mkdir()
        catalogue = self._home / "models.json"
        catalogue.write_bytes(httpx.get(f"{live.url}/v1/models").content)
        (self._home / "config.toml").write_text(
            f'model = "{model}"\nmodel_provider = "kvd"\n'
            f"model_catalog_json = {json.dumps(str(catalogue))}\n"
            '[model_providers.kvd]\nname = "kvd"\nwire_api = "responses"\n'
            f'base_url = "{url or live.url}/v1"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
        )

    def exec(self, prompt: str) -> tuple[int, list[dict[str, Any]], str]:
        """Return the exit status, the events and the errors."""
        assert CODEX is not None
        done = subprocess.run(
            [
                *(CODEX, "exec", "--json", "--skip-git-repo-check"),
                *("--dangerously-bypass-approvals-and-sandbox", prompt),
            ],
            cwd=self.folder,
            env=os.environ | {"CODEX_HOME": str(self._home)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        return done.returncode, lines, done.stderr


@needs_codex
@pytest.mark.clients
def test_codex_edits_a_file_with_apply_patch(live: Live, tmp_path: Path):
    live.load(source(tps=2000, context=65536), "agent")
    session = Session(live, tmp_path, "agent")
    (session.folder / "hello.txt").write_text("Hello\n")
    status, found, errors = session.exec("call apply_patch " + json.dumps({"input": PATCH}))
    assert status == 0, errors
    assert (session.folder / "hello.txt").read_text() == "Hello, world\n"
    kinds = [it["item"]["type"] for it in found if it["type"] == "item.completed"]
    assert kinds == ["reasoning", "agent_message", "file_change", "reasoning", "agent_message"]
    assert found[-1]["type"] == "turn.completed"
    assert found[-1]["usage"]["cached_input_tokens"] > 0
    assert "Model metadata" not in errors, "the catalogue of /v1/models is read"


@needs_codex
@pytest.mark.clients
def test_kvctl_launch_codex_gives_it_the_tool_for_patches(live: Live, tmp_path: Path):
    live.load(source(tps=2000, context=65536), "agent")
    (tmp_path / "hello.txt").write_text("Hello\n")
    prompt = "call apply_patch " + json.dumps({"input": PATCH})
    assert CODEX is not None
    done = subprocess.run(
        [
            *live.kvctl_command("launch", "codex", "--model", "agent", "--", "exec"),
            *("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", prompt),
        ],
        cwd=tmp_path,
        env=os.environ
        | {"CODEX_HOME": str(tmp_path), "PATH": f"{Path(CODEX).parent}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "hello.txt").read_text() == "Hello, world\n"


@needs_codex
@pytest.mark.clients
def test_codex_runs_a_command(live: Live, tmp_path: Path):
    live.load(source(tps=2000, context=65536), "agent")
    session = Session(live, tmp_path, "agent")
    status, _, errors = session.exec('call exec_command {"cmd": "echo done > made.txt"}')
    assert status == 0, errors
    assert (session.folder / "made.txt").read_text() == "done\n"


@needs_codex
@pytest.mark.clients
def test_codex_understands_that_the_context_is_full(live: Live, tmp_path: Path):
    live.load(source(tps=2000, context=2048), "narrow")
    status, found, _ = Session(live, tmp_path, "narrow").exec("Hello")
    assert status == 1
    assert "context window" in found[-1]["error"]["message"]
