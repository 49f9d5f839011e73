"""Real agents that `kvctl launch` starts work on files; `make clients` installs them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.http.live import Live
from tests.process.helpers import source

BIN = Path(__file__).parents[2] / ".venv" / "clients" / "node_modules" / ".bin"
PATH = f"{BIN}:{os.environ['PATH']}"
pytestmark = pytest.mark.clients


def needs(program: str) -> pytest.MarkDecorator:
    found = shutil.which(program, path=PATH)
    return pytest.mark.skipif(found is None, reason=f"needs {program}: `make clients`")


def launch(live: Live, root: Path, agent: str, *arguments: str) -> Path:
    """Run an agent in a new folder, with a home of its own; return the folder."""
    live.load(source(tps=2000, context=65536), "agent")
    project, home = root / "project", root / "home"
    project.mkdir()
    home.mkdir()
    (project / "hello.txt").write_text("Hello\n")
    command = [sys.executable, "-m", "kvd.cli", "--home", str(live.home.root), "launch", agent]
    done = subprocess.run(
        [*command, "--model", "agent", "--", *arguments],
        cwd=project,
        env={"PATH": PATH, "HOME": str(home), "NO_COLOR": "1", "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return project


@needs("codex")
def test_codex(live: Live, tmp_path: Path):
    call = "call exec_command " + json.dumps({"cmd": "echo done > made.txt"})
    flags = ("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox")
    project = launch(live, tmp_path, "codex", "exec", *flags, call)
    assert (project / "made.txt").read_text() == "done\n"


@needs("opencode")
def test_opencode(live: Live, tmp_path: Path):
    # Without spaces in an argument, which opencode would quote.
    given = json.dumps(
        {"command": "echo\tdone>made.txt", "description": "x"}, separators=(",", ":")
    )
    project = launch(live, tmp_path, "opencode", "run", "call", "bash", given)
    assert (project / "made.txt").read_text() == "done\n"
