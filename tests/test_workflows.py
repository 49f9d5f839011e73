"""Make targets, kvctl commands and options that the GitHub workflows run exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TESTS = ROOT / ".github/workflows/tests.yml"
EVERYWHERE = {"curl", "unshare"}
"""Programs that every machine for workflows has."""


def jobs(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(path.read_text())["jobs"]
    return found


def commands(path: Path) -> list[list[str]]:
    """Return the commands of a workflow. Each GitHub expression is replaced with one word."""
    lines = [
        line
        for job in jobs(path).values()
        for step in job["steps"]
        for line in step.get("run", "").splitlines()
    ]
    return [shlex.split(re.sub(r"\$\{\{.*?\}\}", "EXPRESSION", line)) for line in lines]


def test_workflows_exist():
    assert {path.stem for path in WORKFLOWS} >= {"tests", "selftest"}


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_have_time_limits_and_may_only_read(path: Path):
    whole = yaml.safe_load(path.read_text())
    assert whole["permissions"] == {"contents": "read"}
    for job in jobs(path).values():
        assert 0 < job["timeout-minutes"] <= 60
        systems = job["strategy"]["matrix"]
        named = systems.get("os") or [one["os"] for one in systems["include"]]
        assert {"ubuntu-latest", "macos-latest"} <= set(named)
        for step in job["steps"]:
            assert "run" in step or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_what_workflows_run_exists(path: Path):
    makefile = (ROOT / "Makefile").read_text()
    for words in commands(path):
        if words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE)
            for setting in words[2:]:
                assert re.search(rf"^{setting.partition('=')[0]} \?=", makefile, re.MULTILINE)
        elif words[0] == "kvctl":
            page = [sys.executable, "-m", "kvd.cli", words[1], "--help"]
            done = subprocess.run(page, capture_output=True, text=True, check=True)
            for option in (word for word in words if word.startswith("--")):
                assert option in done.stdout
        else:
            assert words[0] in {"sudo", "python", "cat"}


def test_the_workflow_installs_the_programs_that_tests_need():
    """Tests are skipped if a program is missing. The workflow installs all those programs."""
    packages = {
        "cc": "g++",
        "g++": "g++",
        "nginx": "nginx",
        "plistutil": "libplist-utils",
        "prometheus": "prometheus",
        "promtool": "prometheus",
        "ruby": "ruby",
        "systemd-analyze": "systemd",
    }
    (installed,) = [
        words for words in commands(TESTS) if words[:3] == ["sudo", "apt-get", "install"]
    ]
    for path in (ROOT / "tests").rglob("*.py"):
        for program in re.findall(r'which\("([^"]+)"\) is None', path.read_text()):
            assert packages.get(program, program) in {*installed, *EVERYWHERE}, path
    assert {*packages.values()} <= {*installed}


def test_types_are_checked_alike_on_every_system():
    """With macOS as platform, mypy would report code that is only for Linux as unreachable."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]
    assert settings["platform"] == "linux"
