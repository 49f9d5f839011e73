"""Codex edits a file with the embedded model: the real program, worker, tokens and patch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.http.live import Live
from tests.http.responses_api.forcing import forcing
from tests.http.responses_api.test_codex import Session, needs_codex
from tests.worker.grammar.patches import matches

NARROW = r"""
start: "*** Begin Patch" LF edit "*** End Patch" LF
edit: "*** Update File: hello.txt" LF "@@" LF "-Hello" LF "+Hello, " WORD LF
WORD: /[a-z]{3,8}/

%import common.LF
"""
"""One patch, in which the model chooses a word."""


@needs_codex
@pytest.mark.clients
@pytest.mark.mlx
def test_codex_edits_a_file_with_the_embedded_model(demo: Live, tmp_path: Path) -> None:
    with forcing(demo.url, NARROW) as passed:
        session = Session(demo, tmp_path, "demo", passed.url)
        (session.folder / "hello.txt").write_text("Hello\n")
        status, found, _ = session.exec("Greet the world in hello.txt.")

    assert status == 0, (found[-3:], passed.answers)
    edited = (session.folder / "hello.txt").read_text()
    assert re.fullmatch(r"Hello, [a-z]{3,8}\n", edited), edited
    kinds = [it["item"]["type"] for it in found if it["type"] == "item.completed"]
    assert "file_change" in kinds
    tools = {tool.get("name"): tool for tool in passed.bodies[0]["tools"]}
    own = tools["apply_patch"]["format"]["definition"]
    call = next(it for it in passed.bodies[1]["input"] if it["type"] == "custom_tool_call")
    assert matches(call["input"], own), "the narrow grammar is a part of Codex's own"
