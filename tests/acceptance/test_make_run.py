"""`make run`, the first command of the README."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvd.host.home import Home
from tests.process.helpers import wait_for

pytestmark = [pytest.mark.mlx, pytest.mark.process]

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_make_run_serves_the_embedded_model_and_suggests_commands(home: Home) -> None:
    process = subprocess.Popen(
        ["make", "--no-print-directory", "run", f"VENV={sys.prefix}"],
        cwd=ROOT,
        env={**os.environ, "KVD_HOME": str(home.root)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if "Ctrl-C" in line:
                break
        reported = "".join(lines)
        assert str(home.socket) in reported, reported
        commands = [line.split("kvctl", 1)[1].split() for line in lines if "kvctl --home" in line]
        assert len(commands) == 3
        kvctl = str(Path(sys.prefix) / "bin" / "kvctl")
        status = subprocess.run(
            [kvctl, "--home", str(home.root), "status", "--json"],
            capture_output=True,
            text=True,
            check=True,
        )
        answer = json.loads(status.stdout)
        assert [(model["name"], model["state"]) for model in answer["models"]] == [
            ("demo", "ready")
        ]
        os.kill(answer["pid"], signal.SIGTERM)
        rest, _ = process.communicate(timeout=30)
        assert process.returncode == 0, rest
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    wait_for("the socket is gone", lambda: not home.socket.exists())
